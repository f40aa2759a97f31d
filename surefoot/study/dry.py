"""A dry run: one optimizer step of a run as one of its ranks does it, without peers, memory or data.

What runs is the code that trains: the passes of `parallel.apply` over the whole model, forward and backward of micro-batches,
the norm, the clip, the optimizer. Without a pipeline, micro-batches between the first and the last do the same: one stands
for all of them. A pipeline's schedule runs all of them, since how many are kept at once is what makes its memory.
"""

from __future__ import annotations

import weakref
from collections import Counter as Multiset
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from surefoot.config import ConfigError, override
from surefoot.data.dataset import Batch
from surefoot.dist.count import Amount, Counter, Flow
from surefoot.dist.fake import META, Ledger, fake_world
from surefoot.dist.mesh import Mesh
from surefoot.models.count import build_meta
from surefoot.optim.base import Optimizer, Param
from surefoot.parallel.apply import Laid, check, lay_out
from surefoot.parallel.pipeline import Pipeline, bounds_of, indexes_of
from surefoot.parallel.recompute import Budget
from surefoot.parallel.stages import Feed
from surefoot.planner.traffic import Workload
from surefoot.train.agree import Ranks
from surefoot.train.ready import fit_device
from surefoot.train.run import Run
from surefoot.train.state import laid_params
from surefoot.train.step import take_step

UNKNOWN = (
    "what the allocator loses to fragments",
    "workspace of kernels and buffers of NCCL",
    "time",
    "the tokenizer's vocabulary and whether the data can be read",
)
"""What a dry run cannot know."""


@dataclass(frozen=True)
class Holdings:
    """Bytes that a rank holds between steps, and the numbers in its weights."""

    parameters: int
    parameter_bytes: int
    state_bytes: int


@dataclass(frozen=True)
class DryRun:
    """What one rank holds and sends in a step.

    `gradient_bytes` is the most that gradients take between passes (in a pipeline those of activations under way count too);
    `activation_bytes` what autograd keeps of one micro-batch; `kept_bytes` the most it keeps at once, of as many passes of a
    micro-batch through a stage as are `in_flight`; `peak_bytes` the most that is alive at any moment of the step;
    `budget_bytes` what recomputation may keep, where that is limited.
    """

    rank: int
    stages: tuple[int, ...]
    holdings: Holdings
    gradient_bytes: int
    activation_bytes: int
    kept_bytes: int
    in_flight: int
    peak_bytes: int
    flows: Mapping[Flow, Amount]
    budget_bytes: int | None = None


def dry_run(run: Run, rank: int = 0, memory: int | None = None) -> DryRun:
    """One step of `run` on `rank`, of a device with so much `memory`; `ConfigError` where the plan is not legal, as in training,
    or is to fit a device of which nothing is known.

    Under a budget of recomputation a step goes before, which measures what can be kept. There is no time to measure: which
    results stay is another choice than in training, of as many bytes.
    """
    check(run.plan, run.model, run.data.sequence_length, run.precision)
    dtype, recompute = run.precision.weight_dtype, run.plan.recompute
    if recompute.device_share is not None and memory is None:
        raise ConfigError(
            "plan.recompute.budget", recompute.budget, "needs a device here; name one with --device-memory, as in 80GiB"
        )
    with fake_world(run.plan.grid, rank) as world:
        length, seed = run.data.sequence_length, run.train.seed
        laid = lay_out(
            run.plan,
            run.model,
            world.mesh,
            sequence_length=length,
            dtype=dtype,
            device=META,
            seed=seed,
            precision=run.precision,
        )
        world.counter.restart()
        params = laid_params(laid)
        optimizer = run.optim.build(params)
        if recompute.device_share is not None and memory is not None:
            fit_device(run, laid, optimizer, memory)
        world.ledger.open([*weight_tensors(laid), *state_tensors(optimizer)])
        measured = _Measured(
            **vars(laid),
            num_micro_batches=num_micro_batches(run),
            ledger=world.ledger,
            counter=world.counter,
            kept=_Kept(),
        )
        num_run = measured.num_micro_batches if run.plan.pipeline > 1 else min(3, measured.num_micro_batches)
        batch = _batch(run.micro_batch * num_run, run.data.sequence_length)
        if recompute.mode == "budget":
            _step(run, laid, world.mesh, params, optimizer, _batch(run.micro_batch, run.data.sequence_length))
            world.counter.restart()
        _step(run, measured, world.mesh, params, optimizer, batch)
        kept = _bytes(param.tensor.grad for param in params if param.tensor.grad is not None)
        # What recomputed layers keep of a micro-batch, autograd does not.
        again = 0 if laid.recomputation is None else laid.recomputation.kept_bytes
        return DryRun(
            rank,
            stages_of(run, rank),
            holdings(laid, optimizer),
            max(kept, measured.gradient_bytes),
            measured.kept.of_one + again,
            measured.kept.peak + again * measured.kept.in_flight,
            measured.kept.in_flight,
            world.ledger.peak,
            world.counter.flows(run.plan.grid),
            laid.recomputation.num_bytes if isinstance(laid.recomputation, Budget) else None,
        )


def _step(run: Run, laid: Laid, mesh: Mesh, params: Sequence[Param], optimizer: Optimizer, batch: Batch) -> None:
    take_step(
        laid,
        Ranks(mesh, META),
        params,
        optimizer,
        batch,
        num_tokens=batch.num_tokens,
        scale=1.0,
        micro_batch=run.micro_batch,
        max_gradient_norm=run.train.max_gradient_norm,
        device=META,
        dtype=run.precision.compute_dtype,
    )


def telling_ranks(run: Run) -> list[int]:
    """Ranks that tell what all hold at most: the first and the last, whose shares may be uneven, and of a pipeline the first
    of the last stage and of the one with most layers, since no later rank keeps more micro-batches at once. `ConfigError` where
    the plan does not fit the model."""
    check(run.plan, run.model, run.data.sequence_length, run.precision)
    plan, last = run.plan, run.plan.num_ranks - 1
    if plan.pipeline == 1:
        return list(dict.fromkeys((0, last)))
    bounds = bounds_of(build_meta(run.model), plan.num_stages, run.data.sequence_length)
    layers = [
        sum(bounds[index + 1] - bounds[index] for index in indexes_of(plan, here)) for here in range(plan.pipeline)
    ]
    heres = (0, layers.index(max(layers)), plan.pipeline - 1)
    return sorted({*(plan.grid.rank({"pipeline": here}) for here in heres), last})


def stages_of(run: Run, rank: int) -> tuple[int, ...]:
    """Those of a pipeline that lie on a rank; none without one."""
    plan = run.plan
    return () if plan.pipeline == 1 else tuple(indexes_of(plan, plan.grid.coordinates(rank)["pipeline"]))


def num_micro_batches(run: Run) -> int:
    """Of a step, on one rank."""
    return run.rank_batch // run.micro_batch


def workload(run: Run) -> Workload:
    """What the formulas of `planner.traffic` need to know of a run."""
    return Workload(
        run.data.sequence_length,
        run.micro_batch,
        num_micro_batches(run),
        run.precision.compute_dtype,
        run.precision.weight_dtype,
    )


def holdings(laid: Laid, optimizer: Optimizer) -> Holdings:
    """What a rank holds, real or dry."""
    weights, state = weight_tensors(laid), state_tensors(optimizer)
    return Holdings(
        sum(weight.numel() for weight in weights),
        sum(weight.nbytes for weight in weights),
        sum(tensor.nbytes for tensor in state),
    )


def weight_tensors(laid: Laid) -> list[Tensor]:
    """This rank's weights as they lie in memory, a tied head's copy included."""
    weights = [local.weight for local in laid.data_parallel.everything]
    return [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """This rank's optimizer state."""
    return [tensor for moments in optimizer.state().values() for tensor in moments.values()]


def remedies(run: Run) -> Iterator[tuple[list[str], Run]]:
    """Changes that save memory on as many ranks, the nearest first, as --set assignments; only legal ones."""
    plan = run.plan
    changes: list[list[str]] = []
    if plan.is_sharded and plan.zero < 3:
        changes.append(["plan.zero=3"])
    if plan.replicate > 1:
        changes.append(["plan.replicate=1", f"plan.shard={plan.shard * plan.replicate}"])
    micro = run.micro_batch
    while micro % 2 == 0:
        micro //= 2
        changes.append([f"train.micro_batch={micro}"])
    for axis in ("tensor", "context"):
        size, shard = getattr(plan, axis), plan.shard
        while shard % 2 == 0:
            size, shard = 2 * size, shard // 2
            if size <= 16:
                changes.append([f"plan.{axis}={size}", f"plan.shard={shard}", f"train.micro_batch={micro}"])
    for assignments in changes:
        try:
            changed = override(run, assignments)
            check(changed.plan, changed.model, changed.data.sequence_length, changed.precision)
        except ConfigError:
            continue
        yield assignments, changed


@dataclass(kw_only=True)
class _Measured(Laid):
    """A laid-out model that tells what its passes keep."""

    num_micro_batches: int
    ledger: Ledger
    counter: Counter
    kept: _Kept
    gradient_bytes: int = 0

    def accumulate_feeds(self, feeds: Sequence[Feed], num_tokens: int, dtype: torch.dtype) -> tuple[float, float]:
        """See `Laid.accumulate_feeds`."""
        stages = self.passes.stages if isinstance(self.passes, Pipeline) else []
        for stage in stages:
            stage.register_forward_pre_hook(lambda stage, _: self.kept.begin(stage))
            self.kept.at_end = self._note_gradients
        with torch.autograd.graph.saved_tensors_hooks(self.kept.keep, lambda saved: saved.tensor):
            return super().accumulate_feeds(feeds if stages else _Measuring(feeds, self), num_tokens, dtype)

    def _note_gradients(self) -> None:
        self.gradient_bytes = max(self.gradient_bytes, self.ledger.gradients)


class _Saved:
    """A tensor that autograd keeps, for as long as it keeps it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Kept:
    """Bytes that autograd keeps: of the first pass through each module, and the most at once of how many passes.

    `at_end` is called where backward lets go of the last tensor of a pass.
    """

    def __init__(self) -> None:
        self.at_end: Callable[[], None] = lambda: None
        self.peak = self.in_flight = 0
        self._live = 0
        self._holders: Multiset[int] = Multiset()  # of each storage
        self._passes: Multiset[int] = Multiset()  # saved tensors of each pass
        self._first: dict[int, int] = {}
        self._seen: set[int] = set()
        self._number, self._is_first = 0, True

    @property
    def of_one(self) -> int:
        """Of one micro-batch."""
        return sum(self._first.values())

    def begin(self, module: nn.Module) -> None:
        """A micro-batch enters a module."""
        self._number += 1
        self._is_first = id(module) not in self._seen
        self._seen.add(id(module))

    def keep(self, tensor: Tensor) -> _Saved:
        """Note a tensor that autograd keeps, each storage once; weights are not activations."""
        base = tensor._base if tensor._is_view() else tensor
        saved = _Saved(tensor.detach())
        if not isinstance(base, nn.Parameter):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if self._is_first:
                self._first[key] = size
            self._live += 0 if self._holders[key] else size
            self._holders[key] += 1
            self._passes[self._number] += 1
            self.peak, self.in_flight = max(self.peak, self._live), max(self.in_flight, len(self._passes))
            weakref.finalize(saved, self._release, key, size, self._number)
        return saved

    def _release(self, key: int, size: int, number: int) -> None:
        self._holders[key] -= 1
        self._live -= 0 if self._holders[key] else size
        self._passes[number] -= 1
        if not self._passes[number]:
            del self._passes[number]
            self.at_end()


class _Measuring(Sequence[Feed]):
    """Micro-batches that are measured as they are handed out. The second of three counts for all between."""

    def __init__(self, feeds: Sequence[Feed], measured: _Measured) -> None:
        self._feeds, self._measured = feeds, measured

    def __len__(self) -> int:
        return len(self._feeds)

    @overload
    def __getitem__(self, index: int) -> Feed: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Feed]: ...
    def __getitem__(self, index: int | slice) -> Feed | Sequence[Feed]:
        return self._feeds[index]

    def __iter__(self) -> Iterator[Feed]:
        for number, feed in enumerate(self._feeds):
            is_between = 0 < number < len(self) - 1
            self._measured.counter.weight = self._measured.num_micro_batches - 2 if is_between else 1
            self._measured.kept.begin(self._measured.model)
            yield feed
            self._measured.gradient_bytes = max(self._measured.gradient_bytes, self._measured.ledger.gradients)
        self._measured.counter.weight = 1


def _batch(size: int, length: int) -> Batch:
    """As many samples: their content is never looked at."""
    ids_BL = np.zeros((size, length), np.int64)
    documents_BL, sources_B = ids_BL.astype(np.int32), np.zeros(size, np.int32)
    return Batch(ids_BL, ids_BL, documents_BL, sources_B, size * length, float(size * length))


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())
