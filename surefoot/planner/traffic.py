"""Bytes that a rank sends in a step, in closed form, for each axis and kind of collective.

Every axis has a function of its own, which adds what the axis alone is the reason for; `docs/guide/scale.md` gives the same
formulas in words. Payload is counted as `dist.count` counts it, and tests hold the two against each other.

Under a pipeline a rank's weights, layers and ends are those of its stages.

Legend: B samples of a micro-batch, S sequence length, L = S / context, D width; P_t numbers in a rank's tensor-parallel part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from surefoot.dist.count import Flow, Kind, share_sent
from surefoot.dist.layout import Layout
from surefoot.dist.mesh import AXES, Grid
from surefoot.models.count import build_meta, uses_by_layers
from surefoot.models.decoder import Decoder, DecoderConfig, Layer
from surefoot.models.initialise import named_weights
from surefoot.models.routing import routers
from surefoot.optim import exchange
from surefoot.optim.base import OptimizerConfig, Param
from surefoot.optim.muon import MuonConfig, cost_of
from surefoot.parallel import context, expert, tensor
from surefoot.parallel.pipeline import bounds_of, indexes_of, rank_of
from surefoot.parallel.plan import Plan
from surefoot.parallel.shard import REPLICAS, shards_of
from surefoot.parallel.stages import SharedWeight, Stage, shared_weights


@dataclass(frozen=True)
class Workload:
    """What a rank computes in a step."""

    sequence_length: int
    micro_batch: int
    num_micro_batches: int
    compute: torch.dtype
    weights: torch.dtype


@dataclass(frozen=True)
class _Weight:
    """One logical weight, or a stage's copy of it: how tensor parallelism cuts it, how the optimizer sees it, and how many layers
    have it."""

    param: Param
    cut: Layout
    kept: Layout
    uses: int
    is_copy: bool

    @property
    def is_in_layer(self) -> bool:
        return self.uses > 0


@dataclass
class _Step:
    plan: Plan
    work: Workload
    rank: int
    weights: list[_Weight]
    attentions: list[tuple[int, int, context.Kind]]
    """For each attention the rows of its query weights, and of its key and value weights, on this rank, and how a cut sequence
    finds its keys."""
    part_widths: int
    """Of what mixers and feed-forward networks read and write, all together."""
    routed: list[tuple[int, int]]
    """For each routed network its experts, and experts a token."""
    router_numbers: int
    """What routers of all stages have counted after a step."""
    num_embeddings: int
    """How often a micro-batch passes the embedding here, and the head: 0 where another stage has it."""
    num_heads: int
    stages: list[Stage]
    """Of a pipeline, on this rank."""
    shared: list[tuple[SharedWeight, Layout]]
    """Weights that stages of all ranks share, and how a rank keeps each."""
    config: DecoderConfig
    sent: dict[Flow, float] = field(default_factory=dict)

    @property
    def grid(self) -> Grid:
        return self.plan.grid

    @property
    def num_tokens(self) -> int:
        """Of a micro-batch on this rank."""
        return self.work.micro_batch * self.work.sequence_length // self.plan.context

    @property
    def wide(self) -> int:
        """Bytes of a number in what is computed in at least fp32."""
        return torch.promote_types(self.work.compute, torch.float32).itemsize

    def add(self, axes: Sequence[str], kind: Kind, whole: float) -> None:
        """A collective over a whole of so many bytes."""
        over = tuple(axis for axis in axes if self.grid.size(axis) > 1)
        if over and whole:
            flow = Flow(over, kind)
            self.sent[flow] = self.sent.get(flow, 0.0) + share_sent(kind, self.grid.size(*over)) * whole

    def numbers(self, layout: Layout) -> int:
        """In this rank's part."""
        return layout.box(self.grid, self.grid.coordinates(self.rank)).num_elements

    def padded(self, weight: _Weight) -> int:
        """Numbers of this rank's tensor-parallel part once its rows are filled up to divide over the shard ranks."""
        rows, *rest = weight.cut.box(self.grid, self.grid.coordinates(self.rank)).shape
        num_ranks = self.grid.size(*shards_of(weight.cut))
        return -(-rows // num_ranks) * num_ranks * math.prod(rest)


def traffic(
    plan: Plan, model: DecoderConfig, optim: OptimizerConfig, work: Workload, rank: int = 0
) -> dict[Flow, float]:
    """Bytes that `rank` sends in a step. What ranks tell each other of their batches, of the record and of
    routers' choices (losses of a whole step, limited room) is left out.

    All weights are in one dtype: for runs with narrow ones (`precision.parameters`, `reduce`) this is an upper bound.
    """
    step = _step(plan, build_meta(model), work, rank)
    _data(step)
    _tensor(step)
    _context(step)
    _expert(step)
    _pipeline(step)
    if isinstance(optim, MuonConfig):
        _whole_matrices(step)
    _agreement(step)
    return step.sent


def _step(plan: Plan, model: Decoder, work: Workload, rank: int) -> _Step:
    layouts = expert.cut(model, tensor.layouts_of(model, plan.tensor), plan.expert)
    modules: list[Decoder | Stage] = [model]
    shared: list[SharedWeight] = []
    if plan.pipeline > 1:
        bounds = bounds_of(model, plan.num_stages, work.sequence_length)
        shared = shared_weights(model, bounds)
        modules = [Stage(model, index, bounds) for index in indexes_of(plan, plan.grid.coordinates(rank)["pipeline"])]
    weights = []
    for module in modules:
        owners = module.copies if isinstance(module, Stage) else {}
        uses = uses_by_layers(module.layers.children())
        for name, block, own_name in named_weights(module):
            weight, cut = getattr(block, own_name), layouts[owners.get(name, name)]
            param = Param(name, weight, block.axes[own_name])
            weights.append(_Weight(param, cut, _kept(plan, cut), uses[id(weight)], name in owners))
    own_layers = [cast(Layer, layer) for module in modules for layer in module.layers.children()]
    # The further prediction is the embedding's and the head's second pass.
    aheads = [module.ahead for module in modules if module.ahead is not None]
    own_layers += [ahead.layer for ahead in aheads]
    parts = [part for layer in own_layers for part in layer.parts()]
    left = {name: x.numel() for mixer in model.mixers() for name, x in mixer.leaves(1, 1, work.compute).items()}
    attentions: list[tuple[int, int, context.Kind]] = []
    for part in parts:
        if (kind := context.kind_of(part, plan.context_kind)) is not None:
            q_rows, kv_rows = (rows // plan.tensor for rows in context.rows_of(part, left))
            attentions.append((q_rows, kv_rows, kind))
    part_widths = sum(layer.part_widths() for layer in own_layers)
    routed = [(router.num_experts, router.top_k) for layer in own_layers for router in routers(layer)]
    router_numbers = sum(router.num_counts for router in routers(model))
    num_embeddings, num_heads = (
        len(aheads) + sum(getattr(module, end) is not None for module in modules) for end in ("embedding", "head")
    )
    return _Step(
        plan,
        work,
        rank,
        weights,
        attentions,
        part_widths,
        routed,
        router_numbers,
        num_embeddings,
        num_heads,
        [module for module in modules if isinstance(module, Stage)],
        [(one, _kept(plan, layouts[one.owner])) for one in shared],
        model.config,
    )


def _kept(plan: Plan, cut: Layout) -> Layout:
    return cut.split(0, *shards_of(cut)) if plan.is_sharded else cut


def _data(step: _Step) -> None:
    """Gradients over the ranks that see other tokens, and the weights that those share."""
    families: dict[tuple[str, ...], list[_Weight]] = {}
    for weight in step.weights:
        families.setdefault(shards_of(weight.cut), []).append(weight)
    for shards, weights in families.items():
        _family(step, shards, weights)


def _family(step: _Step, shards: tuple[str, ...], weights: Sequence[_Weight]) -> None:
    """The weights that the ranks along `shards` share."""
    plan, itemsize = step.plan, step.work.weights.itemsize
    whole = itemsize * sum(step.numbers(weight.cut) for weight in weights)
    padded = {
        is_in_layer: itemsize * sum(step.padded(weight) for weight in weights if weight.is_in_layer == is_in_layer)
        for is_in_layer in (True, False)
    }
    # What layers have in common is a unit of its own, which each of them gathers, and whose gradient each of them sums.
    again = itemsize * sum(step.padded(weight) * (weight.uses - 1) for weight in weights if weight.uses > 1)
    everything = sum(padded.values())
    if not plan.is_sharded:
        step.add((*REPLICAS, *shards), "all-reduce", whole)
    elif plan.zero == 1:
        step.add(REPLICAS, "all-reduce", whole)
        step.add(shards, "reduce-scatter", everything)
        step.add(shards, "all-gather", everything)
    elif plan.pipeline > 1:
        # torch's stages keep a layer's weights whole after a backward pass for what comes next. So whatever the schedule, each
        # forward pass but the last has one gather after it where they are cut then, and the first one before it.
        num_passes = step.work.num_micro_batches if plan.keeps_weights_cut else 0
        step.add(shards, "all-gather", everything + num_passes * padded[True])
        step.add(shards, "reduce-scatter", everything)
        step.add(REPLICAS, "all-reduce", everything / step.grid.size(*shards))
    else:
        num_passes = step.work.num_micro_batches
        # For forward; what layers have in common is let go of after each, in forward or else in backward.
        step.add(shards, "all-gather", num_passes * (everything + again))
        # What surrounds the layers is gathered again for backward, always: `loss` calls the model's own forward, and FSDP2 lets
        # go of the weights after the outer of two calls.
        step.add(shards, "all-gather", num_passes * padded[False])
        if plan.reshard is not None:
            flow = Flow(("shard",), "all-gather")
            step.sent[flow] += num_passes * share_sent("all-gather", plan.reshard) * (padded[True] + again)
        elif plan.zero == 3:
            step.add(shards, "all-gather", num_passes * (padded[True] + again))
        step.add(shards, "reduce-scatter", everything + again)
        step.add(REPLICAS, "all-reduce", (everything + again) / step.grid.size(*shards))


def _expert(step: _Step) -> None:
    """Each layer's rows to its experts and back, in forward and in backward, if all experts are wanted alike; how many first."""
    axes, num_passes = ("expert",), step.work.num_micro_batches
    for num_experts, top_k in step.routed:
        rows = step.num_tokens * top_k * step.config.width * step.work.compute.itemsize
        step.add(axes, "all-to-all", num_passes * (4 * rows + num_experts * torch.int64.itemsize))


def _tensor(step: _Step) -> None:
    """The sequence around each mixer, feed-forward network, embedding and head; the loss; gradients of uncut weights."""
    axes, num_passes = ("tensor",), step.work.num_micro_batches
    # Forward gathers before and scatters after each of the two parts of a layer, backward the other way round; the embedding
    # scatters and the head gathers, and backward the other way round.
    widths = step.part_widths + step.config.width * (step.num_embeddings + step.num_heads)
    for kind in ("all-gather", "reduce-scatter"):
        step.add(axes, kind, num_passes * step.num_tokens * widths * step.work.compute.itemsize)
    # The largest logit, then the sum of exponentials and the target's logit, of each token.
    step.add(axes, "all-reduce", num_passes * 3 * step.num_tokens * step.wide * step.num_heads)
    uncut = sum(step.numbers(weight.kept) for weight in step.weights if not weight.cut.is_cut_along("tensor"))
    step.add(axes, "all-reduce", uncut * step.work.weights.itemsize)


def _context(step: _Step) -> None:
    """Keys and values, or heads, of each attention; queries never travel but in Ulysses' form.

    What mixers with a state pass on, a state a chunk, is left out.
    """
    axes, num_ranks, num_passes = ("context",), step.plan.context, step.work.num_micro_batches
    narrow = step.work.compute.itemsize
    for q_rows, kv_rows, kind in step.attentions:
        q, kv = (num_passes * step.num_tokens * rows for rows in (q_rows, kv_rows))
        if kind == "gather":
            step.add(axes, "all-gather", num_ranks * kv * narrow)
            step.add(axes, "reduce-scatter", num_ranks * kv * narrow)
        elif kind == "ulysses":
            step.add(axes, "all-to-all", 2 * (2 * q + kv) * narrow)
        else:
            # Round once in forward and once in backward, and their gradients all the way home.
            step.add(axes, "send", 2 * (num_ranks - 1) * kv * narrow + num_ranks * kv * step.wide)


def _pipeline(step: _Step) -> None:
    """To stages that are elsewhere: what is passed on, gradients of what was given; weights that stages share."""
    plan, work, here, axes = step.plan, step.work, step.grid.coordinates(step.rank)["pipeline"], ("pipeline",)
    batch, length = work.micro_batch, work.sequence_length // plan.context
    # Tensor ranks cut the sequence of the stream and of embeddings, and the heads of what mixers leave.
    embedded = torch.empty((batch, length, step.config.width), dtype=work.compute, device="meta")
    stream = embedded.nbytes * step.config.connection.num_streams
    for stage in step.stages:
        for other, things in ((stage.index - 1, stage.given), (stage.index + 1, stage.passed)):
            if rank_of(plan, other) not in (None, here):
                handed = stream + sum(left.empty(batch, length, embedded, {}).nbytes for left in things)
                step.add(axes, "send", work.num_micro_batches * handed / plan.tensor)
    for one, kept in step.shared:
        ranks = {rank_of(plan, one.owner_stage), rank_of(plan, one.copy_stage)}
        if here in ranks and len(ranks) > 1:
            # Its gradient from the copy to the owner, its value back.
            step.add(axes, "send", step.numbers(kept) * work.weights.itemsize)


def _whole_matrices(step: _Step) -> None:
    """Muon: each part to its matrix's owner, and back."""
    matrices = [weight for weight in step.weights if weight.param.role == "matrix" and not weight.is_copy]
    axes = tuple(axis for axis in exchange.AXES if step.grid.size(axis) > 1)
    if not any(weight.kept.is_cut_along(axis) for weight in matrices for axis in axes):
        return
    owners = exchange.balanced([cost_of(weight.param.shape) for weight in matrices], step.grid.size(*axes))
    own = step.grid.index(step.grid.coordinates(step.rank), exchange.AXES)
    peers = [step.grid.coordinates(rank) for rank in step.grid.peers(step.rank, exchange.AXES)]
    parts = {
        layout: [layout.box(step.grid, peer).num_elements for peer in peers]
        for layout in {weight.kept for weight in matrices}
    }
    numbers = 0
    for weight, owner in zip(matrices, owners, strict=True):
        if owner == own:
            numbers += sum(parts[weight.kept]) - parts[weight.kept][own]
        elif exchange.sends_copy(weight.kept, peers[own]):
            numbers += parts[weight.kept][own]
    flow = Flow(axes, "all-to-all")
    step.sent[flow] = step.sent.get(flow, 0.0) + numbers * step.work.weights.itemsize


def _agreement(step: _Step) -> None:
    """Both sums of the loss, the squared gradient norm, and what each router counted, in fp64."""
    step.add(AXES, "all-reduce", (3 + step.router_numbers) * torch.float64.itemsize)
