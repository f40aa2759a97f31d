"""Pipelines: every schedule has the gradients of one process, and layers are shared out by what they cost."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
import torch

from surefoot.config import ConfigError
from surefoot.dist.mesh import DATA, own_mesh
from surefoot.dist.pool import Pool
from surefoot.models.count import build_meta
from surefoot.models.decoder import DecoderConfig
from surefoot.parallel.apply import check, lay_out
from surefoot.parallel.pipeline import CLASSES, balanced_bounds, bounds_of, indexes_of
from surefoot.parallel.plan import Plan
from surefoot.parallel.schedules import SINGLE, V_SHAPED, Schedule
from surefoot.train.run import Run
from tests.parallel.parity import BATCH, LENGTH, assert_same_as_one_process, decoder, ragged_batch
from tests.spread import spread

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
OTHERS: list[dict[str, Any]] = [
    {},
    {"replicate": 2},
    {"shard": 2, "zero": 1},
    {"shard": 2, "zero": 2},
    {"shard": 2, "zero": 3},
    {"tensor": 2},
    {"context": 2, "context_kind": "ring"},
    {"shard": 2, "tensor": 2},
]


@pytest.mark.parametrize(("schedule", "other"), spread(itertools.product(SCHEDULES, OTHERS), 3), ids=str)
def test_gradients_are_those_of_one_process(pool: Pool, schedule: Schedule, other: dict[str, Any]) -> None:
    plan = Plan(pipeline=2, schedule=schedule, **other)
    is_tied = (SCHEDULES.index(schedule) + OTHERS.index(other)) % 2 == 0
    assert_same_as_one_process(pool, plan, decoder(tied=is_tied), num_micro=4)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_ranks(pool: Pool, schedule: Schedule, tied: bool) -> None:
    plan = Plan(pipeline=4, schedule=schedule)
    assert_same_as_one_process(pool, plan, decoder(tied=tied, depth=8, width=8), num_micro=8)


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
def test_more_stages_a_rank(pool: Pool, schedule: Schedule) -> None:
    plan = Plan(pipeline=2, schedule=schedule, stages_per_rank=3)
    assert_same_as_one_process(pool, plan, decoder(tied=True, depth=7), num_micro=4)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_evaluation_is_that_of_one_process(pool: Pool, schedule: Schedule) -> None:
    config = decoder(tied=True)
    found = pool.run(evaluated, Plan(pipeline=2, schedule=schedule, shard=2, tensor=2), config)
    expected = evaluated(Plan(), config)
    # Tensor-parallel ranks all have their samples' loss; the last stage has it, the others have nothing.
    assert sum(found) / 2 == pytest.approx(expected, rel=1e-12)


def evaluated(plan: Plan, config: DecoderConfig) -> float:
    mesh = own_mesh(plan.grid)
    assert mesh is not None
    device = torch.device("cpu")
    laid = lay_out(plan, config, mesh, sequence_length=LENGTH, dtype=torch.float64, device=device, seed=0)
    size = BATCH // plan.num_data_ranks
    first = mesh.index(*DATA) * size
    own = [tensor[first : first + size] for tensor in ragged_batch(config.vocab_size)]
    micro_batches = list(zip(*(tensor.chunk(2) for tensor in own), strict=True))
    return laid.evaluate(micro_batches, torch.float64)


@pytest.mark.parametrize("seed", range(20))
def test_the_largest_stage_is_the_smallest_possible(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    costs = torch.randint(1, 9, (7,), generator=generator).double().tolist()
    extra, num_stages = float(torch.randint(0, 20, (), generator=generator)), 1 + seed % 5
    bounds = balanced_bounds(costs, extra, num_stages)

    def largest(cuts: tuple[int, ...]) -> float:
        ends = [0, *cuts, len(costs)]
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
        return max([*sums[:-1], sums[-1] + extra])

    every = [largest(cuts) for cuts in itertools.combinations(range(1, len(costs)), num_stages - 1)]
    assert len(bounds) == num_stages + 1
    assert largest(tuple(bounds[1:-1])) == min(every)


def test_a_large_head_gets_fewer_layers() -> None:
    model = build_meta(decoder(vocab_size=5000, depth=8))
    bounds = bounds_of(model, 2, LENGTH)
    assert bounds == [0, 7, 8]
    assert bounds_of(build_meta(decoder(vocab_size=8, depth=8)), 2, LENGTH) == [0, 4, 8]


def test_each_stage_is_on_one_rank() -> None:
    for schedule, ranks in itertools.product(SCHEDULES, (2, 4)):
        plan = Plan(pipeline=ranks, schedule=schedule)
        held = [index for rank in range(ranks) for index in indexes_of(plan, rank)]
        assert sorted(held) == list(range(plan.num_stages))
        assert len(indexes_of(plan, 0)) == (1 if schedule in SINGLE else 2)
        assert (indexes_of(plan, 0)[-1] == plan.num_stages - 1) == (schedule in V_SHAPED)
    assert CLASSES.keys() == set(SCHEDULES)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"stages_per_rank": 2}, "plan.stages_per_rank: 2: has an effect only with pipeline above 1"),
        ({"pipeline": 2, "stages_per_rank": 2}, "is always 1 in schedule 1f1b"),
        ({"pipeline": 2, "schedule": "zbv", "stages_per_rank": 3}, "is always 2 in schedule zbv"),
        ({"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 1}, "use schedule=1f1b"),
        ({"pipeline": 2, "schedule": "2f2b"}, "schedule"),
    ],
)
def test_a_plan_that_cannot_be(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Plan(**values)
    assert said.removeprefix("plan.") in str(caught.value)


def test_fewer_layers_than_stages_are_refused_with_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        check(Plan(pipeline=3, schedule="interleaved"), decoder(depth=4), LENGTH)
    for part in ("plan.pipeline: 3", "6 stages (2 a rank, schedule interleaved) of 4 layers", "at most 2 ranks"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("assignments", "said"),
    [
        (
            ["plan.pipeline=2", "train.micro_batch=4"],
            "makes 1 micro-batches on a rank, which schedule 1f1b of 2 stages",
        ),
        (["plan.pipeline=2", "plan.shard=4"], "gives each rank 1 samples"),
    ],
)
def test_numbers_of_micro_batches_are_refused(tiny: Any, assignments: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny(*assignments)
    assert said in str(caught.value)


def test_a_pipeline_is_kept_busy_without_being_asked(tiny: Any) -> None:
    run: Run = tiny("plan.pipeline=2", "train.batch=32")
    assert run.rank_batch // run.micro_batch == 4
    assert tiny("train.batch=32").micro_batch == 32


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_torch_takes_what_the_plan_takes(pool: Pool, schedule: Schedule) -> None:
    """The rule of each schedule for numbers of micro-batches is torch's."""
    plan = Plan(pipeline=2, schedule=schedule)
    found = pool.run(accepted_by_torch, plan)
    assert found[0] == found[1] == [plan.takes(number) for number in range(1, 12)]


def accepted_by_torch(plan: Plan) -> list[bool] | None:
    mesh = own_mesh(plan.grid)
    if mesh is None:
        return None
    stages = [
        torch.distributed.pipelining.PipelineStage(
            torch.nn.Identity(), index, plan.num_stages, torch.device("cpu"), group=mesh.group("pipeline")
        )
        for index in indexes_of(plan, mesh.index("pipeline"))
    ]
    found = []
    for number in range(1, 12):
        try:
            CLASSES[plan.schedule](stages[0] if plan.schedule in SINGLE else stages, n_microbatches=number)
        except ValueError:
            found.append(False)
        else:
            found.append(True)
    return found
