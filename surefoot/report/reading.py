"""Reading a run folder for a report, whatever state the run is in.

A folder may belong to a run that is still training, was killed in the middle of a line or comes from other software
that writes fewer keys: what is missing stays missing, and what cannot be read is named in `RunRecord.notes`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from surefoot.config import RunError
from surefoot.observe.folder import read_lines

Column: TypeAlias = NDArray[np.float64]

_STEP_COLUMNS = (
    "loss",
    "bits_per_byte",
    "learning_rate",
    "gradient_norm",
    "clip_coefficient",
    "clip_fraction",
    "tokens_per_second",
    "mfu",
    "memory_bytes",
    "tokens",
    "flops",
    "step_seconds",
    "data_seconds",
    "seconds",
)
_EVALUATION_COLUMNS = ("loss", "bits_per_byte", "tokens")


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder tells it.

    `steps` and the columns of `metrics` and `update_ratio` (by role) have one entry a recorded step, in step order;
    `evaluations` has the same shape by column, `evaluation_steps` beside it, held-out split only. What was not recorded
    or is not finite is NaN. `samples` are (step, completions), oldest first.
    """

    name: str
    path: Path
    config: dict[str, Any]
    facts: dict[str, Any]
    steps: Column
    metrics: dict[str, Column]
    update_ratio: dict[str, Column]
    evaluation_steps: Column
    evaluations: dict[str, Column]
    whole_evaluations: NDArray[np.bool_]
    samples: list[tuple[int, list[dict[str, str]]]] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    def fact(self, *keys: str) -> Any:
        """The fact under nested `keys`; `None` where there is none."""
        value: Any = self.facts
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def at_steps(self, column: str, steps: Column) -> Column:
        """Values of a cumulative column (tokens, flops, seconds) at `steps`, interpolated; step 0 is 0."""
        known = np.isfinite(self.metrics[column])
        if not known.any():
            return np.full(len(steps), math.nan)
        places: Column = np.interp(steps, [0.0, *self.steps[known]], [0.0, *self.metrics[column][known]])
        return places

    @property
    def num_steps(self) -> int | None:
        """Steps the run was to take; `None` if nothing says so."""
        train = self.config.get("train")
        for value in (self.fact("plan", "steps"), train.get("num_steps") if isinstance(train, dict) else None):
            if math.isfinite(steps := number(value)):
                return int(steps)
        return None


def read_run(path: Path) -> RunRecord:
    """The run in the folder `path`; `RunError` where that holds neither run.json nor metrics.jsonl."""
    try:
        is_run = any((path / name).is_file() for name in ("run.json", "metrics.jsonl"))
    except OSError:
        is_run = False
    if not is_run:
        raise RunError(
            f"{path}: is not a run folder (no run.json, no metrics.jsonl); name a folder that surefoot train made"
        )
    notes: list[str] = []
    config, facts = (_read_object(path / name, notes) for name in ("run.json", "facts.json"))
    lines = _by_step(_read_records(path / "metrics.jsonl", notes))
    evaluations = _by_step(
        line for line in _read_records(path / "evaluations.jsonl", notes) if line.get("split", "heldout") == "heldout"
    )
    ratios = [line.get("update_ratio") for line in lines]
    roles = dict.fromkeys(role for ratio in ratios if isinstance(ratio, dict) for role in ratio)
    return RunRecord(
        name=path.resolve().name or str(path),
        path=path,
        config=config,
        facts=facts,
        steps=_column(line["step"] for line in lines),
        metrics={name: _column(line.get(name) for line in lines) for name in _STEP_COLUMNS},
        update_ratio={
            role: _column(ratio.get(role) if isinstance(ratio, dict) else None for ratio in ratios) for role in roles
        },
        evaluation_steps=_column(line["step"] for line in evaluations),
        evaluations={name: _column(line.get(name) for line in evaluations) for name in _EVALUATION_COLUMNS},
        whole_evaluations=np.array([line.get("is_whole") is not False for line in evaluations], dtype=np.bool_),
        samples=_read_samples(path / "samples", notes),
        notes=tuple(notes),
    )


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """The runs of all folders; equal names are told apart by as many parent folders as that takes."""
    if not paths:
        raise RunError("report: no run folder was named; give at least one")
    runs = [read_run(path) for path in paths]
    parts = [run.path.resolve().parts for run in runs]
    names = [run.name for run in runs]
    depth = 1
    while len(set(names)) < len(names) and depth < max(map(len, parts)):
        depth += 1
        names = [
            "/".join(part[-depth:]) if names.count(name) > 1 else name for part, name in zip(parts, names, strict=True)
        ]
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise RunError(f"{repeated}: the same run folder was named twice; name it once")
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def number(value: object) -> float:
    """The value as a float; NaN for anything that is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        converted = float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.nan
    return converted if math.isfinite(converted) else math.nan


def flatten(value: object, path: str = "") -> dict[str, object]:
    """Every leaf of nested JSON under its dotted path."""
    if isinstance(value, dict) and value:
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and value:
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return {path: value}
    return {
        leaf: content
        for key, item in items
        for leaf, content in flatten(item, f"{path}.{key}" if path else key).items()
    }


def _by_step(lines: Any) -> list[dict[str, Any]]:
    """Lines with a usable step, in step order; the last one written wins where a step was taken twice."""
    found = {number(line.get("step")): line for line in lines}
    return [found[step] for step in sorted(step for step in found if step >= 0)]


def _column(values: Any) -> Column:
    return np.array([number(value) for value in values], dtype=np.float64)


def _read_object(file: Path, notes: list[str]) -> dict[str, Any]:
    value = _read_json(file, notes)
    if value is not None and not isinstance(value, dict):
        notes.append(f"{file.name} does not hold a JSON object and was left out")
    return value if isinstance(value, dict) else {}


def _read_json(file: Path, notes: list[str]) -> object:
    try:
        return json.loads(file.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{file.name} could not be read ({error}) and was left out")
        return None


def _read_records(file: Path, notes: list[str]) -> list[dict[str, Any]]:
    try:
        return read_lines(file)
    except FileNotFoundError:
        return []
    except (OSError, RecursionError) as error:
        notes.append(f"{file.name} could not be read ({error}) and was left out")
        return []


def _read_samples(folder: Path, notes: list[str]) -> list[tuple[int, list[dict[str, str]]]]:
    samples = []
    for file in sorted(folder.glob("step-*.json")):
        digits = file.stem.removeprefix("step-")
        content = _read_json(file, notes)
        if not (digits.isascii() and digits.isdigit()) or not isinstance(content, list):
            continue
        completions = [
            {"prompt": _text(item.get("prompt")), "text": _text(item.get("text"))}
            for item in content
            if isinstance(item, dict)
        ]
        samples.append((int(digits), completions))
    return sorted(samples, key=lambda sample: sample[0])


def _text(value: object) -> str:
    return "" if value is None else str(value)
