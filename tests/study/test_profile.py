"""Profiling changes no bit of a run, covers the whole step, and finds the same FLOPs as the run's record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.config import ConfigError
from surefoot.dist.mesh import own_mesh
from surefoot.dist.pool import Pool
from surefoot.models.count import build_meta, flops_per_token
from surefoot.observe.folder import RunFolder
from surefoot.study.profile import PARTS, PHASES, WARM_UP, Profile, profile
from surefoot.train.facts import weights_hash
from surefoot.train.run import Run
from surefoot.train.trainer import Trainer

STEPS = WARM_UP + 2 * 2 + 1
QUIET = ("observe.evaluate_every=null", "checkpoint.every=null", f"train.num_steps={STEPS}")


@pytest.mark.parametrize(
    "changes", [(), ("train.micro_batch=2",), ("plan.recompute.mode=selective",), ("precision.compute=bf16",)]
)
def test_the_bits_are_those_of_training(tiny: Callable[..., Run], tmp_path: Path, changes: tuple[str, ...]) -> None:
    run = tiny(*QUIET, *changes)
    folder = RunFolder.create(tmp_path / "run", run)
    assert Trainer(run, folder).fit()
    found = profile(run, 2, trace=tmp_path / "trace.json")
    trained = folder.read_json("facts.json")["result"]["weights_sha256"]
    assert weights_hash(sorted((param.name, param.tensor) for param in found.params)) == trained


def test_every_part_has_its_time(tiny: Callable[..., Run]) -> None:
    found = profile(tiny(*QUIET, "train.micro_batch=2"), 2)
    assert {place.phase for place in found.spent} == set(PHASES) - {"recompute"}
    for part in set(PARTS) - {"other", "connection"}:
        assert found.total(phase="forward", part=part).seconds > 0, part
        assert found.total(phase="backward", part=part).seconds > 0, part
    for layer in range(2):
        for part in ("mixer", "ffn", "norm"):
            assert found.total(phase="backward", part=part, layer=layer).seconds > 0
    total = found.total()
    assert 0 < total.seconds + total.waited <= found.hooked_seconds
    assert found.total(phase="optimizer").num_bytes > 0


def test_recomputed_parts_are_apart(tiny: Callable[..., Run]) -> None:
    found = profile(tiny(*QUIET, "plan.recompute.mode=full"), 1)
    assert found.total(phase="recompute", part="ffn", layer=1).seconds > 0
    assert found.total(phase="backward", part="ffn", layer=1).seconds > 0


def test_flops_add_up_and_mfu_stays_below_1(tiny: Callable[..., Run]) -> None:
    run = tiny(*QUIET)
    found = profile(run, 1)
    causal = flops_per_token(build_meta(run.model), run.data.sequence_length)["causal"]
    assert sum(found.flops.values()) == pytest.approx(causal * run.train.batch * run.data.sequence_length)
    assert found.mfu is not None
    assert 0 < found.mfu < 1
    faster = Profile(**{**vars(found), "flops_per_second": 2 * (found.peak or 0)})
    assert faster.mfu == 1


def _profiled(run: Run) -> tuple[float, float] | None:
    mesh = own_mesh(run.plan.grid)
    if mesh is None:
        return None
    found = profile(run, 1, rank=mesh.rank)
    return found.total().waited, found.mfu or 0.0


@pytest.mark.parametrize("plan", ["plan.replicate=2", "plan.shard=2", "plan.tensor=2"])
def test_two_ranks_wait_for_each_other(tiny: Callable[..., Run], pool: Pool, plan: str) -> None:
    found = [each for each in pool.run(_profiled, tiny(*QUIET, "model.mixer.num_kv_heads=2", plan)) if each is not None]
    assert len(found) == 2
    assert all(waited > 0 and 0 < mfu < 1 for waited, mfu in found)


def test_a_trace_names_the_places(tiny: Callable[..., Run], tmp_path: Path) -> None:
    profile(tiny(*QUIET), 1, trace=tmp_path / "trace.json")
    names = {event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"data: other", "forward: mixer 0", "backward: ffn 1", "optimizer: other"} <= names


def test_what_cannot_be_profiled_is_refused(tiny: Callable[..., Run]) -> None:
    with pytest.raises(ConfigError, match="--steps: 0"):
        profile(tiny(), 0)
    with pytest.raises(ConfigError, match=r"plan\.pipeline: 2"):
        profile(tiny("plan.pipeline=2"), 1)
