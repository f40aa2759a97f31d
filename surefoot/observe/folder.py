"""The run folder: everything a run leaves behind, readable without the process that wrote it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
from pathlib import Path
from typing import IO, Any

from surefoot.config import Config, RunError, to_json
from surefoot.observe.schema import EvaluationReport, Hook, ProductReport, SampleReport, StepReport

_PRODUCTS = "records/products.jsonl"


class RunFolder(Hook):
    """Creates, opens and writes a run folder; as a hook it records every step.

    run.json (re-runnable configuration), facts.json, metrics.jsonl, evaluations.jsonl, records/, samples/, checkpoints/,
    data.json, report.html.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, IO[str]] = {}
        self._lock: int | None = None

    @classmethod
    def create(cls, path: Path, run: Config) -> RunFolder:
        """A new folder holding `run.json`; `RunError` where something already lies there or cannot be written."""
        try:
            # A launcher may have put the logs of its ranks there already, and a kill may have come before run.json.
            path.mkdir(parents=True, exist_ok=path.is_dir() and all(_is_prelude(entry) for entry in path.iterdir()))
            write_text(path / "run.json", to_json(run))
        except FileExistsError:
            raise RunError(
                f"{path}: already exists; continue it with --resume {path} or give --out another name"
            ) from None
        except OSError as error:
            raise RunError(
                f"{path}: cannot be created ({error.strerror}); give --out a place you can write to"
            ) from None
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run's folder; `RunError` where it is none or cannot be written."""
        if not (path / "run.json").is_file():
            raise RunError(f"{path}: is not a run folder (no run.json); name a folder that surefoot train made")
        if not os.access(path, os.W_OK):
            raise RunError(f"{path}: is read-only; make it writable or copy it first")
        return cls(path)

    def hold(self) -> None:
        """Be its only writer until `close` or the end of the process; `RunError` where another process is."""
        lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise RunError(
                f"{self.path}: is being written by another process; stop that, or wait for its end"
            ) from None
        except OSError:  # a file system without locks
            os.close(lock)
            return
        self._lock = lock

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.path / "checkpoints"

    def write_json(self, name: str, value: object) -> None:
        """Write one JSON file of the folder atomically."""
        write_text(self.path / name, json.dumps(clean(value), indent=2, ensure_ascii=False) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """Read one JSON file of the folder; an absent one is empty."""
        file = self.path / name
        if not file.exists():
            return {}
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(f"{file}: cannot be read ({error}); restore it or delete it") from None
        return value if isinstance(value, dict) else {}

    def rewind(self, step: int) -> None:
        """Forget records after `step`: they will be made again. A line torn by a kill goes with them."""
        for name in ("metrics.jsonl", "evaluations.jsonl", _PRODUCTS):
            file = self.path / name
            if file.exists():
                kept = [line for line in read_lines(file) if line.get("step", math.inf) <= step]
                write_text(file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))
        for sample in (self.path / "samples").glob("step-*.json"):
            if sample.stem.removeprefix("step-").isdigit() and int(sample.stem.removeprefix("step-")) > step:
                sample.unlink()

    def on_step(self, report: StepReport) -> None:
        """Append a line to metrics.jsonl."""
        self._append("metrics.jsonl", dataclasses.asdict(report))

    def on_products(self, report: ProductReport) -> None:
        """Append a line to records/products.jsonl."""
        (self.path / _PRODUCTS).parent.mkdir(exist_ok=True)
        self._append(_PRODUCTS, dataclasses.asdict(report))

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Append a line to evaluations.jsonl."""
        self._append("evaluations.jsonl", dataclasses.asdict(report))

    def on_samples(self, report: SampleReport) -> None:
        """Write the completions of one step."""
        (self.path / "samples").mkdir(exist_ok=True)
        write_text(
            self.path / "samples" / f"step-{report.step:08d}.json",
            json.dumps(report.completions, indent=2, ensure_ascii=False) + "\n",
        )

    def close(self) -> None:
        """Close the files, and let others write."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _append(self, name: str, record: dict[str, Any]) -> None:
        file = self.path / name
        if name not in self._files:
            self._files[name] = file.open("a", encoding="utf-8")
        try:
            self._files[name].write(json.dumps(clean(record), ensure_ascii=False) + "\n")
            self._files[name].flush()
        except OSError as error:  # a full disk: the error of a write names no file
            raise OSError(error.errno, error.strerror, str(file)) from None


def _is_prelude(entry: Path) -> bool:
    return entry.name == "logs" or entry.name.startswith(".run.json.")


def clean(value: Any) -> Any:
    """The value with what JSON cannot hold (NaN, infinities) as null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    return value


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The whole JSON objects of a JSON-lines file; a torn last line is left out."""
    lines = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                lines.append(value)
    return lines


def write_text(file: Path, text: str) -> None:
    """Write a file so that a reader finds the old text or the new, never a part."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
