"""Pipeline parallelism: each rank holds some of the layers, and micro-batches pass through the ranks.

torch's schedules decide when which stage runs which micro-batch and carry activations and their gradients between ranks.
Here are the stages they run. A stage keeps the model's full names, so that what trains, saves and loads weights knows no
stages. Layers are shared out so that the largest stage costs least, the head counted.

A head that shares the embedding's weight lies on the last stage, the embedding on the first: the last keeps a copy, whose
gradient is added to the owner's and which is brought up to date after each step (`parallel.copies`).

Legend: B batch, L this rank's length of the sequence, S width of the residual stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from surefoot.blocks.base import TOKENS, Mixer
from surefoot.config import ConfigError
from surefoot.dist.mesh import Mesh
from surefoot.models.decoder import Decoder
from surefoot.models.routing import take_auxiliary
from surefoot.ops.autograd import apply as differentiably
from surefoot.ops.documents import Documents
from surefoot.parallel.plan import Plan
from surefoot.parallel.schedules import SINGLE, V_SHAPED, Schedule

CLASSES: dict[Schedule, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}

EMBEDDING = "embedding.weight"

Feed = tuple[Tensor, Tensor, Documents]
"""Tokens and targets, (B, L) each, and documents of one micro-batch, as this rank sees them."""


def check(model: Decoder, plan: Plan) -> None:
    """`ConfigError` where the model has fewer layers than there are stages. The model may be on meta."""
    depth = len(model.layers)
    reader = next(
        (name for name, module in model.named_modules() if isinstance(module, Mixer) and module.reads_shared), ""
    )
    if plan.pipeline > 1 and model.config.reads_embedded:
        raise ConfigError(
            "plan.pipeline",
            plan.pipeline,
            f"parts the embedding from {reader}, which reads it, and layers from those whose weights they share; use "
            "plan.pipeline=1",
        )
    if plan.pipeline > 1 and reader:
        raise ConfigError(
            "plan.pipeline", plan.pipeline, f"parts {reader} from the layer whose results it reads; use plan.pipeline=1"
        )
    if plan.pipeline > 1 and model.ahead is not None:
        raise ConfigError(
            "plan.pipeline",
            plan.pipeline,
            "parts the embedding from the head, and predicting the token after the next (model.ahead_weight) needs both; use "
            "plan.pipeline=1 or model.ahead_weight=0",
        )
    if plan.num_stages > depth:
        per_rank = plan.num_stages // plan.pipeline
        raise ConfigError(
            "plan.pipeline",
            plan.pipeline,
            f"makes {plan.num_stages} stages ({per_rank} a rank, schedule {plan.schedule}) of {depth} layers; "
            f"at most {depth // per_rank} ranks share them",
        )


def bounds_of(model: Decoder, num_stages: int, sequence_length: int) -> list[int]:
    """Where each stage's layers begin, and the end of the last: the largest forward cost of a stage is the least possible.

    The model is whole and may be on meta. Among equals the earlier stages get more: the head's activations are the largest.
    """
    costs = [layer.flops(sequence_length, causal=True) for layer in model._layers()]
    return balanced_bounds(costs, model.head.flops(), num_stages)


def balanced_bounds(costs: Sequence[float], last_extra: float, num_stages: int) -> list[int]:
    """Cut `costs` into `num_stages` runs of one or more, the last with `last_extra` on top; the largest sum is the least."""
    totals = [0.0]
    for cost in costs:
        totals.append(totals[-1] + cost)
    # best[end]: (largest run, starts) of the runs so far over costs[:end].
    best = {end: (totals[end], [0]) for end in range(1, len(costs) + 1)}
    for stage in range(1, num_stages):
        extra = last_extra if stage == num_stages - 1 else 0.0
        best = {
            end: min(
                (max(best[start][0], totals[end] - totals[start] + extra), [*best[start][1], start])
                for start in range(stage, end)
            )
            for end in range(stage + 1, len(costs) + 1)
        }
    return [*best[len(costs)][1], len(costs)]


def indexes_of(plan: Plan, rank: int) -> list[int]:
    """The stages that a pipeline rank holds, in order."""
    if plan.schedule in V_SHAPED:
        return [rank, plan.num_stages - 1 - rank]
    return list(range(rank, plan.num_stages, plan.pipeline))


def rank_of(plan: Plan, index: int) -> int | None:
    """The pipeline rank that holds a stage; None where there is no such stage."""
    if not 0 <= index < plan.num_stages:
        return None
    return next(rank for rank in range(plan.pipeline) if index in indexes_of(plan, rank))


def stages_of(plan: Plan, model: Decoder, mesh: Mesh, bounds: Sequence[int]) -> list[Stage]:
    """This rank's stages of a model on meta; none without a pipeline."""
    if plan.pipeline == 1:
        return []
    return [Stage(model, index, bounds) for index in indexes_of(plan, mesh.index("pipeline"))]


class Stage(nn.Module):
    """Consecutive layers of a decoder, with the embedding before the first and norm and head after the last.

    `copies` maps a weight that another stage owns to the owner's name.
    """

    def __init__(self, model: Decoder, index: int, bounds: Sequence[int]) -> None:
        super().__init__()
        self.index, self.config = index, model.config
        self.is_first, self.is_last = index == 0, index == len(bounds) - 2
        self.embedding = model.embedding if self.is_first else None
        self.layers = nn.ModuleDict({str(i): model.layers[i] for i in range(bounds[index], bounds[index + 1])})
        self.norm = model.norm if self.is_last else None
        self.head = model.head if self.is_last else None
        self.copies: dict[str, str] = {}
        if self.head is not None and model.config.tied:
            self.head.register_parameter("weight", nn.Parameter(self.head.weight.detach().clone()))
            self.head.axes["weight"] = model.embedding.axes["weight"]
            self.copies["head.weight"] = EMBEDDING
        self._feeds: Sequence[Feed] = ()
        self._num_tokens, self._dtype = 1, torch.float32
        self.sums = (0.0, 0.0)

    def begin(self, feeds: Sequence[Feed], num_tokens: int, dtype: torch.dtype) -> None:
        """Before the passes of one step."""
        self._feeds, self._num_tokens, self._dtype = feeds, num_tokens, dtype
        self.sums = (0.0, 0.0)

    def forward(self, x_BLS: Tensor, number_1: Tensor) -> Tensor:
        """Micro-batch `number_1`: the first stage reads its tokens, not `x_BLS`; the last returns (1,), its share of the
        step's objective."""
        tokens_BL, targets_BL, docs = self._feeds[int(number_1)]
        if self.embedding is not None:
            x_BLS = self.config.expand(self.embedding(tokens_BL, self._dtype))
        for layer in self.layers.values():
            x_BLS, _ = layer(x_BLS, docs, None, {TOKENS: tokens_BL})
        auxiliary = take_auxiliary(self)
        if self.norm is None or self.head is None:
            return x_BLS if auxiliary is None else _with_loss(x_BLS, auxiliary / self._num_tokens)
        objective, sums = self.head.loss(self.norm(self.config.connection.collapse(x_BLS)), targets_BL)
        self.sums = (self.sums[0] + sums.nll.item(), self.sums[1] + sums.z.item())
        objective = objective if auxiliary is None else objective + auxiliary
        return objective.reshape(1) / self._num_tokens  # no view: FSDP hooks on what a stage returns


class _WithLoss(torch.autograd.Function):
    """A copy, since FSDP hooks on what a stage returns and warns of views."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), dtype=ctx.dtype, device=grads[0].device)


def _with_loss(x: Tensor, loss: Tensor) -> Tensor:
    """x, whose backward pass is also that of `loss`: the step's objective has losses that arise before the last stage."""
    with_loss: Tensor = differentiably(_WithLoss, x, loss)
    return with_loss


class Pipeline:
    """This rank's stages and the passes through them."""

    def __init__(self, plan: Plan, stages: Sequence[Stage], mesh: Mesh, width: int, device: torch.device) -> None:
        self.stages, self.width, self.device = stages, width, device
        self._plan, self._mesh, self._group = plan, mesh, mesh.group("pipeline")
        self._schedules: dict[object, Any] = {}

    def accumulate(self, feeds: Sequence[Feed], num_tokens: int, dtype: torch.dtype) -> tuple[float, float]:
        """Forward and backward of every micro-batch. Sums of nll and z, on the rank that has the last stage; else 0."""
        schedule = self._schedule(feeds, dtype)
        for stage in self.stages:
            stage.begin(feeds, num_tokens, dtype)
        numbers = torch.tensor(range(len(feeds)))  # from Python, so that a dry run knows them too
        first = (numbers,) if self.stages[0].is_first else ()
        schedule.step(
            *first, target=numbers if self.stages[-1].is_last else None, number_1=numbers, return_outputs=False
        )
        return self.stages[-1].sums

    @torch.no_grad()
    def evaluate(self, feeds: Sequence[Feed], dtype: torch.dtype) -> float:
        """The sum of nll, on the rank that has the last stage; else 0."""
        for stage in self.stages:
            stage.begin(feeds, 1, dtype)
        sent = []
        for number in range(len(feeds)):
            x_BLS = torch.empty(0)
            for stage in self.stages:
                source, target = (rank_of(self._plan, stage.index + way) for way in (-1, 1))
                if source not in (None, self._mesh.index("pipeline")):
                    x_BLS = torch.empty(self._shape(feeds[number]), dtype=dtype, device=self.device)
                    dist.recv(x_BLS, group=self._group, group_src=source)
                x_BLS = stage(x_BLS, torch.tensor([number]))
                if target not in (None, self._mesh.index("pipeline")):
                    x_BLS = x_BLS.contiguous()
                    sent.append((dist.isend(x_BLS, group=self._group, group_dst=target), x_BLS))
        for work, _ in sent:
            if work is not None:
                work.wait()
        return self.stages[-1].sums[0]

    def _shape(self, feed: Feed) -> tuple[int, int, int]:
        """Of what passes between stages: tensor parallelism cuts the sequence there."""
        batch, length = feed[0].shape
        return batch, length // self._mesh.size("tensor"), self.width

    def _schedule(self, feeds: Sequence[Feed], dtype: torch.dtype) -> Any:
        shape = self._shape(feeds[0])
        key = (len(feeds), shape, dtype)
        if key not in self._schedules:
            hidden = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
            number = torch.empty(1, dtype=torch.int64, device="meta")
            loss = torch.empty(1, dtype=torch.promote_types(dtype, torch.float32), device="meta", requires_grad=True)
            stages = [
                PipelineStage(
                    stage,
                    stage.index,
                    self._plan.num_stages,
                    self.device,
                    input_args=number if stage.is_first else hidden,
                    output_args=loss if stage.is_last else hidden,
                    group=self._group,
                )
                for stage in self.stages
            ]
            self._schedules[key] = CLASSES[self._plan.schedule](
                stages[0] if self._plan.schedule in SINGLE else stages,
                n_microbatches=len(feeds),
                loss_fn=lambda output, _target: output.sum(),
                scale_grads=False,
            )
        return self._schedules[key]
