"""`surefoot train`."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from surefoot.config import ConfigError, RunError, load_json, override, to_json
from surefoot.infer.engine import generate
from surefoot.infer.sampling import SamplingConfig
from surefoot.observe.console import ConsoleHook
from surefoot.observe.folder import RunFolder, write_text
from surefoot.recipes.find import find_recipe
from surefoot.report.page import write_report
from surefoot.train.run import Run
from surefoot.train.state import compare_configurations
from surefoot.train.trainer import Trainer


def run(
    recipe: str | None, sets: list[str], out: Path | None, resume: Path | None, accept: list[str], allow: list[str]
) -> int:
    """Train; the exit code is 0 at the end of the run and 128 + signal when it was stopped."""
    console = ConsoleHook()
    if resume is not None:
        folder, chosen, changes = _reopen(recipe, sets, out, resume, accept, allow)
    else:
        folder, chosen = _start(recipe, sets, out, accept, allow)
        changes = []
    console.on_message(f"{chosen.name} -> {folder.path}")
    for line in changes:
        console.on_message(line)
    trainer = Trainer(chosen, folder, [console], complete)
    finished = trainer.fit()
    page = write_report([folder.path], folder.path / "report.html")
    console.on_message(f"report: {page.resolve()}")
    return 0 if finished else 128 + (trainer.stop_signal or signal.SIGINT)


def complete(model: Any, prompt: Sequence[int], num_tokens: int, dtype: torch.dtype) -> list[int]:
    """Continue a prompt for the run's record: drawn at temperature 0.8 from the likeliest 50, always with seed 0."""
    choose = SamplingConfig(temperature=0.8, top_k=50).build()
    return list(generate(model, prompt, num_tokens, choose, dtype=dtype, end=prompt[0]))


def _start(
    recipe: str | None, sets: list[str], out: Path | None, accept: list[str], allow: list[str]
) -> tuple[RunFolder, Run]:
    if recipe is None:
        raise ConfigError(
            "RECIPE", None, "is missing; name a recipe (surefoot recipes lists them) or give --resume RUN"
        )
    if accept:
        raise ConfigError("--accept", accept[0], "goes with --resume only")
    chosen = override(find_recipe(recipe, allow), sets)
    path = out or next(path for path in _numbered(chosen.name) if not path.exists())
    return RunFolder.create(path, chosen), chosen


def _reopen(
    recipe: str | None, sets: list[str], out: Path | None, resume: Path, accept: list[str], allow: list[str]
) -> tuple[RunFolder, Run, list[str]]:
    if out is not None:
        raise ConfigError("--out", str(out), "does not go with --resume: a run continues in its own folder")
    folder = RunFolder.open(resume)
    saved = load_json(resume / "run.json", Run, allow=allow)
    wanted = override(saved if recipe is None else find_recipe(recipe, allow), sets)
    changes = compare_configurations(saved, wanted, tuple(accept))
    if changes:
        write_text(resume / "run.json", to_json(wanted))
        folder.write_json("changes.json", {"changes": [*folder.read_json("changes.json").get("changes", []), *changes]})
    if not torch.cuda.is_available() and wanted.train.device.startswith("cuda"):
        raise RunError(f"{resume}: began on {wanted.train.device}, which is not here; add --set train.device=auto")
    return folder, wanted, changes


def _numbered(name: str) -> Iterator[Path]:
    return (Path("runs") / f"{name}-{number}" for number in itertools.count(1))
