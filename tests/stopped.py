"""Runs of a trainer in a test: to the end, or stopped after some step and started again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefoot.config import RunError
from surefoot.observe.folder import RunFolder
from surefoot.train.run import Run
from surefoot.train.trainer import Trainer


def train(run: Run, folder: Path) -> list[str]:
    """Start or continue a run; what it said."""
    said: list[str] = []
    trainer = Trainer(run, RunFolder.create(folder, run) if not folder.exists() else RunFolder.open(folder))
    trainer.folder.on_message = said.append  # type: ignore[method-assign]
    trainer.fit()
    return said


def train_stopped(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, *, step: int) -> str:
    """Stop a new run right after a step, continue it; the hash of its last weights."""
    real = Trainer._after_step

    def stop(self: Trainer) -> None:
        real(self)
        if self.progress.step == step:
            raise RunError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_after_step", stop)
        with pytest.raises(RunError):
            train(run, folder)
    train(run, folder)
    return last_weights(folder)


def last_weights(folder: Path) -> str:
    """The hash of a finished run's weights."""
    found: str = json.loads((folder / "facts.json").read_text())["result"]["weights_sha256"]
    return found
