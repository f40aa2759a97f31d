"""A run over ranks is the run of one process: same losses, same token stream, checkpoints that any layout continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.checkpoint.load import latest, read_tensors
from surefoot.config import ConfigError, RunError, override, to_json
from surefoot.dist.mesh import own_mesh
from surefoot.dist.pool import Pool
from surefoot.observe.folder import RunFolder
from surefoot.observe.schema import Hook, StepReport
from surefoot.parallel.plan import Plan
from surefoot.train.run import Run
from surefoot.train.trainer import Trainer
from tests.running import is_running

Tiny = Callable[..., Run]

PLANS = [
    Plan(replicate=2),
    Plan(shard=2, zero=1),
    Plan(shard=4, zero=2),
    Plan(replicate=2, shard=2),
    Plan(tensor=2),
    Plan(context=2, context_kind="ring"),
    Plan(shard=2, tensor=2, context=2, context_kind="gather"),
    Plan(pipeline=2, shard=2),
    Plan(pipeline=2, tensor=2, schedule="gpipe"),
]


class StopAfter(Hook):
    """Sends this process a signal during a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, report: StepReport) -> None:
        if report.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def fit(run: Run, path: Path, stop_after: int | None = None) -> bool | None:
    """One rank of a run; whether it reached its end, None on a rank that the plan does not use."""
    mesh = own_mesh(run.plan.grid)
    if mesh is None:
        return None
    folder = RunFolder(path)
    if mesh.rank == 0 and not path.exists():
        folder = RunFolder.create(path, run)
    hooks = () if stop_after is None else (StopAfter(stop_after),)
    return Trainer(run, folder, hooks, rank=mesh.rank).fit()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def assert_same_run(path: Path, reference: Path) -> None:
    found, expected = lines(path), lines(reference)
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for line, wanted in zip(found, expected, strict=True):
        for key in ("token_hash", "tokens", "samples", "learning_rate"):
            assert line[key] == wanted[key], key
        for key in ("loss", "bits_per_byte", "z_loss", "gradient_norm", "clip_coefficient"):
            assert line[key] == pytest.approx(wanted[key], rel=1e-9), key
    results = [json.loads((folder / "facts.json").read_text())["result"] for folder in (path, reference)]
    assert results[0]["heldout_bits_per_byte"] == pytest.approx(results[1]["heldout_bits_per_byte"], rel=1e-9)
    weights = [read_tensors(newest(folder), "model/") for folder in (path, reference)]
    for name, value in weights[1].items():
        torch.testing.assert_close(weights[0][name], value, rtol=1e-8, atol=1e-9, msg=name)


def newest(path: Path) -> Any:
    found = latest(path / "checkpoints", pytest.fail)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def run(tiny: Tiny) -> Run:
    return override(tiny(), ["precision.compute=fp64", "data.sequence_length=32", "model.mixer.num_kv_heads=2"])


@pytest.fixture(scope="module")
def straight(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("straight") / "run"
    fit(run, path)
    return path


@pytest.mark.parametrize("plan", PLANS, ids=Plan.describe)
def test_every_layout_is_the_run_of_one_process(
    pool: Pool, run: Run, straight: Path, tmp_path: Path, plan: Plan
) -> None:
    over = run.model_copy(update={"plan": plan})
    finished = pool.run(fit, over, tmp_path / "run")
    assert finished == [True] * plan.num_ranks + [None] * (8 - plan.num_ranks)
    assert_same_run(tmp_path / "run", straight)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Plan(shard=2, tensor=2), Plan()),
        (Plan(), Plan(shard=4)),
        (Plan(shard=2, zero=1), Plan(tensor=2, replicate=2)),
        (Plan(shard=4, zero=3), Plan(context=2, context_kind="ulysses", shard=2, zero=2)),
    ],
    ids=lambda plan: plan.describe(),
)
def test_a_checkpoint_goes_on_in_any_layout(
    pool: Pool, run: Run, straight: Path, tmp_path: Path, first: Plan, second: Plan
) -> None:
    path = tmp_path / "run"
    stopped = pool.run(fit, run.model_copy(update={"plan": first}), path, 5)
    assert [end for end in stopped if end is not None] == [False] * first.num_ranks
    step = newest(path).step
    assert step in {5, 6}  # ranks agree at the start of the next step
    saved = read_tensors(newest(path))
    reopened = tmp_path / "reopened"
    pool.run(save_again, run.model_copy(update={"plan": second}), path, reopened)
    again = read_tensors(newest(reopened))
    assert saved.keys() == again.keys()
    assert all(torch.equal(saved[name], again[name]) for name in saved if not name.startswith("random/"))
    pool.run(fit, run.model_copy(update={"plan": second}), path)
    assert_same_run(path, straight)


def save_again(run: Run, path: Path, other: Path) -> None:
    """Restore a run's newest checkpoint in a layout and save what is in memory elsewhere."""
    mesh = own_mesh(run.plan.grid)
    if mesh is None:
        return
    trainer = Trainer(run, RunFolder(path), rank=mesh.rank)
    trainer._set_up()
    trainer.saver.folder = RunFolder(other).checkpoints
    trainer._save("blocking")


def test_a_loss_that_is_not_a_number_stops_every_rank(pool: Pool, run: Run, tmp_path: Path) -> None:
    bad = override(run, ["optim.lr=1e300", "optim.vector_lr=1e300", "plan.shard=2", "train.max_gradient_norm=null"])
    said = pool.run(fit_and_catch, bad, tmp_path / "run")
    assert all("step" in text for text in said[:2])
    (place,) = (tmp_path / "run" / "evidence").iterdir()
    evidence = json.loads((place / "evidence.json").read_text())
    assert len(evidence["documents"]) > 0
    assert len(evidence["gradient_norms"]) == len(read_tensors(newest(tmp_path / "run"), "model/"))


def fit_and_catch(run: Run, path: Path) -> str:
    try:
        fit(run, path)
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("assignments", "said"),
    [
        (["plan.shard=3"], "train.batch: 4: must divide over plan.replicate x plan.shard x plan.expert = 3"),
        (["plan.replicate=4", "train.micro_batch=2"], "train.micro_batch: 2"),
        (["plan.reshard=2"], "plan.reshard: 2: has an effect only with zero = 3"),
        (["plan.shard=4", "plan.reshard=2", "plan.tensor=2"], "plan.reshard: 2: works only where `shard` is all"),
    ],
)
def test_a_batch_that_ranks_cannot_share_is_refused(tiny: Tiny, assignments: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny(*assignments)
    assert said in str(caught.value)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from surefoot.cli.main import main; main()", *arguments]


@pytest.fixture
def saved(run: Run, tmp_path: Path) -> Path:
    file = tmp_path / "saved.json"
    file.write_text(to_json(run))
    return file


def test_ranks_from_the_command_line(saved: Path, straight: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        command("train", str(saved), "--ranks", "2", "--out", str(tmp_path / "run")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "layout: shard 2, ZeRO-3 (2 ranks)" in done.stdout
    assert_same_run(tmp_path / "run", straight)
    assert (tmp_path / "run" / "logs" / "rank-1.log").read_text() == ""
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "3"], "train.batch: 4: must divide"),
        (["--ranks", "4", "--set", "plan.tensor=3"], "plan: 'tensor 3': needs 3 ranks"),
        (["--set", "plan.shard=2"], "plan: 'shard 2, ZeRO-3': needs 2 ranks; add --ranks 2"),
        (["--ranks", "4", "--set", "plan.tensor=4"], "plan.tensor: 4: must divide"),
        (["--ranks", "0"], "--ranks"),
    ],
)
def test_a_layout_that_cannot_be_is_one_line(saved: Path, tmp_path: Path, arguments: list[str], said: str) -> None:
    done = subprocess.run(
        command("train", str(saved), "--out", str(tmp_path / "run"), *arguments),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_killed_rank_is_named_and_the_run_goes_on_later(saved: Path, straight: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("train", str(saved), "--ranks", "2", "--out", str(tmp_path / "run"), "--set", "train.threads=1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list((tmp_path / "run" / "checkpoints").glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout
    os.kill(int(children.split()[1]), signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    if process.returncode != 0:
        assert "rank 1 was ended by SIGKILL in step" in stderr
        assert "rank 1 is dead, last seen in" in stderr  # by rank 0, which lost it
        assert f"continue with: surefoot train --resume {tmp_path / 'run'} --ranks 2" in stderr
        done = subprocess.run(
            command("train", "--resume", str(tmp_path / "run"), "--ranks", "2"),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "run", straight)


@pytest.mark.long
def test_ranks_stop_with_the_process_that_started_them(saved: Path, straight: Path, tmp_path: Path) -> None:
    """Until they are gone nobody else writes their run; then it goes on."""
    path = tmp_path / "run"
    process = subprocess.Popen(
        command("train", str(saved), "--ranks", "2", "--out", str(path), "--set", "train.threads=1"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not list((path / "checkpoints").glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout.split()
    assert len(ranks) == 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while any(is_running(int(number)) for number in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if json.loads((path / "facts.json").read_text()).get("result") is None:
        subprocess.run(command("train", "--resume", str(path), "--ranks", "2"), capture_output=True, check=True)
    assert_same_run(path, straight)


def test_a_run_has_one_writer(run: Run, tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path / "run", run)
    first.hold()
    with pytest.raises(RunError, match="run: is being written by another process; stop that, or wait"):
        RunFolder.open(tmp_path / "run").hold()
    first.close()
    second = RunFolder.open(tmp_path / "run")
    second.hold()
    second.close()


@pytest.mark.long
def test_torchrun_starts_killed_ranks_again_where_they_were(saved: Path, straight: Path, tmp_path: Path) -> None:
    """The same command in a second life: it finds the folder and goes on at the newest checkpoint."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("--max-restarts", "2", "--no-python"),
            *command("train", str(saved), "--out", str(tmp_path / "run"), "--set", "train.threads=1"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list((tmp_path / "run" / "checkpoints").glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout
    os.kill(int(children.split()[-1]), signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output[-2000:]
    assert_same_run(tmp_path / "run", straight)
