"""What one rank does to prove its layout: two steps, with an evaluation, a plain update and a new start between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from surefoot.config import CheckpointError
from surefoot.dist.layout import Box
from surefoot.dist.mesh import own_mesh
from surefoot.models.count import build_meta
from surefoot.models.initialise import constant_starts, generator_for
from surefoot.models.late_fusion import LateFusionConfig
from surefoot.models.multimodal import ModelConfig, MultimodalConfig
from surefoot.ops.loss import IGNORED
from surefoot.optim.base import Optimizer, Param, gradients_of
from surefoot.optim.clip import clip_, global_norm
from surefoot.parallel.apply import MicroBatch, lay_out
from surefoot.parallel.plan import Plan
from surefoot.study.resume import stop_and_go_on
from surefoot.train.agree import Ranks
from surefoot.train.run import Run
from surefoot.train.state import laid_params, states_of

BATCH, STEPS = 16, 2
SGD_RATE = 0.1
MAGNITUDES = "largest magnitudes"
"""Of the operands of narrow products, as all ranks know them."""


@dataclass
class Share:
    """What one rank holds of a trial: for each quantity its parts by name, as (box, shape of the whole, values)."""

    parts: dict[str, dict[str, tuple[Box, tuple[int, ...], Tensor]]] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def keep(self, quantity: str, param: Param, values: Tensor) -> None:
        """Add one part."""
        self.parts.setdefault(quantity, {})[param.name] = (param.box, param.shape, values.detach().clone())


def trial(
    run: Run,
    plan: Plan,
    num_micro: int,
    folder: Path | None,
    order: Sequence[int] = range(BATCH),
    reader: MultimodalConfig | None = None,
) -> Share | None:
    """One rank's part of two steps on the samples in that order, stopped and started again between them if there is a `folder`
    to save in; None on a rank that the plan does not use. Of a `reader` of images if there is one, else of the run's model."""
    model: ModelConfig = run.model if reader is None else reader
    mesh, cpu, dtype = own_mesh(plan.grid), torch.device("cpu"), run.precision.compute_dtype
    if mesh is None:
        return None
    length, seed = run.data.sequence_length, run.train.seed
    laid = lay_out(
        plan,
        model,
        mesh,
        sequence_length=length,
        dtype=run.precision.weight_dtype,
        device=cpu,
        seed=seed,
        precision=run.precision,
    )
    ranks, params = Ranks(mesh, cpu), laid_params(laid)
    share = Share()
    for param in params:
        share.keep("initial weights", param, param.tensor)
    _redraw_constants(params, constant_starts(build_meta(model)))
    laid.after_step()
    optimizer = run.optim.build(params)
    drawn = ragged_batch(run.model.vocab_size, length) if reader is None else image_batch(reader, length)
    batch = [tensor[list(order)] for tensor in drawn]
    num_tokens = int((batch[1] >= 0).sum())
    own = ranks.own(BATCH)
    micro_batches: list[MicroBatch] = list(zip(*(tensor[own].chunk(num_micro) for tensor in batch), strict=True))
    # Delayed scales come from the step before: the first is not narrow.
    compared = 0 if run.precision.history_steps is None else STEPS - 1
    for step in range(STEPS):
        optimizer.zero_grad()
        (nll, _) = ranks.sums(*laid.accumulate(micro_batches, num_tokens, dtype))
        magnitudes = {name: row["amax"] for name, row in ranks.end_step(laid.meter).items()} if laid.meter else {}
        norm = global_norm(params, ranks.group)
        if step == compared:
            before = {param.name: param.tensor.detach().clone() for param in params}
            share.numbers["loss"], share.numbers["gradient norm"] = nll / num_tokens, float(norm)
            share.parts[MAGNITUDES] = {
                name: (Box.whole(()), (), torch.tensor(amax)) for name, amax in magnitudes.items()
            }
            for param in params:
                gradient = param.tensor.grad if param.tensor.grad is not None else torch.zeros_like(param.tensor)
                share.keep("gradients", param, gradient)
            _plain_update(params)
            for param in params:
                share.keep("SGD update", param, param.tensor)
            laid.after_step()
            (evaluated,) = ranks.sums(laid.evaluate(micro_batches, dtype))
            share.numbers["evaluation"] = evaluated / num_tokens
            for param in params:
                param.tensor.detach().copy_(before[param.name])
            laid.after_step()
        clip_(gradients_of(params), norm, run.train.max_gradient_norm or 1.0)
        optimizer.step(1.0)
        if step == 0 and folder is not None:
            left_out = () if dtype is torch.float64 else _OF_ROUNDING
            _stop_and_go_on(share, params, states_of(laid.model, mesh), optimizer, ranks, folder, left_out)
        laid.after_step()
    for param in params:
        share.keep("updated weights", param, param.tensor)
    return share


_OF_ROUNDING = ("/compensation", "/updates")
"""What only bf16 weights have: the run in fp64 that stands for the truth has none. That they return is checked all the same."""


def _stop_and_go_on(
    share: Share,
    params: Sequence[Param],
    states: Sequence[Param],
    optimizer: Optimizer,
    ranks: Ranks,
    folder: Path,
    left_out: tuple[str, ...],
) -> None:
    try:
        changed, alone = stop_and_go_on([*params, *states], optimizer, ranks, folder)
    except CheckpointError as error:  # on all ranks
        share.failures["resume"] = str(error)
        return
    for param in params:
        share.keep("resume", param, changed[param.name].double())
    for name, tensor in alone.items():
        if name.endswith(left_out):
            continue
        shape = tuple(tensor.shape)
        share.parts.setdefault("saved state", {})[name] = Box.whole(shape), shape, tensor.double()


@torch.no_grad()
def _plain_update(params: Sequence[Param]) -> None:
    for param in params:
        if param.tensor.grad is not None:
            param.tensor.sub_(SGD_RATE * param.tensor.grad)


@torch.no_grad()
def _redraw_constants(params: Sequence[Param], starts: Mapping[str, float]) -> None:
    for param in params:
        if param.name in starts:
            drawn = torch.randn(param.shape, generator=generator_for(1, param.name), dtype=torch.float64)
            param.tensor.copy_((starts[param.name] + 0.3 * drawn)[param.box.slices])


def ragged_batch(vocab_size: int, length: int, batch: int = BATCH) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and documents: very different lengths, one document a whole row, a third of the targets ignored."""
    generator = torch.Generator().manual_seed(1)
    tokens_BL, targets_BL = (torch.randint(vocab_size, (batch, length), generator=generator) for _ in range(2))
    targets_BL[torch.rand(batch, length, generator=generator) < 0.3] = IGNORED
    ids_BL = (torch.rand(batch, length, generator=generator) < 0.1).long().cumsum(1)
    ids_BL[0] = 0
    return tokens_BL, targets_BL, ids_BL


NUM_IMAGES = 2
"""A row, in a trial of a model that reads images."""


def image_batch(config: MultimodalConfig, length: int, batch: int = BATCH) -> MicroBatch:
    """The same with images, whose tokens stand together in places that differ from row to row; where they have none, each token
    sees some images, all or none."""
    tokens_BL, targets_BL, ids_BL = ragged_batch(config.text.vocab_size, length, batch)
    generator, vision = torch.Generator().manual_seed(2), config.vision
    shape = (batch, NUM_IMAGES, vision.num_channels, vision.image_size, vision.image_size)
    images_BNCYX = torch.randn(shape, generator=generator, dtype=torch.float64)
    if not isinstance(config, LateFusionConfig):
        return (
            tokens_BL,
            targets_BL,
            ids_BL,
            images_BNCYX,
            torch.rand(batch, length, NUM_IMAGES, generator=generator) < 0.6,
        )
    image, size = config.image_token, config.num_features
    num_text = length - NUM_IMAGES * size
    other = (image + 1) % config.text.vocab_size
    for values in (tokens_BL, targets_BL):
        values[values == image] = other
    starts_BN = torch.randint(num_text + 1, (batch, NUM_IMAGES), generator=generator).sort(1).values
    for row, starts in enumerate(starts_BN.tolist()):
        for number, start in enumerate(starts):
            first = start + number * size
            tokens_BL[row, first : first + size] = image
    return tokens_BL, targets_BL, ids_BL, images_BNCYX
