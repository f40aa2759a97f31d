"""The state of a run: what a checkpoint holds, under logical names, and how it comes back."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.checkpoint.agreed import together
from surefoot.checkpoint.load import Checkpoint, read_parts, read_tensors
from surefoot.checkpoint.parts import Part, whole
from surefoot.checkpoint.read import fill
from surefoot.config import CheckpointError, Config, RunError, flatten
from surefoot.dist.layout import Box, Layout, Place
from surefoot.dist.mesh import AXES, Mesh
from surefoot.models.decoder import Decoder
from surefoot.models.initialise import materialise, named_states, named_weights
from surefoot.optim.base import Optimizer, Param, Storage
from surefoot.parallel.apply import Laid
from surefoot.precision.policy import DEFAULT, PrecisionConfig
from surefoot.train.agree import Ranks, StepFacts
from surefoot.train.run import Run, effect_of_change


@dataclass
class Progress:
    """Counters of a run; all but `seconds` are functions of the configuration and `step`."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    flops: float = 0.0
    clipped_steps: int = 0
    seconds: float = 0.0
    token_hash: str = ""

    def count(
        self, facts: StepFacts, num_samples: int, length: int, flops_per_token: float, *, clipped: bool, seconds: float
    ) -> None:
        """Add one step of `num_samples` sequences of `length`."""
        self.step += 1
        self.samples += num_samples
        self.tokens += facts.num_tokens
        self.flops += num_samples * length * flops_per_token
        self.clipped_steps += clipped
        self.seconds += seconds
        self.token_hash = hashlib.sha256((self.token_hash + facts.digest).encode()).hexdigest()


def named_params(model: Decoder, precision: PrecisionConfig = DEFAULT) -> list[Param]:
    """Every logical weight of a whole model with its name and axes."""
    return [
        Param(full_name, getattr(block, name), axes, storage=_storage(axes, precision))
        for full_name, block, name in named_weights(model)
        for axes in [block.axes[name]]
    ]


def _storage(axes: tuple[str, ...], precision: PrecisionConfig) -> Storage:
    types = precision.types_of(axes)
    return Storage(types.rounding, types.optimizer_state) if precision.is_narrow else Storage()


def states_of(model: nn.Module, mesh: Mesh | None = None) -> list[Param]:
    """What blocks of this rank learn otherwise than by gradient, whole in every layout."""
    return [
        Param(full_name, state, block.states[name], None if mesh is None else Place(Layout(tuple(state.shape)), mesh))
        for full_name, block, name in named_states(model)
        for state in [getattr(block, name)]
        if mesh is None or not state.is_meta
    ]


def laid_params(laid: Laid) -> list[Param]:
    """Every logical weight of a laid-out model, with this rank's part of it."""
    return [
        Param(local.name, local.part, local.axes, Place(local.layout, laid.mesh), _storage(local.axes, laid.precision))
        for local in laid.locals
    ]


def parts_of(params: list[Param], optimizer: Optimizer, ranks: Ranks) -> dict[str, Part]:
    """What this rank writes of a checkpoint, not copied: `model/<weight or state>`, `optim/<weight>/<moment>`, generators'
    states.

    Each entry of each tensor is written by one rank: the one whose copy counts.
    """
    parts: dict[str, Part] = {}
    state = optimizer.state()
    for param in params:
        named = {f"model/{param.name}": param.tensor}
        named |= {f"optim/{param.name}/{moment}": tensor for moment, tensor in state.get(param.name, {}).items()}
        for name, tensor in named.items():
            part = _part(tensor.detach(), param)
            if part is not None:
                parts[name] = part
    if ranks.is_first:
        parts["random/cpu"] = whole(torch.get_rng_state())
        if torch.cuda.is_available():
            parts["random/cuda"] = whole(torch.cuda.get_rng_state())
    return parts


def _part(tensor: Tensor, param: Param) -> Part | None:
    """What this rank writes of a tensor that lies as `param` does, or that is whole on every rank (a count of steps)."""
    place = param.place
    if place is None:
        return whole(tensor)
    is_first = place.counts and not any(place.mesh.coordinates[axis] for axis in AXES if axis != "pipeline")
    if tensor.shape != param.tensor.shape:
        return whole(tensor) if is_first else None
    if not place.counts or (tensor.numel() == 0 and not (is_first and 0 in place.shape)):
        return None
    return Part(place.shape, place.box, tensor)


def load_weights(checkpoint: Checkpoint, params: list[Param]) -> None:
    """Put a checkpoint's weights, or this rank's parts of them, in place; `CheckpointError` where they are not this model's."""
    boxes = {}
    for param in params:
        name = f"model/{param.name}"
        if name not in checkpoint.tensors:
            raise CheckpointError(f"{checkpoint.path}: weight {param.name} is in the model only")
        shape = checkpoint.tensors[name].shape
        if param.shape != shape:
            raise CheckpointError(f"{checkpoint.path}: {param.name} is {shape}, not {param.shape}")
        boxes[name] = (_box(shape, param), param.tensor)
    fill(checkpoint.path, checkpoint.metadata, boxes)


def _refuse_other_weights(checkpoint: Checkpoint, held: Collection[str]) -> None:
    odd = sorted(name for name in checkpoint.tensors if name.startswith("model/") and name[6:] not in held)
    if odd:
        raise CheckpointError(f"{checkpoint.path}: weight {odd[0][6:]} is in it only")


def _box(shape: tuple[int, ...], param: Param) -> Box:
    """This rank's part of a tensor that lies as `param` does; all of others (a count of steps)."""
    return Box.whole(shape) if param.place is None or shape != param.place.shape else param.place.box


def load_model(run: Run, checkpoint: Checkpoint, device: torch.device) -> Decoder:
    """The model of a run with a checkpoint's weights."""
    with torch.device("meta"):
        model = run.model.build().to(run.precision.weight_dtype)
    run.precision.retype(model)
    materialise(model, device)
    params = named_params(model) + states_of(model)
    _refuse_other_weights(checkpoint, {param.name for param in params})
    load_weights(checkpoint, params)
    return model


def restore(checkpoint: Checkpoint, params: list[Param], optimizer: Optimizer, ranks: Ranks) -> Progress:
    """Put a checkpoint's weights and states, moments and generator states in place on all ranks and return its counters.

    Each rank reads what it holds; `CheckpointError`, on all ranks, where the checkpoint is not of this model and optimizer.
    """
    own = {param.name: param for param in params}
    names = sorted({weight for name in checkpoint.tensors if (weight := _weight_of(name)) is not None})
    held = {name for name, is_held in zip(names, ranks.any_of([name in own for name in names]), strict=True) if is_held}
    return together(lambda: _restore(checkpoint, own, held, optimizer), ranks.group)


def _restore(checkpoint: Checkpoint, own: dict[str, Param], held: set[str], optimizer: Optimizer) -> Progress:
    _refuse_other_weights(checkpoint, held)
    load_weights(checkpoint, list(own.values()))
    boxes = {}
    for full_name, record in checkpoint.tensors.items():
        name = _weight_of(full_name)
        # One that no rank holds is kept, so that the optimizer refuses it by name.
        if full_name.startswith("optim/") and (name in own or name not in held):
            boxes[full_name] = _box(record.shape, own[name]) if name in own else Box.whole(record.shape)
    moments: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in read_parts(checkpoint, boxes).items():
        name, _, moment = full_name.removeprefix("optim/").rpartition("/")
        moments.setdefault(name, {})[moment] = tensor
    optimizer.restore(moments)
    random = read_tensors(checkpoint, "random/")
    torch.set_rng_state(random["cpu"])
    if "cuda" in random and torch.cuda.is_available():
        torch.cuda.set_rng_state(random["cuda"])
    progress = checkpoint.state.get("progress")
    if not isinstance(progress, dict) or progress.keys() != vars(Progress()).keys():
        raise CheckpointError(f"{checkpoint.path}: state.json holds no progress; it was not written by surefoot train")
    return Progress(**progress)


def _weight_of(name: str) -> str | None:
    """The weight to which a tensor of a checkpoint belongs; None for a generator's state."""
    kind, _, rest = name.partition("/")
    return {"model": rest, "optim": rest.rpartition("/")[0]}.get(kind)


def compare_configurations(saved: Config, wanted: Config, accepted: tuple[str, ...]) -> list[str]:
    """Say what changed since a run began; `RunError` for a change that would alter it and is not in `accepted`."""
    lines = []
    before, after = flatten(saved), flatten(wanted)
    for path in dict.fromkeys([*before, *after]):
        old, new = before.get(path), after.get(path)
        if old == new:
            continue
        effect = effect_of_change(path)
        if effect == "run" and path not in accepted:
            raise RunError(
                f"{path}: {new!r} was {old!r} when the run began, and changing it makes another run; "
                f"start a new one, or add --accept {path} if that is what you want"
            )
        note = {
            "none": "",
            "rounding": " (results may differ in the last bits)",
            "run": " (accepted: no longer the same run)",
        }
        lines.append(f"changed {path}: {old!r} -> {new!r}{note[effect]}")
    return lines


def compare_machines(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs in software and device since the run began: bits may then differ."""
    lines = []
    for section, keys in (
        ("versions", ("torch", "numpy")),
        ("device", ("name", "threads", "capability", "amx", "kernels")),
    ):
        for key in keys:
            old, new = saved.get(section, {}).get(key), now.get(section, {}).get(key)
            if old != new:
                lines.append(
                    f"{section}.{key} was {old!r} and is {new!r}: the continuation may differ in the last bits"
                )
    return lines
