"""Ranks killed and stopped at chosen moments, under torchrun and under our launcher: the run ends with the bits of an
undisturbed one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.config import override, to_json
from surefoot.dist.launch import BOARD
from surefoot.train.run import Run

Tiny = Callable[..., Run]
NUM_STEPS = 30


@pytest.fixture(scope="module")
def recipe(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = override(
        tiny(),
        [
            f"train.num_steps={NUM_STEPS}",
            "train.threads=1",
            "train.timeout=20",
            "data.sequence_length=32",
            "observe.evaluate_every=3",
            "observe.fingerprint_every=5",
            "checkpoint.every=2",
            "plan.shard=2",
        ],
    )
    file = tmp_path_factory.mktemp("recipe") / "saved.json"
    file.write_text(to_json(run))
    return file


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from surefoot.cli.main import main; main()", *arguments]


@pytest.fixture(scope="module")
def straight(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("straight") / "run"
    subprocess.run(command("train", str(recipe), "--ranks", "2", "--out", str(path)), capture_output=True, check=True)
    return ends_with(path)


def ends_with(path: Path) -> dict[str, Any]:
    """What must not depend on faults."""
    result = json.loads((path / "facts.json").read_text())["result"]
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "loss", "gradient_norm", "token_hash", "samples")
    return {name: result[name] for name in ("weights_sha256", "token_hash", "heldout_bits_per_byte")} | {
        "lines": [[line[name] for name in kept] for line in lines]
    }


class Torchrun:
    """`surefoot train` under torchrun, with a view of its ranks."""

    def __init__(self, recipe: Path, folder: Path, *arguments: str, max_restarts: int) -> None:
        self.board, self.out = folder / "board", folder / "run"
        self.board.mkdir()
        self.log = (folder / "log").open("w+")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
        self.process = subprocess.Popen(
            [
                *(sys.executable, *launcher, "--max-restarts", str(max_restarts), "--monitor-interval", "0.05"),
                *command("train", str(recipe), "--out", str(self.out), *arguments),
            ],
            env=os.environ | {BOARD: str(self.board)},
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def ranks(self) -> list[int]:
        """Processes of the ranks, in order."""
        found = subprocess.run(
            ["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=False
        ).stdout
        return sorted(int(number) for number in found.split())

    def new_ranks(self, old: list[int]) -> list[int]:
        """The processes of the next life."""
        found: list[int] = []

        def are_there() -> bool:
            found[:] = self.ranks()  # read once: the old ones die while we look
            return len(found) == 2 and not set(found) & set(old)

        self.until(are_there)
        return found

    def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 90
        while not is_so():
            assert self.process.poll() is None, self.text()[-3000:]
            assert time.monotonic() < deadline, self.text()[-3000:]
            time.sleep(0.0005)

    def reaches(self, rank: int, phase: str, step: int) -> None:
        """Wait until a rank is in a phase of that step or a later one."""
        file = self.board / f"rank-{rank}"
        for other in self.board.iterdir():
            other.unlink()  # of an earlier life

        def is_there() -> bool:
            text = file.read_bytes().rstrip(b"\0").decode() if file.is_file() else ""
            return f"({phase})" in text and int(text.split()[1]) >= step

        self.until(is_there)

    def text(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()

    def finish(self) -> str:
        assert self.process.wait(120) == 0, self.text()[-3000:]
        return self.text()


@pytest.mark.long
def test_ten_kills_at_random_moments(recipe: Path, straight: dict[str, Any], tmp_path: Path) -> None:
    """Two in each of start-up, steps, saves, evaluations, and two at any time; one run lives through all of them."""
    choose = random.Random(7)
    phases = ["start", "data", "forward-backward", "optimizer", "save", "save", "evaluate", "evaluate", "start", "any"]
    choose.shuffle(phases)
    torchrun = Torchrun(recipe, tmp_path, max_restarts=len(phases) + 1)
    ranks: list[int] = []
    try:
        for number, phase in enumerate(phases):
            ranks = torchrun.new_ranks(ranks)
            victim = choose.randrange(2)
            if phase == "start":
                time.sleep(choose.uniform(0, 2))
            elif phase == "any":
                torchrun.reaches(victim, "data", 1)
                time.sleep(choose.uniform(0, 0.3))
            else:
                torchrun.reaches(victim, phase, 2 * number + 1)
            os.kill(ranks[victim], signal.SIGKILL)
        text = torchrun.finish()
    finally:
        torchrun.end()
    assert text.count("resuming from") + text.count("starting again") >= 7  # all but the kills in start-up
    assert ends_with(torchrun.out) == straight


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named_and_the_run_goes_on(
    recipe: Path, straight: dict[str, Any], tmp_path: Path, victim: int
) -> None:
    torchrun = Torchrun(recipe, tmp_path, "--set", "train.timeout=4", max_restarts=1)
    try:
        ranks = torchrun.new_ranks([])
        torchrun.reaches(victim, "forward-backward", 7)
        os.kill(ranks[victim], signal.SIGSTOP)
        text = torchrun.finish()
    finally:
        torchrun.end()
    assert f"rank {victim} is stopped (SIGSTOP), so it cannot show its stack, last seen in step" in text
    assert f"rank {1 - victim} waits in" in text
    assert "resuming from" in text
    assert ends_with(torchrun.out) == straight


@pytest.mark.long
def test_our_launcher_names_a_stopped_rank(recipe: Path, straight: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen(
        command("train", str(recipe), "--ranks", "2", "--out", str(out), "--set", "train.timeout=4"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list((out / "checkpoints").glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.005)
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout
    os.kill(int(found.split()[1]), signal.SIGSTOP)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "rank 1 is stopped (SIGSTOP)" in stderr
    assert "continue with: surefoot train --resume" in stderr
    assert "last collective: all_" in (out / "logs" / "rank-0.fault").read_text()
    done = subprocess.run(
        command("train", "--resume", str(out), "--ranks", "2"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert ends_with(out) == straight
