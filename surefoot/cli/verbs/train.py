"""`surefoot train`."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from surefoot.config import ConfigError, RunError, load_json, override, to_json
from surefoot.dist.launch import environment_rank, run_ranks
from surefoot.dist.startup import choose_device, join
from surefoot.infer.engine import generate
from surefoot.infer.sampling import SamplingConfig
from surefoot.observe.console import ConsoleHook
from surefoot.observe.folder import RunFolder, write_text
from surefoot.parallel.apply import check
from surefoot.recipes.find import find_recipe
from surefoot.report.page import write_report
from surefoot.train.run import Run
from surefoot.train.state import compare_configurations
from surefoot.train.trainer import Trainer

TIMEOUT = timedelta(minutes=10)
"""After which a rank that waits for another gives up."""


def run(
    recipe: str | None,
    sets: list[str],
    out: Path | None,
    resume: Path | None,
    accept: list[str],
    allow: list[str],
    ranks: int | None,
) -> int:
    """Train; the exit code is 0 at the end of the run and 128 + signal when it was stopped."""
    rank, world = environment_rank()
    if ranks is not None and "WORLD_SIZE" in os.environ:
        raise ConfigError(
            "--ranks", ranks, "is for a process of its own, and this one was started as one of a group; drop it"
        )
    chosen, path, changes = _choose(recipe, sets, out, resume, accept, allow, ranks or world)
    check(chosen.plan, chosen.model, chosen.data.sequence_length)
    if ranks is not None and ranks > 1:
        return _launch(path, resume is not None, ranks)
    if world > 1 and out is None and resume is None:
        raise ConfigError("--out", None, "is needed here, so that all ranks and all restarts find one folder; name it")
    console = ConsoleHook()
    folder = RunFolder(path)
    if rank == 0:
        folder = _take(path, chosen, changes, is_new=resume is None)
        console.on_message(f"{chosen.name} -> {folder.path}")
        for line in changes:
            console.on_message(line)
    if world > 1:
        join(choose_device(chosen.train.device), TIMEOUT)
    trainer = Trainer(chosen, folder, [console], complete, rank)
    try:
        finished = trainer.fit()
    finally:
        if world > 1:
            dist.destroy_process_group()
    if rank == 0:
        page = write_report([folder.path], folder.path / "report.html")
        console.on_message(f"report: {page.resolve()}")
    return 0 if finished else 128 + (trainer.stop_signal or signal.SIGINT)


def complete(model: Any, prompt: Sequence[int], num_tokens: int, dtype: torch.dtype) -> list[int]:
    """Continue a prompt for the run's record: drawn at temperature 0.8 from the likeliest 50, always with seed 0."""
    choose = SamplingConfig(temperature=0.8, top_k=50).build()
    return list(generate(model, prompt, num_tokens, choose, dtype=dtype, end=prompt[0]))


def _choose(
    recipe: str | None,
    sets: list[str],
    out: Path | None,
    resume: Path | None,
    accept: list[str],
    allow: list[str],
    num_ranks: int,
) -> tuple[Run, Path, list[str]]:
    """The run, its folder and what changed since it began; nothing is written."""
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if resume is None and restarted and out is not None and (out / "run.json").is_file():
        resume, out = out, None  # torchrun starts the same command again after a failure
    if resume is None:
        if recipe is None:
            raise ConfigError(
                "RECIPE", None, "is missing; name a recipe (surefoot recipes lists them) or give --resume RUN"
            )
        if accept:
            raise ConfigError("--accept", accept[0], "goes with --resume only")
        chosen = over_ranks(override(find_recipe(recipe, allow), sets), num_ranks)
        return chosen, out or next(path for path in _numbered(chosen.name) if not path.exists()), []
    if out is not None:
        raise ConfigError("--out", str(out), "does not go with --resume: a run continues in its own folder")
    RunFolder.open(resume)
    saved = load_json(resume / "run.json", Run, allow=allow)
    wanted = over_ranks(override(saved if recipe is None else find_recipe(recipe, allow), sets), num_ranks)
    changes = compare_configurations(saved, wanted, tuple(accept))
    if not torch.cuda.is_available() and wanted.train.device.startswith("cuda"):
        raise RunError(f"{resume}: began on {wanted.train.device}, which is not here; add --set train.device=auto")
    return wanted, resume, changes


def over_ranks(chosen: Run, num_ranks: int) -> Run:
    """The run over that many ranks: what its plan leaves over shards weights, gradients and optimizer state further."""
    needed = chosen.plan.num_ranks
    if needed == num_ranks:
        return chosen
    if num_ranks == 1:
        raise ConfigError(
            "plan", chosen.plan.describe(), f"needs {needed} ranks; add --ranks {needed}, or change the plan"
        )
    if num_ranks % needed:
        raise ConfigError(
            "plan", chosen.plan.describe(), f"needs {needed} ranks, which does not divide the {num_ranks} there are"
        )
    return override(chosen, [f"plan.shard={chosen.plan.shard * (num_ranks // needed)}"])


def _take(path: Path, chosen: Run, changes: list[str], *, is_new: bool) -> RunFolder:
    """Make the folder, or open it and keep what changed."""
    if is_new and not (path / "run.json").exists():
        return RunFolder.create(path, chosen)
    if is_new and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return RunFolder.create(path, chosen)  # says that it exists
    folder = RunFolder.open(path)
    if changes:
        write_text(path / "run.json", to_json(chosen))
        folder.write_json("changes.json", {"changes": [*folder.read_json("changes.json").get("changes", []), *changes]})
    return folder


def _launch(path: Path, is_resumed: bool, ranks: int) -> int:
    """The same command as that many ranks; what they say beside rank 0 goes to logs/ in the run folder."""
    arguments = sys.argv[1:]
    for number, argument in enumerate(arguments):
        if argument == "--ranks":
            del arguments[number : number + 2]
            break
        if argument.startswith("--ranks="):
            del arguments[number]
            break
    if not is_resumed and "--out" not in arguments and not any(text.startswith("--out=") for text in arguments):
        arguments += ["--out", str(path)]
    if not is_resumed and path.exists():
        raise RunError(f"{path}: already exists; continue it with --resume {path} or give --out another name")
    command = [sys.executable, "-c", "from surefoot.cli.main import main; main()", *arguments]
    return run_ranks(command, ranks, path / "logs", lambda text: print(f"surefoot: {text}", file=sys.stderr))


def _numbered(name: str) -> Iterator[Path]:
    return (Path("runs") / f"{name}-{number}" for number in itertools.count(1))
