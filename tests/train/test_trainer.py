"""The loop: bitwise resume, exact accumulation, evidence of a broken step, signals, and hooks that change nothing."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.blocks.base import RouterConfig
from surefoot.blocks.ffn.moe import MoEConfig
from surefoot.blocks.routers.expert_choice import ExpertChoiceConfig
from surefoot.blocks.routers.sigmoid import SigmoidConfig
from surefoot.blocks.routers.sinkhorn import SinkhornConfig
from surefoot.checkpoint import saver
from surefoot.checkpoint.load import latest, open_checkpoint, read_tensors
from surefoot.config import CheckpointError, ConfigError, RunError
from surefoot.dist.mesh import Mesh
from surefoot.observe.folder import RunFolder, read_lines
from surefoot.observe.schema import Hook, StepReport
from surefoot.parallel.apply import Laid, lay_out
from surefoot.train.agree import Ranks
from surefoot.train.evaluate import evaluate
from surefoot.train.run import Run, effect_of_change
from surefoot.train.state import compare_configurations, compare_machines, load_model, states_of
from surefoot.train.step import micro_batches
from surefoot.train.trainer import Trainer

Tiny = Callable[..., Run]
TIMED = {"tokens_per_second", "mfu", "memory_bytes", "step_seconds", "data_seconds", "seconds", "time"}


def fit(run: Run, path: Path, hooks: tuple[Hook, ...] = ()) -> Trainer:
    folder = RunFolder(path) if (path / "run.json").exists() else RunFolder.create(path, run)
    trainer = Trainer(run, folder, hooks)
    trainer.fit()
    return trainer


def result(path: Path) -> dict[str, Any]:
    return {
        key: value for key, value in json.loads((path / "facts.json").read_text())["result"].items() if key != "seconds"
    }


def metrics(path: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in line.items() if key not in TIMED} for line in read_lines(path / "metrics.jsonl")
    ]


class StopAfter(Hook):
    """Sends this process a signal during a step."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def on_step(self, report: StepReport) -> None:
        if report.step == self.step:
            os.kill(os.getpid(), self.number)


def laid_and_batch(run: Run, count: int) -> tuple[Laid, Any]:
    laid = lay_out(
        run.plan,
        run.model,
        Mesh(run.plan.grid),
        sequence_length=run.data.sequence_length,
        dtype=torch.float64,
        device=torch.device("cpu"),
        seed=1,
    )
    return laid, run.data.build().batch(0, count)


def accumulate(laid: Laid, batch: Any, size: int) -> float:
    cpu = torch.device("cpu")
    return laid.accumulate(micro_batches(batch, size, cpu), batch.num_tokens, torch.float64)[0]


def test_accumulation_changes_nothing(tiny: Tiny) -> None:
    """1x8, 2x4 and 8x1 micro-batches over ragged documents: the same gradients to 1e-12 and the same loss."""
    run = tiny("precision.compute=fp64")
    found = []
    for size in (8, 4, 1):
        laid, batch = laid_and_batch(run, 8)
        nll = accumulate(laid, batch, size)
        found.append((nll, [local.part.grad.clone() for local in laid.locals]))
    valid_a_row = (batch.targets_BL >= 0).sum(1)
    assert len(set(valid_a_row.tolist())) > 1, "the batch is not ragged"
    for nll, gradients in found[1:]:
        assert nll == pytest.approx(found[0][0], rel=1e-14)
        for gradient, wanted in zip(gradients, found[0][1], strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-12)


def test_the_gradient_is_of_the_mean_over_valid_tokens(tiny: Tiny) -> None:
    laid, batch = laid_and_batch(tiny("precision.compute=fp64", "model.z_loss=0"), 4)
    accumulate(laid, batch, 1)
    model = laid.model
    gradient = model.head.weight.grad.clone()
    model.zero_grad()
    from surefoot.ops.documents import Documents

    hidden = model(torch.from_numpy(batch.tokens_BL), Documents(torch.from_numpy(batch.documents_BL), 32))
    logits = model.logits(hidden).flatten(0, 1)
    torch.nn.functional.cross_entropy(
        logits, torch.from_numpy(batch.targets_BL).flatten(), ignore_index=-100
    ).backward()
    torch.testing.assert_close(gradient, model.head.weight.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("change", ["precision.compute=fp32", "precision.compute=bf16", "model.tied=true"])
def test_a_resumed_run_is_bitwise_the_same(tiny: Tiny, tmp_path: Path, change: str) -> None:
    """N + M steps straight = N, stop, M: weights, token stream, and every recorded number that is not a time."""
    run = tiny(change)
    fit(run, tmp_path / "straight")
    stopped = fit(run, tmp_path / "cut", (StopAfter(5, signal.SIGTERM),))
    assert stopped.stop_signal == signal.SIGTERM
    assert stopped.progress.step == 5
    assert "result" not in json.loads((tmp_path / "cut" / "facts.json").read_text())
    fit(run, tmp_path / "cut")
    assert result(tmp_path / "cut") == result(tmp_path / "straight")
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "straight")
    assert [line["step"] for line in metrics(tmp_path / "cut")] == list(range(1, 9))


@pytest.mark.parametrize("launched", [False, True])
def test_a_launched_rank_takes_a_second_sigterm_for_the_first(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: bool
) -> None:
    """A scheduler signals every process of a job, torchrun its ranks: two signals for one order."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    if launched:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    try:
        stopped = fit(tiny(), tmp_path / "run", (StopAfter(5, signal.SIGTERM), StopAfter(5, signal.SIGTERM)))
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stopped.progress.step == 5
    assert len(seen) == (0 if launched else 2)


def test_a_resumed_run_goes_on_with_its_routers(tiny: Tiny, tmp_path: Path) -> None:
    """Biases learned from loads come back with the weights, and the record says how experts were chosen."""
    router = SigmoidConfig(bias_rate=0.05)
    run = tiny()
    ffn = MoEConfig(num_experts=4, top_k=2, hidden=12, router=router)
    run = run.model_copy(update={"model": run.model.model_copy(update={"ffn": ffn})})
    straight = fit(run, tmp_path / "straight")
    fit(run, tmp_path / "cut", (StopAfter(5, signal.SIGTERM),))
    fit(run, tmp_path / "cut")
    assert result(tmp_path / "cut") == result(tmp_path / "straight")
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "straight")
    assert all(state.tensor.any() for state in straight.states)
    checkpoint = latest(tmp_path / "cut" / "checkpoints", announce=print)
    assert checkpoint is not None
    model = load_model(run, checkpoint, torch.device("cpu"))
    for found, wanted in zip(states_of(model), straight.states, strict=True):
        assert found.name == wanted.name
        assert torch.equal(found.tensor, wanted.tensor)
    for line in metrics(tmp_path / "straight"):
        assert 0 < line["router"]["load_entropy"] <= 1
        assert 0.25 <= line["router"]["max_load_share"] <= 0.5
        assert line["router"]["auxiliary_loss"] == pytest.approx(2 * router.balance_loss, rel=1.0)


@pytest.mark.parametrize("router", [ExpertChoiceConfig(), SinkhornConfig(), SigmoidConfig()])
def test_a_run_whose_router_looks_ahead_says_so_once(router: RouterConfig, tiny: Tiny, tmp_path: Path) -> None:
    said, run = list[str](), tiny("train.num_steps=2")

    class Listen(Hook):
        def on_message(self, text: str) -> None:
            said.append(text)

    ffn = MoEConfig(num_experts=4, top_k=2, hidden=12, router=router)
    fit(run.model_copy(update={"model": run.model.model_copy(update={"ffn": ffn})}), tmp_path / "run", (Listen(),))
    name = type(router).__name__.removesuffix("Config")
    wanted = 0 if isinstance(router, SigmoidConfig) else 1
    assert sum(text.startswith(f"WARNING: {name} looks ahead") for text in said) == wanted


def test_the_record_adds_up(tiny: Tiny, tmp_path: Path) -> None:
    run = tiny()
    trainer = fit(run, tmp_path / "run")
    lines, facts = metrics(tmp_path / "run"), json.loads((tmp_path / "run" / "facts.json").read_text())
    assert lines[-1]["samples"] == 32
    assert lines[-1]["tokens"] == sum(trainer.dataset.batch(4 * step, 4).num_tokens for step in range(8))
    assert lines[-1]["flops"] == facts["flops_per_token"]["causal"] * 32 * 32
    assert facts["parameters"]["total"] == sum(param.tensor.numel() for param in trainer.params)
    batch = trainer.dataset.batch(28, 4)
    assert lines[-1]["bits_per_byte"] == pytest.approx(
        lines[-1]["loss"] * batch.num_tokens / math.log(2) / batch.num_bytes
    )
    assert set(lines[0]["update_ratio"]) == {"matrix", "vocabulary", "vector"}
    assert all(0 < line["clip_coefficient"] <= 1 for line in lines)
    assert sum(len(group["names"]) for group in facts["optimizer"]) == len(trainer.params)
    assert read_lines(tmp_path / "run" / "evaluations.jsonl")[-1]["is_whole"]
    audit = json.loads((tmp_path / "run" / "data.json").read_text())
    assert audit["tokens"] == lines[-1]["tokens"]


def test_hooks_evaluation_and_saving_change_nothing(tiny: Tiny, tmp_path: Path) -> None:
    fit(tiny(), tmp_path / "watched", (Hook(),))
    fit(tiny("observe.evaluate_every=null", "checkpoint.every=null"), tmp_path / "alone")
    watched, alone = result(tmp_path / "watched"), result(tmp_path / "alone")
    assert watched["weights_sha256"] == alone["weights_sha256"]
    assert watched["token_hash"] == alone["token_hash"]


def test_saving_in_the_background_changes_nothing(tiny: Tiny, tmp_path: Path) -> None:
    """Weights, moments and records at every checkpoint: those of a run that waits for each save."""
    for mode in ("asynchronous", "blocking"):
        fit(tiny("checkpoint.every=1", "checkpoint.keep_last=99", f"checkpoint.mode={mode}"), tmp_path / mode)
    first, second = tmp_path / "asynchronous", tmp_path / "blocking"
    assert result(first) == result(second)
    assert metrics(first) == metrics(second)
    for step in range(1, 9):
        found, wanted = (
            read_tensors(open_checkpoint(path / "checkpoints" / f"step-{step:08d}")) for path in (first, second)
        )
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted if not name.startswith("random/")), step


def test_a_disk_that_is_full_ends_the_run_at_the_next_step(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the checkpoints that were there, from which it goes on once there is room."""
    fit(tiny(), tmp_path / "straight")
    write = saver.write_parts

    def fail(directory: Path, rank: int, parts: Any) -> Any:
        if "step-00000004" in directory.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(directory, rank, parts)

    with monkeypatch.context() as patch:
        patch.setattr(saver, "write_parts", fail)
        with pytest.raises(CheckpointError, match=r"step-00000004: cannot be saved \(No space left on device\); make"):
            fit(tiny(), tmp_path / "cut")
    assert [path.name for path in (tmp_path / "cut" / "checkpoints").iterdir()] == ["step-00000002"]
    assert metrics(tmp_path / "cut")[-1]["step"] in (5, 6)
    fit(tiny(), tmp_path / "cut")
    assert result(tmp_path / "cut") == result(tmp_path / "straight")
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "straight")


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_killed_while_a_checkpoint_is_written_in_the_background(tiny: Tiny, tmp_path: Path) -> None:
    """Half of step 4 is on the disk when the process dies in step 5: the run goes on from step 2."""
    fit(tiny(), tmp_path / "straight")
    write = saver.write_parts

    def stall(directory: Path, rank: int, parts: Any) -> Any:
        if "step-00000004" in directory.name:
            write(directory, rank, itertools.islice(parts, 5))
            time.sleep(60)
        return write(directory, rank, parts)

    class Die(Hook):
        def on_step(self, report: StepReport) -> None:
            if report.step == 5:
                while not list((tmp_path / "cut" / "checkpoints").glob(".staging-*/__0_0.distcp")):
                    time.sleep(0.001)
                os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        saver.write_parts = stall
        try:
            fit(tiny(), tmp_path / "cut", (Die(),))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = {path.name.partition("-")[0] for path in (tmp_path / "cut" / "checkpoints").iterdir()}
    assert left == {"step", ".staging"}
    said: list[str] = []

    class Listen(Hook):
        def on_message(self, text: str) -> None:
            said.append(text)

    fit(tiny(), tmp_path / "cut", (Listen(),))
    assert any("resuming from" in line and "step-00000002" in line for line in said)
    assert result(tmp_path / "cut") == result(tmp_path / "straight")
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "straight")
    assert {path.name for path in (tmp_path / "cut" / "checkpoints").iterdir()} == {"step-00000006", "step-00000008"}


def test_a_seed_decides_and_micro_batches_do_not(tiny: Tiny, tmp_path: Path) -> None:
    losses = {}
    for name, assignments in {
        "a": (),
        "b": ("train.seed=1",),
        "c": ("data.seed=1",),
        "d": ("train.micro_batch=1",),
    }.items():
        fit(tiny("train.num_steps=3", *assignments), tmp_path / name)
        losses[name] = [line["loss"] for line in metrics(tmp_path / name)]
    assert losses["a"] != losses["b"] != losses["c"] != losses["a"]
    assert losses["d"] == pytest.approx(losses["a"], rel=1e-4)


def test_training_lowers_the_loss(tiny: Tiny, tmp_path: Path) -> None:
    fit(tiny("train.num_steps=60", "checkpoint.every=null"), tmp_path / "run")
    lines = metrics(tmp_path / "run")
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]


def test_a_damaged_checkpoint_is_named_and_the_previous_one_taken(tiny: Tiny, tmp_path: Path) -> None:
    run, said = tiny(), []

    class Listen(Hook):
        def on_message(self, text: str) -> None:
            said.append(text)

    fit(run, tmp_path / "straight")
    fit(run, tmp_path / "cut", (StopAfter(7, signal.SIGINT),))
    newest = tmp_path / "cut" / "checkpoints" / "step-00000007"
    victim = next(file for file in newest.iterdir() if file.suffix == ".distcp")
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    fit(run, tmp_path / "cut", (Listen(),))
    assert any("passing over a checkpoint" in line and "step-00000007" in line for line in said)
    assert any("resuming from" in line and "step-00000006" in line for line in said)
    assert result(tmp_path / "cut") == result(tmp_path / "straight")


def test_a_loss_that_is_no_number_stops_the_run_with_evidence(tiny: Tiny, tmp_path: Path) -> None:
    run = tiny("optim.lr=1e30", "optim.vocabulary_lr=1e30", "schedule.warmup=0")
    with pytest.raises(RunError) as caught:
        fit(run, tmp_path / "run")
    message = str(caught.value)
    assert "\n" not in message
    step = int(message.split()[1].rstrip(":"))
    place = tmp_path / "run" / "evidence" / f"step-{step:08d}"
    evidence = json.loads((place / "evidence.json").read_text())
    assert evidence["documents"][0] in message
    assert evidence["documents"][0].startswith("files/")
    assert set(evidence["gradient_norms"]) > {"layers.0.mixer.wq", "embedding.weight"}
    tokens = np.load(place / "batch.npz")["tokens"]
    assert (tokens == run.data.build().batch(4 * (step - 1), 4).tokens_BL).all()
    saved = latest(tmp_path / "run" / "checkpoints", announce=print)
    assert saved is not None
    assert saved.step == step - 1
    assert len(metrics(tmp_path / "run")) == step - 1


def test_evaluation_is_exact_whatever_the_batch(tiny: Tiny) -> None:
    run = tiny("precision.compute=fp64")
    laid, _ = laid_and_batch(run, 1)
    cpu = torch.device("cpu")

    def reported(size: int, max_batches: int | None) -> Any:
        batches = dataset.heldout(size)
        settings = {"step": 0, "batch": size, "micro_batch": size, "device": cpu, "dtype": torch.float64}
        return evaluate(laid, Ranks(laid.mesh, cpu), batches, max_batches=max_batches, **settings)

    dataset = run.data.build()
    found = [reported(size, None) for size in (1, 3, 100)]
    for report in found[1:]:
        assert report.loss == pytest.approx(found[0].loss, rel=1e-13)
        assert (report.tokens, report.bytes) == (found[0].tokens, found[0].bytes)
    assert all(report.is_whole for report in found)
    part = reported(2, 1)
    assert not part.is_whole
    assert part.tokens < found[0].tokens


def test_resuming_with_other_settings(tiny: Tiny) -> None:
    saved = tiny()
    assert compare_configurations(saved, saved, ()) == []
    lines = compare_configurations(saved, tiny("checkpoint.every=1", "train.micro_batch=2"), ())
    assert [line.split(":")[0] for line in lines] == ["changed train.micro_batch", "changed checkpoint.every"]
    assert "last bits" in lines[0]
    for assignment in (
        "optim.lr=0.5",
        "train.num_steps=9",
        "data.seed=3",
        "model.z_loss=0",
        "schedule.decay=0.5",
        "train.batch=8",
    ):
        path = assignment.partition("=")[0]
        with pytest.raises(RunError, match=f"^{path}: .*--accept {path}"):
            compare_configurations(saved, tiny(assignment), ())
        assert "no longer the same run" in compare_configurations(saved, tiny(assignment), (path,))[0]


def test_every_leaf_has_an_effect_class(tiny: Tiny) -> None:
    from surefoot.config import flatten

    effects = {path: effect_of_change(path) for path in flatten(tiny())}
    assert effects.pop("train.timeout") == "none"
    assert {path.split(".")[0] for path, effect in effects.items() if effect == "none"} == {
        "name",
        "observe",
        "checkpoint",
    }
    assert effects["optim.lr"] == effects["data.sources.0.weight"] == effects["train.seed"] == "run"


def test_another_machine_is_said() -> None:
    old = {"versions": {"torch": "2.11"}, "device": {"name": "a", "threads": 2}}
    new = {"versions": {"torch": "2.13"}, "device": {"name": "a", "threads": 1}}
    assert [line.split()[0] for line in compare_machines(old, new)] == ["versions.torch", "device.threads"]


def test_a_small_vocabulary_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.vocab_size: 200: .*use 257 or more"):
        fit(tiny("model.vocab_size=200"), tmp_path / "run")


def _killed_at(run: Run, path: Path, delay: float) -> bool:
    """Train in a child and kill it -9 after `delay` seconds; returns whether it had finished by then."""
    child = os.fork()
    if child == 0:
        with Path(os.devnull).open("w") as sink:
            os.dup2(sink.fileno(), 1)
            os.dup2(sink.fileno(), 2)
        try:
            fit(run, path)
        finally:
            os._exit(0)
    deadline = time.monotonic() + delay
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("wanted", [3, pytest.param(20, marks=pytest.mark.long)])
def test_killed_at_random_moments_the_end_is_bitwise_the_same(tiny: Tiny, tmp_path: Path, wanted: int) -> None:
    """kill -9 at random moments, set-up, steps and saves alike; then the run ends as if nothing had happened."""
    run = tiny("train.num_steps=400", "checkpoint.every=5", "observe.evaluate_every=50")
    fit(run, tmp_path / "straight")
    started = time.monotonic()
    while not _killed_at(run, tmp_path / "probe", 60):
        pass
    whole = time.monotonic() - started
    generator, kills = random.Random(1), 0
    path = tmp_path / "killed"
    while kills < wanted:
        finished = _killed_at(run, path, generator.uniform(0.05, 0.3) * whole)
        if finished:  # a fast machine got through: what it made must be right, and the rest of the kills start afresh
            assert result(path) == result(tmp_path / "straight")
            path = path.with_name(path.name + "-again")
        else:
            kills += 1
    fit(run, path)
    assert result(path) == result(tmp_path / "straight")
    assert metrics(path) == metrics(tmp_path / "straight")


def test_a_folder_of_which_a_kill_left_only_the_start_is_taken(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "run"
    (path / "logs").mkdir(parents=True)
    (path / ".run.json.123").write_text("{")
    RunFolder.create(path, tiny())
    assert (path / "run.json").is_file()
    with pytest.raises(RunError, match="already exists"):
        RunFolder.create(path, tiny())
