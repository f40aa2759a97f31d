"""`surefoot train`."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from surefoot.config import ConfigError, RunError, load_json, override, to_json
from surefoot.dist.heartbeat import Heartbeat
from surefoot.dist.launch import environment_rank, run_ranks, start_heartbeat
from surefoot.dist.startup import choose_device, join
from surefoot.dist.watch import MARGIN, Watch
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


@dataclass(frozen=True)
class Choice:
    """A run, its folder, whether that is new, and what changed since the run in it began."""

    run: Run
    path: Path
    is_new: bool
    changes: tuple[str, ...] = ()


def run(
    recipe: str | None,
    sets: list[str],
    out: Path | None,
    resume: Path | None,
    accept: list[str],
    allow: list[str],
    ranks: int | None,
    goes_on: bool,
) -> int:
    """Train; the exit code is 0 at the end of the run and 128 + signal when it was stopped."""
    rank, world = environment_rank()
    if ranks is not None and "WORLD_SIZE" in os.environ:
        raise ConfigError(
            "--ranks", ranks, "is for a process of its own, and this one was started as one of a group; drop it"
        )
    if goes_on and out is None:
        raise ConfigError(
            "--continue", True, "needs --out RUN, the folder to start or continue; --resume RUN continues only"
        )
    # torchrun starts the same command again after a failure
    goes_on = goes_on or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    choice = choose(recipe, sets, out, resume, accept, allow, ranks or world, goes_on=goes_on)
    chosen = choice.run
    check(chosen.plan, chosen.model, chosen.data.sequence_length, chosen.precision)
    if not choice.is_new and not torch.cuda.is_available() and chosen.train.device.startswith("cuda"):
        raise RunError(f"{choice.path}: began on {chosen.train.device}, which is not here; add --set train.device=auto")
    if ranks is not None and ranks > 1:
        return _launch(choice, ranks)
    if world > 1 and out is None and resume is None:
        raise ConfigError("--out", None, "is needed here, so that all ranks and all restarts find one folder; name it")
    with contextlib.closing(RunFolder(choice.path)) as folder:
        return _train(choice, folder, rank, world)


def _train(choice: Choice, folder: RunFolder, rank: int, world: int) -> int:
    console = ConsoleHook()
    if rank == 0:
        _take(choice, folder)
        console.on_message(f"{choice.run.name} -> {folder.path}")
        for line in choice.changes:
            console.on_message(line)
    heartbeat = start_heartbeat(rank)
    trainer = Trainer(choice.run, folder, [console], complete, rank, heartbeat)
    finished = _fit_together(trainer, heartbeat) if world > 1 else trainer.fit()
    if rank == 0:
        page = write_report([folder.path], folder.path / "report.html")
        console.on_message(f"report: {page.resolve()}")
    return 0 if finished else 128 + (trainer.stop_signal or signal.SIGINT)


def _fit_together(trainer: Trainer, heartbeat: Heartbeat) -> bool:
    """As one of several ranks; where others are lost, the process ends here."""
    timeout = trainer.run.train.timeout
    try:
        device = choose_device(trainer.run.train.device)
    except ValueError as error:
        raise ConfigError("train.device", trainer.run.train.device, str(error)) from None
    # The watch comes first, while everybody still waits where they wait.
    join(device, timedelta(seconds=timeout + MARGIN))
    report = trainer.folder.path / "logs" / f"rank-{trainer.rank}.fault"
    try:
        with Watch(heartbeat, timeout, report):
            return trainer.fit()
    finally:
        dist.destroy_process_group()


def complete(model: Any, prompt: Sequence[int], num_tokens: int, dtype: torch.dtype) -> list[int]:
    """Continue a prompt for the run's record: drawn at temperature 0.8 from the likeliest 50, always with seed 0."""
    choose = SamplingConfig(temperature=0.8, top_k=50).build()
    return list(generate(model, prompt, num_tokens, choose, dtype=dtype, end=prompt[0]))


def choose(
    recipe: str | None,
    sets: list[str],
    out: Path | None,
    resume: Path | None,
    accept: list[str],
    allow: list[str],
    num_ranks: int,
    *,
    goes_on: bool,
) -> Choice:
    """The run over that many ranks and its folder; nothing is written. `goes_on` continues a run that lies in `out`."""
    if accept and resume is None:
        raise ConfigError("--accept", accept[0], "goes with --resume only")
    if resume is not None and out is not None:
        raise ConfigError("--out", str(out), "does not go with --resume: a run continues in its own folder")
    if goes_on and out is not None and (out / "run.json").is_file():
        resume = out
    if resume is None:
        if recipe is None:
            raise ConfigError(
                "RECIPE", None, "is missing; name a recipe (surefoot recipes lists them) or give --resume RUN"
            )
        chosen = stretch(override(find_recipe(recipe, allow), sets), num_ranks)
        return Choice(chosen, out or next(path for path in numbered(chosen.name) if not path.exists()), is_new=True)
    RunFolder.open(resume)
    saved = load_json(resume / "run.json", Run, allow=allow)
    wanted = stretch(override(saved if recipe is None else find_recipe(recipe, allow), sets), num_ranks)
    return Choice(wanted, resume, is_new=False, changes=tuple(compare_configurations(saved, wanted, tuple(accept))))


def stretch(chosen: Run, num_ranks: int) -> Run:
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


def numbered(name: str) -> Iterator[Path]:
    """The folders that a run of this name gets by default, in order."""
    return (Path("runs") / f"{name}-{number}" for number in itertools.count(1))


def _take(choice: Choice, folder: RunFolder) -> None:
    """Make what lies there the run's folder, or keep what changed; nobody else writes there from now on."""
    if choice.is_new:
        RunFolder.create(choice.path, choice.run)
    else:
        RunFolder.open(choice.path)
    folder.hold()
    if choice.changes:
        write_text(choice.path / "run.json", to_json(choice.run))
        before = folder.read_json("changes.json").get("changes", [])
        folder.write_json("changes.json", {"changes": [*before, *choice.changes]})


def _launch(choice: Choice, ranks: int) -> int:
    """The same command as that many ranks; what they say beside rank 0 goes to logs/ in the run folder."""
    arguments = sys.argv[1:]
    for number, argument in enumerate(arguments):
        if argument == "--ranks":
            del arguments[number : number + 2]
            break
        if argument.startswith("--ranks="):
            del arguments[number]
            break
    path = choice.path
    if choice.is_new and "--out" not in arguments and not any(text.startswith("--out=") for text in arguments):
        arguments += ["--out", str(path)]
    if choice.is_new and path.exists():
        raise RunError(f"{path}: already exists; continue it with --resume {path} or give --out another name")
    command = [sys.executable, "-m", "surefoot", *arguments]

    def say(text: str) -> None:
        print(f"surefoot: {text}", file=sys.stderr)

    code = run_ranks(command, ranks, path / "logs", say)
    # After a stop or a refusal rank 0 has said how to go on.
    if code not in {0, 2, 128 + signal.SIGINT, 128 + signal.SIGTERM} and (path / "run.json").is_file():
        say(f"continue with: surefoot train --resume {path} --ranks {ranks}")
    return code
