"""Recomputation that fits a device: what is free, what a step holds beside activations, and that the rest is used and kept to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from surefoot.config import ConfigError
from surefoot.dist import startup
from surefoot.dist.fake import META, fake_world
from surefoot.dist.startup import free_memory
from surefoot.observe.folder import RunFolder
from surefoot.observe.schema import Hook
from surefoot.ops.autograd import Call
from surefoot.ops.loss import working_bytes
from surefoot.parallel.apply import lay_out
from surefoot.parallel.holdings import held_bytes
from surefoot.parallel.recompute import Budget, RecomputeConfig
from surefoot.study.dry import dry_run
from surefoot.train import ready
from surefoot.train.run import Run
from surefoot.train.trainer import Trainer

Tiny = Callable[..., Run]
MIB = 1 << 20
FIT = ("plan.recompute.mode=budget", "plan.recompute.budget=device")


@pytest.mark.parametrize(
    ("text", "share", "size"),
    [("device", 0.9, None), ("80%", 0.8, None), ("12.5 %", 0.125, None), ("100%", 1.0, None), ("3MiB", None, 3 * MIB)],
)
def test_a_budget_is_a_size_or_a_share(text: str, share: float | None, size: int | None) -> None:
    config = RecomputeConfig(mode="budget", budget=text)
    assert (config.device_share, config.budget_bytes) == (share, size)


@pytest.mark.parametrize("text", ["0%", "100.1%", "-5%", "devices", "%", "0.8", ""])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"budget: .*80%"):
        RecomputeConfig(mode="budget", budget=text)


PLANS = {
    "one process": [],
    "copies": ["plan.replicate=2"],
    "ZeRO-1": ["plan.shard=2", "plan.zero=1"],
    "ZeRO-2": ["plan.shard=2", "plan.zero=2"],
    "ZeRO-3": ["plan.shard=2"],
    "tensor": ["plan.shard=2", "plan.tensor=2", "model.mixer.num_kv_heads=2"],
    "narrow": ["plan.shard=2", "precision.parameters=bf16", "precision.compute=bf16"],
}


@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("changes", PLANS.values(), ids=PLANS)
def test_formulas_are_what_a_step_holds(tiny: Tiny, changes: list[str], micro_batch: int) -> None:
    run = tiny("model.depth=4", "train.batch=8", f"train.micro_batch={micro_batch}", *changes)
    num_micro_batches = run.rank_batch // run.micro_batch
    with fake_world(run.plan.grid, 0) as world:
        laid = lay_out(
            run.plan,
            run.model,
            world.mesh,
            sequence_length=run.data.sequence_length,
            dtype=run.precision.weight_dtype,
            device=META,
            seed=0,
            precision=run.precision,
        )
        held = held_bytes(run.plan, laid.data_parallel, num_micro_batches)
    found = dry_run(run)
    assert held.parameters == found.holdings.parameter_bytes
    cut_early = run.plan.is_fully_sharded and num_micro_batches == 1
    # Parts alone are left after the pass; while it goes on a layer's whole gradients are there too.
    assert held.gradients > found.gradient_bytes if cut_early else held.gradients == found.gradient_bytes
    assert (held.gathered > 0) == run.plan.is_fully_sharded


@pytest.mark.parametrize("changes", [PLANS[name] for name in ("one process", "ZeRO-3", "tensor")], ids=str)
def test_a_step_stays_within_the_device_and_uses_it(tiny: Tiny, changes: list[str]) -> None:
    run = tiny("model.depth=12", "data.sequence_length=128", "train.batch=32", "train.micro_batch=16", *changes)
    none = dry_run(run)
    plan = run.plan.model_copy(update={"recompute": RecomputeConfig(mode="full")})
    full = dry_run(run.model_copy(update={"plan": plan}))
    plan = run.plan.model_copy(update={"recompute": RecomputeConfig(mode="budget", budget="device")})
    fitted = run.model_copy(update={"plan": plan})
    memory = (none.peak_bytes + full.peak_bytes) // 2
    found = dry_run(fitted, 0, memory)
    assert found.budget_bytes is not None
    assert full.peak_bytes < found.peak_bytes <= memory
    assert found.peak_bytes > 0.6 * memory
    larger = dry_run(fitted, 0, 2 * none.peak_bytes)
    assert larger.budget_bytes is not None
    assert larger.budget_bytes > found.budget_bytes
    assert larger.activation_bytes > found.activation_bytes
    with pytest.raises(ConfigError, match=r"plan\.recompute\.budget.*nothing for activations"):
        dry_run(fitted, 0, full.holdings.state_bytes)


def test_a_dry_run_needs_a_device(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"plan\.recompute\.budget: 'device': .*--device-memory"):
        dry_run(tiny(*FIT))


def test_what_is_left_once_a_layer_is_under_way_may_be_too_little() -> None:
    budget = Budget(None, 1, 0.5)
    said = budget.fit(200 * MIB, MIB, 2 * MIB)
    assert "activations may take 97.0 MiB, 50% of 200.0 MiB less 1.0 MiB" in said
    budget._calls = {(0, 0): Call(0, torch.autograd.Function, 0.1, 49 * MIB)}
    budget._least = {0: 2 * MIB}
    with pytest.raises(ConfigError, match=rf"budget: {1 * MIB}: bytes are left of the device.*micro_batch"):
        budget._pick()


# -- what is free ------------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


def test_ranks_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_left_in_groups", lambda _root: [400 * MIB])
    assert free_memory(CPU) == 400 * MIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_memory(CPU) == 100 * MIB


def test_a_control_group_limits_what_is_free(tmp_path: Path) -> None:
    for folder, limit in ((tmp_path, "max"), (tmp_path / "own", str(300 * MIB))):
        folder.mkdir(exist_ok=True)
        for name, text in (
            ("max", limit),
            ("current", str(120 * MIB)),
            ("stat", f"anon 1\ninactive_file {20 * MIB}\n"),
        ):
            (folder / f"memory.{name}").write_text(text + "\n")
    assert min(startup._left_in_groups(tmp_path / "own")) == 200 * MIB
    assert min(startup._left_in_groups(tmp_path)) == 1 << 63
    assert min(startup._left_in_groups(tmp_path / "absent")) == 1 << 63


def test_a_system_that_does_not_say_is_refused(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_device: torch.device) -> int:
        raise ValueError("this system does not say")

    monkeypatch.setattr(ready, "free_memory", unknown)
    run = tiny(*FIT)
    with pytest.raises(ConfigError, match=r"plan\.recompute\.budget: 'device': this system does not say"):
        Trainer(run, RunFolder.create(tmp_path / "run", run)).fit()


# -- a run -------------------------------------------------------------------------------------------------------------


def test_a_run_says_which_budget_results(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Listener(Hook):
        def on_message(self, text: str) -> None:
            said.append(text)

    short = ("train.num_steps=2", "checkpoint.every=null", "train.batch=4", "train.micro_batch=2")
    run = tiny(*short, *FIT)
    held = dry_run(run, 0, 100 * MIB)
    beside = held.holdings.parameter_bytes + held.gradient_bytes + held.holdings.state_bytes
    around = working_bytes(64, run.model.vocab_size, run.model.width, torch.float32)
    around += 4 * 64 * run.model.width * 4
    memory = int((beside + around + 1_000_000) / 0.9)
    monkeypatch.setattr(ready, "free_memory", lambda _device: memory)
    weights = []
    for number, each in enumerate((tiny(*short), run)):
        trainer = Trainer(each, RunFolder.create(tmp_path / str(number), each), [Listener()])
        assert trainer.fit()
        weights.append([param.tensor.clone() for param in trainer.params])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    assert sum(line.startswith("recomputation fits the device: activations may take 1.0 MiB") for line in said) == 1
    facts = json.loads((tmp_path / "1" / "facts.json").read_text())["recomputation"]
    assert (facts["device_bytes"], facts["device_share"], facts["held_bytes"]) == (memory, 0.9, beside)
    assert facts["budget_bytes"] == int(0.9 * memory) - beside - facts["under_way_bytes"]
    assert facts["under_way_bytes"] >= around
    assert 0 < facts["kept_bytes"] <= facts["budget_bytes"]
