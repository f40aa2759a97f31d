"""Pipeline parallelism: each rank holds some of the layers, and micro-batches pass through the ranks.

torch's schedules decide when which stage runs which micro-batch and carry activations and their gradients between ranks.
`parallel.stages` has the stages they run. Layers are shared out so that the largest stage costs least, the head counted.

Legend: B batch, L this rank's length of the sequence, S width of the residual stream.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules

from surefoot.config import ConfigError
from surefoot.dist.mesh import Mesh
from surefoot.models.decoder import Decoder
from surefoot.models.multimodal import Multimodal
from surefoot.parallel.plan import Plan
from surefoot.parallel.schedules import SINGLE, SPLIT_BACKWARD, V_SHAPED, Schedule
from surefoot.parallel.stages import FEATURES, Feed, ImageStage, Left, Stage

CLASSES: dict[Schedule, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}


def check(model: Decoder, plan: Plan) -> None:
    """`ConfigError` where the model has fewer layers than there are stages. The model may be on meta."""
    depth = len(model.layers)
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
    after = model.head.flops()
    if model.ahead is not None:
        after += model.ahead.flops(sequence_length, causal=True) + model.head.flops()
    return balanced_bounds(costs, after, num_stages)


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


def stages_of(
    plan: Plan, model: Decoder | Multimodal, mesh: Mesh, bounds: Sequence[int]
) -> list[Stage] | list[ImageStage]:
    """This rank's stages of a model on meta; none without a pipeline."""
    if plan.pipeline == 1:
        return []
    here = indexes_of(plan, mesh.index("pipeline"))
    if isinstance(model, Multimodal):
        return [ImageStage(model, index, bounds) for index in here]
    return [Stage(model, index, bounds) for index in here]


def _nothing() -> None:
    pass


class Pipeline:
    """This rank's stages and the passes through them."""

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[Stage] | Sequence[ImageStage],
        mesh: Mesh,
        device: torch.device,
        whole: Collection[int],
    ) -> None:
        """The backward pass of stages in `whole` is never split."""
        self.modules, self.device, self._whole = stages, device, whole
        self.stages = [stage.text if isinstance(stage, ImageStage) else stage for stage in stages]
        self._plan, self._mesh, self._group = plan, mesh, mesh.group("pipeline")
        self._schedules: dict[object, Any] = {}

    def announce(self) -> str | None:
        """What of the schedule is not in effect, if anything."""
        if self._plan.schedule not in SPLIT_BACKWARD or not self._whole:
            return None
        return (
            f"plan.schedule={self._plan.schedule}: {len(self._whole)} of {self._plan.num_stages} stages do not compute gradients "
            "of weights apart from those of activations, for several of their layers share weights"
        )

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
            handed = [torch.empty(0)]
            for stage, module in zip(self.stages, self.modules, strict=True):
                source, target = (rank_of(self._plan, stage.index + way) for way in (-1, 1))
                if source not in (None, self._mesh.index("pipeline")):
                    handed = [
                        torch.empty_like(x, device=self.device) for x in self._handed(stage.given, feeds[number], dtype)
                    ]
                    for x in handed:
                        dist.recv(x, group=self._group, group_src=source)
                found = module(*handed, number_1=torch.tensor([number]))
                handed = [found] if isinstance(found, Tensor) else list(found)
                if target not in (None, self._mesh.index("pipeline")):
                    handed = [x.contiguous() for x in handed]
                    sent += [(dist.isend(x, group=self._group, group_dst=target), x) for x in handed]
        for work, _ in sent:
            if work is not None:
                work.wait()
        return self.stages[-1].sums[0]

    def _handed(self, given: Sequence[Left], feed: Feed, dtype: torch.dtype) -> list[Tensor]:
        """What passes between stages, on meta: the stream, of which tensor ranks have a run each, and what else is `given`."""
        batch, length = feed[0].shape
        config, run = self.stages[0].config, length // self._mesh.size("tensor")
        stream, embedded = (
            torch.empty((batch, run, width), dtype=dtype, device="meta")
            for width in (config.stream_width, config.width)
        )
        others = {}
        if (reader := self.stages[0].reader) is not None:
            images_BNCYX = next(iter(feed[3:]))
            shape = reader.features_shape(batch, images_BNCYX.shape[1])
            others[FEATURES] = torch.empty(shape, dtype=dtype, device="meta")
        return [stream, *(left.empty(batch, length, embedded, others) for left in given)]

    def _differentiable(self, given: Sequence[Left], feed: Feed, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(x.requires_grad_() for x in self._handed(given, feed, dtype))

    def _schedule(self, feeds: Sequence[Feed], dtype: torch.dtype) -> Any:
        key = (len(feeds), tuple(feeds[0][0].shape), dtype)
        if key not in self._schedules:
            number = torch.empty(1, dtype=torch.int64, device="meta")
            loss = torch.empty(1, dtype=torch.promote_types(dtype, torch.float32), device="meta", requires_grad=True)
            stages = [
                PipelineStage(
                    module,
                    stage.index,
                    self._plan.num_stages,
                    self.device,
                    input_args=number if stage.is_first else self._differentiable(stage.given, feeds[0], dtype),
                    output_args=loss if stage.is_last else self._differentiable(stage.passed, feeds[0], dtype),
                    group=self._group,
                    # In place of torch's own split: all of the backward pass at once, and nothing later.
                    dw_builder=(lambda: _nothing) if stage.index in self._whole else None,
                )
                for stage, module in zip(self.stages, self.modules, strict=True)
            ]
            self._schedules[key] = CLASSES[self._plan.schedule](
                stages[0] if self._plan.schedule in SINGLE else stages,
                n_microbatches=len(feeds),
                loss_fn=lambda output, _target: output.sum(),
                scale_grads=False,
            )
        return self._schedules[key]
