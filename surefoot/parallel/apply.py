"""The order of passes, in one place: narrow products -> swap attention and dispatch -> cut weights -> collectives around
blocks -> take this rank's stages -> compile -> recompute -> shard -> materialise -> initialise.

The model comes on meta and leaves with this rank's part of every weight in memory. Each full weight is drawn from its own
generator and cut afterwards, so that no layout changes how a model starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from surefoot.config import ConfigError
from surefoot.dist.collectives import max_, sum_
from surefoot.dist.mesh import DATA, Mesh
from surefoot.models import routing
from surefoot.models.decoder import Decoder
from surefoot.models.initialise import generator_for, materialise, named_weights
from surefoot.models.layers import named_layers, text_of
from surefoot.models.multimodal import ModelConfig, Multimodal
from surefoot.ops.loss import LossSums
from surefoot.parallel import compiled, context, expert, pipeline, shard, tensor
from surefoot.parallel.compiled import Compilation, compile_layers
from surefoot.parallel.copies import Copies
from surefoot.parallel.cut import cut_weights
from surefoot.parallel.pipeline import Pipeline
from surefoot.parallel.plan import Plan
from surefoot.parallel.recompute import Recomputation, recompute
from surefoot.parallel.shard import DataParallel, Local
from surefoot.parallel.stages import Feed, ImageStage, Stage, repeating, shared_weights
from surefoot.precision import swap
from surefoot.precision.meter import Meter
from surefoot.precision.policy import DEFAULT, PrecisionConfig
from surefoot.precision.product import Sharing

MicroBatch = tuple[Tensor, Tensor, Tensor, *tuple[Tensor, ...]]
"""Tokens, targets and document numbers, each (B, L): this rank's samples, whole sequences. For a model that reads images also
those of the samples (B, N, C, Y, X) and, where they stand nowhere in the text, which of them each token sees (B, L, N)."""


class Passes(Protocol):
    """Forward and backward passes over this rank's part of a model."""

    def accumulate(self, feeds: Sequence[Feed], num_tokens: int, dtype: torch.dtype) -> tuple[float, float]:
        """Gradients of (sum over valid tokens) / `num_tokens` into the weights; this rank's sums of nll and z."""

    def evaluate(self, feeds: Sequence[Feed], dtype: torch.dtype) -> float:
        """This rank's sum of nll."""


class Whole:
    """A model that lies on this rank from embedding to head."""

    def __init__(self, model: Decoder | Multimodal, data_parallel: DataParallel) -> None:
        self.model, self.data_parallel = model, data_parallel

    def accumulate(self, feeds: Sequence[Feed], num_tokens: int, dtype: torch.dtype) -> tuple[float, float]:
        """One micro-batch after the other."""
        nll, z, loss = 0.0, 0.0, self._loss
        for number, feed in enumerate(feeds):
            self.data_parallel.before_backward(is_last=number == len(feeds) - 1)
            objective, sums = loss(*feed, dtype=dtype)
            torch.autograd.backward(objective / num_tokens)
            nll += sums.nll.item()
            z += sums.z.item()
        return nll, z

    @torch.no_grad()
    def evaluate(self, feeds: Sequence[Feed], dtype: torch.dtype) -> float:
        """One micro-batch after the other."""
        return sum(self._loss(*feed, dtype=dtype)[1].nll.item() for feed in feeds)

    @property
    def _loss(self) -> Callable[..., tuple[Tensor, LossSums]]:
        """That of a model that takes such feeds."""
        return self.model.loss


@dataclass
class Laid:
    """A model laid out over a mesh. `model` has memory only where there is no pipeline; `meter` watches narrow products."""

    model: Decoder | Multimodal
    mesh: Mesh
    data_parallel: DataParallel
    passes: Passes
    copies: Copies | None
    compilation: Compilation | None
    recomputation: Recomputation | None
    meter: Meter | None
    precision: PrecisionConfig

    @property
    def text(self) -> Decoder:
        """The language model: all of it where it reads no images."""
        return text_of(self.model)

    @property
    def locals(self) -> list[Local]:
        """The weights of which this rank holds a part."""
        return self.data_parallel.locals

    def accumulate(
        self, micro_batches: Sequence[MicroBatch], num_tokens: int, dtype: torch.dtype
    ) -> tuple[float, float]:
        """Gradients of (sum over valid tokens) / `num_tokens` into every part's `.grad`, summed over all ranks.

        Returns the sums of nll and z over this rank's own tokens.
        """
        return self.accumulate_feeds(self._feeds(micro_batches), num_tokens, dtype)

    def accumulate_feeds(self, feeds: Sequence[Feed], num_tokens: int, dtype: torch.dtype) -> tuple[float, float]:
        """The same of micro-batches that are cut already."""
        with self._counted_ahead(feeds, dtype):
            sums = self.passes.accumulate(feeds, num_tokens, dtype)
        self.data_parallel.reduce()
        if self.copies is not None:
            self.copies.add_gradients()
        return sums

    def evaluate(self, micro_batches: Sequence[MicroBatch], dtype: torch.dtype) -> float:
        """The sum of nll over this rank's own tokens."""
        return self.passes.evaluate(self._feeds(micro_batches), dtype)

    def after_step(self) -> None:
        """After parts were changed: bring what computes up to date."""
        if self.copies is not None:
            self.copies.refresh()
        self.data_parallel.after_step()

    def _counted_ahead(self, feeds: Sequence[Feed], dtype: torch.dtype) -> AbstractContextManager[None]:
        """Where routers' losses are of the whole step and a pass is only a part of it, all passes forward first."""
        group = self.mesh.group(*DATA, "context")
        if not routing.takes_whole_step(self.model) or (len(feeds) == 1 and group is None):
            return nullcontext()
        count = partial(self.passes.evaluate, feeds, dtype)
        return routing.counted_ahead(self.model, count, lambda loads: sum_(loads, group))

    def _feeds(self, micro_batches: Sequence[MicroBatch]) -> list[Feed]:
        return [self._feed(*micro_batch) for micro_batch in micro_batches]

    def _feed(self, tokens_BS: Tensor, targets_BS: Tensor, ids_BS: Tensor, *seeing: Tensor) -> Feed:
        if not isinstance(self.model, Multimodal):
            return context.cut(self.mesh, tokens_BS, targets_BS, ids_BS)
        images_BNCYX, *seen = seeing
        looks = self.model.looks_of(tokens_BS, images_BNCYX, *seen)
        cut = context.cut(self.mesh, tokens_BS, targets_BS, ids_BS, *(() if looks is None else (looks,)))
        return *cut[:3], images_BNCYX, *cut[3:]


def check(plan: Plan, config: ModelConfig, sequence_length: int, precision: PrecisionConfig = DEFAULT) -> None:
    """`ConfigError` where the plan cannot carry the model in these numbers; needs no process group."""
    with torch.device("meta"):
        model = config.build()
    text = text_of(model)
    pipeline.check(text, plan)
    tensor.check(model, plan.tensor, sequence_length)
    expert.check(model, plan.expert)
    if plan.context > 1 and text.ahead is not None:
        raise ConfigError(
            "plan.context",
            plan.context,
            "leaves the token after a chunk's last on another rank, and model.ahead_weight needs it; use plan.context=1 or "
            "model.ahead_weight=0",
        )
    context.check(model, plan.context, plan.context_kind, plan.tensor, sequence_length)
    shard.check(plan, precision)
    compiled.check(plan.compile)
    chunks = 2 * plan.context if plan.context > 1 else 1
    swap.check(
        _narrowed(model),
        precision,
        cut=tensor.cut_dim,
        num_cut=plan.tensor,
        run=sequence_length // chunks,
        run_is=f"the {sequence_length} of data.sequence_length"
        + (f" in each of {chunks} chunks (plan.context {plan.context})" if chunks > 1 else ""),
    )


def lay_out(
    plan: Plan,
    config: ModelConfig,
    mesh: Mesh,
    *,
    sequence_length: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    precision: PrecisionConfig = DEFAULT,
) -> Laid:
    """Build, cut, shard and initialise a model, weights in `dtype` unless `precision` says
    narrower; every rank of the mesh calls it at the same time."""
    with torch.device("meta"):
        model = config.build().to(dtype)
    text = text_of(model)
    if dtype is not precision.weight_dtype:  # asked for by the caller: what is not narrow is of it
        precision = precision.model_copy(update={"compute": "fp64" if dtype is torch.float64 else "fp32"})
    precision.retype(model)
    layouts = expert.cut(model, tensor.layouts_of(model, plan.tensor), plan.expert)
    initial = {name: (block.initial[weight], layouts[name].shape) for name, block, weight in named_weights(model)}
    bounds = pipeline.bounds_of(text, plan.num_stages, sequence_length)
    meter = swap.swap(
        _narrowed(model),
        precision,
        cut=tensor.cut_dim,
        sharing=Sharing(
            tokens=lambda amax: max_(amax, mesh.group(*DATA, "context")),
            expert_tokens=lambda amax: max_(amax, mesh.group("replicate", "shard", "context")),
            features=lambda amax: max_(amax, mesh.group("tensor")),
        ),
        device=device,
    )
    context.apply(model, mesh, plan.context_kind)
    expert.apply(model, mesh)
    cut_weights(model, mesh, layouts)
    tensor.apply(model, mesh, layouts)
    whole = repeating(text, bounds)
    weights_on_stages = shared_weights(model, bounds)
    stages = pipeline.stages_of(plan, model, mesh, bounds)
    modules: Sequence[Decoder | Multimodal | Stage | ImageStage] = stages or [model]
    compilation = compile_layers("none" if device.type == "meta" else plan.compile, modules)
    recomputation = recompute(plan.recompute, modules)
    for module in modules:
        shard.wrap(plan, module, mesh, device, precision)
        materialise(module, device)
    data_parallel = shard.data_parallel(plan, modules, mesh, layouts, precision)
    with torch.no_grad():
        for local in data_parallel.everything:
            distribution, shape = initial[local.name]
            full = distribution.draw(shape, generator_for(seed, local.name))
            local.part.copy_(full[local.layout.box(mesh.grid, mesh.coordinates).slices])
    data_parallel.after_step()
    if not stages:
        return Laid(
            model, mesh, data_parallel, Whole(model, data_parallel), None, compilation, recomputation, meter, precision
        )
    passes = Pipeline(plan, stages, mesh, device, whole)
    copies = Copies(plan, mesh, data_parallel, weights_on_stages) if weights_on_stages else None
    return Laid(model, mesh, data_parallel, passes, copies, compilation, recomputation, meter, precision)


def _narrowed(model: Decoder | Multimodal) -> list[tuple[str, nn.Module]]:
    """The layers whose products may be narrow, with their full names: those of the text."""
    where = "text." if isinstance(model, Multimodal) else ""
    return [(f"{where}{name}", layer) for name, layer in named_layers(text_of(model))]
