"""The state of a run: what a checkpoint holds, under logical names, and how it comes back."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.checkpoint.load import Checkpoint, read_tensors
from surefoot.config import CheckpointError, Config, RunError, flatten
from surefoot.dist.layout import Place
from surefoot.models.decoder import Decoder
from surefoot.models.initialise import materialise, named_states, named_weights
from surefoot.optim.base import Optimizer, Param
from surefoot.parallel.apply import Laid
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


def named_params(model: Decoder) -> list[Param]:
    """Every logical weight of a whole model with its name and axes."""
    return [Param(full_name, getattr(block, name), block.axes[name]) for full_name, block, name in named_weights(model)]


def states_of(model: Decoder) -> list[Param]:
    """What blocks learn otherwise than by gradient, whole in every layout."""
    return [
        Param(full_name, getattr(block, name), block.states[name]) for full_name, block, name in named_states(model)
    ]


def laid_params(laid: Laid) -> list[Param]:
    """Every logical weight of a laid-out model, with this rank's part of it."""
    return [
        Param(
            local.name,
            local.part,
            local.axes,
            None if laid.mesh.grid.num_ranks == 1 else Place(local.layout, laid.mesh),
        )
        for local in laid.data_parallel.locals
    ]


def tensors_of(params: list[Param], states: list[Param], optimizer: Optimizer, ranks: Ranks) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole: `model/<weight or state>`, `optim/<weight>/<moment>` and the generators' states."""
    tensors = {f"model/{param.name}": ranks.whole(param.tensor, param) for param in [*params, *states]}
    state = optimizer.state()
    for param in params:
        for moment, tensor in state[param.name].items():
            tensors[f"optim/{param.name}/{moment}"] = ranks.whole(tensor, param)
    tensors["random/cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random/cuda"] = torch.cuda.get_rng_state()
    return tensors


def load_weights(checkpoint: Checkpoint, params: list[Param]) -> None:
    """Put a checkpoint's weights and states, or this rank's parts of them, in place; `CheckpointError` where they are not
    this model's."""
    weights = read_tensors(checkpoint, "model/")
    wanted = {param.name: param for param in params}
    if weights.keys() != wanted.keys():
        odd = sorted(weights.keys() ^ wanted.keys())[0]
        raise CheckpointError(f"{checkpoint.path}: weight {odd} is in {'it' if odd in weights else 'the model'} only")
    with torch.no_grad():
        for name, param in wanted.items():
            if param.shape != tuple(weights[name].shape):
                raise CheckpointError(f"{checkpoint.path}: {name} is {tuple(weights[name].shape)}, not {param.shape}")
            param.tensor.copy_(part_of(weights[name], param))


def load_model(run: Run, checkpoint: Checkpoint, device: torch.device) -> Decoder:
    """The model of a run with a checkpoint's weights."""
    with torch.device("meta"):
        model = run.model.build().to(run.precision.weight_dtype)
    materialise(model, device)
    load_weights(checkpoint, named_params(model) + states_of(model))
    return model


def restore(checkpoint: Checkpoint, params: list[Param], states: list[Param], optimizer: Optimizer) -> Progress:
    """Put a checkpoint's weights, states, moments and generator states in place and return its counters."""
    load_weights(checkpoint, params + states)
    moments: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in read_tensors(checkpoint, "optim/").items():
        name, _, moment = full_name.rpartition("/")
        moments.setdefault(name, {})[moment] = tensor
    for param in params:
        if param.name in moments:
            moments[param.name] = {key: part_of(tensor, param) for key, tensor in moments[param.name].items()}
    optimizer.restore(moments)
    random = read_tensors(checkpoint, "random/")
    torch.set_rng_state(random["cpu"])
    if "cuda" in random and torch.cuda.is_available():
        torch.cuda.set_rng_state(random["cuda"])
    progress = checkpoint.state.get("progress")
    if not isinstance(progress, dict) or progress.keys() != vars(Progress()).keys():
        raise CheckpointError(f"{checkpoint.path}: state.json holds no progress; it was not written by surefoot train")
    return Progress(**progress)


def part_of(full: Tensor, param: Param) -> Tensor:
    """This rank's part of a whole tensor that lies as `param` does; others (a count of steps) as they are."""
    if param.place is None or tuple(full.shape) != param.place.shape:
        return full
    return full[param.place.box.slices]


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
