"""A slow rank is told from those that wait for it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from surefoot.config import override
from surefoot.dist.mesh import own_mesh
from surefoot.dist.pool import Pool
from surefoot.dist.waiting import WaitClock
from surefoot.observe.folder import RunFolder
from surefoot.train.pace import Pace
from surefoot.train.run import Run
from surefoot.train.trainer import Trainer

Tiny = Callable[..., Run]


class Slow(Trainer):
    """Rank 1 takes half a second longer for every gradient."""

    def _set_up(self) -> None:
        super()._set_up()
        accumulate = self.laid.accumulate

        def slowly(*arguments: Any) -> tuple[float, float]:
            time.sleep(0.5 * (self.rank == 1))
            return accumulate(*arguments)

        self.laid.accumulate = slowly  # type: ignore[method-assign]


def fit(run: Run, path: Path, kind: type[Trainer]) -> bool | None:
    mesh = own_mesh(run.plan.grid)
    if mesh is None:
        return None
    folder = RunFolder.create(path, run) if mesh.rank == 0 else RunFolder(path)
    return kind(run, folder, rank=mesh.rank).fit()


def test_the_slowest_rank_is_in_the_record_and_bits_are_the_same(pool: Pool, tiny: Tiny, tmp_path: Path) -> None:
    run = override(tiny(), ["plan.shard=4", "train.num_steps=4", "model.mixer.num_kv_heads=2"])
    for path, kind in ((tmp_path / "slow", Slow), (tmp_path / "plain", Trainer)):
        assert pool.run(fit, run, path, kind)[:4] == [True] * 4
    lines = [json.loads(line) for line in (tmp_path / "slow" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["slowest_rank"] is None
    # The first step of a process warms up in ways that differ; from then on only the sleep counts.
    assert [line["slowest_rank"] for line in lines[2:]] == [1] * 2
    assert all(line["slowest_ratio"] > 1.5 for line in lines[2:])
    results = [json.loads((tmp_path / name / "facts.json").read_text())["result"] for name in ("slow", "plain")]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]


def test_a_rank_that_stays_slow_is_said_after_20_40_80_steps() -> None:
    pace = Pace(WaitClock())
    said = {}
    for step in range(1, 101):
        if (line := pace.compare([1.0, 1.1, 2.0, 0.9])) is not None:
            said[step] = line
    assert list(said) == [20, 40, 80]
    assert said[20] == (
        "rank 2 is slow: 2 s of its own work a step, 2.0 times the median of all ranks, for 20 steps; "
        "the others wait for it"
    )
    assert pace.slowest == (2, 2.0)


def test_changing_ranks_and_small_differences_are_not_said() -> None:
    pace = Pace(WaitClock())
    assert not any(pace.compare([2.0 if rank == step // 10 % 3 else 1.0 for rank in range(3)]) for step in range(100))
    assert not any(pace.compare([1.0, 1.4]) for _ in range(100))


def test_nothing_is_known_of_one_rank_or_before_the_first_step() -> None:
    pace = Pace(WaitClock())
    assert pace.compare([0.0, 0.0]) is None
    assert pace.slowest is None
    pace.compare([1.0])
    assert pace.slowest is None


def test_waits_are_counted_and_the_method_is_put_back(pool: Pool) -> None:
    waited = pool.run(wait_for_rank_0)
    assert min(waited[1:]) > 0.2
    assert waited[0] < 0.2


def wait_for_rank_0() -> float:
    before = dist.Work.wait
    dist.barrier()
    with WaitClock() as clock:
        if dist.get_rank() == 0:
            time.sleep(0.5)
        dist.all_reduce(torch.ones(1))
    assert dist.Work.wait is before
    return clock.seconds
