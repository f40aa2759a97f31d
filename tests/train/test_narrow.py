"""Training with narrow products: records, resumption with delayed scales, and the dry run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.config import RunError
from surefoot.observe.folder import RunFolder
from surefoot.study.dry import dry_run
from surefoot.train.run import Run
from surefoot.train.trainer import Trainer

Tiny = Callable[..., Run]
NARROW = ("precision.products=delayed", "precision.keep_first=0", "precision.keep_last=0", "precision.history=3")


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def train(run: Run, folder: Path) -> list[str]:
    said: list[str] = []
    trainer = Trainer(run, RunFolder.create(folder, run) if not folder.exists() else RunFolder.open(folder))
    trainer.folder.on_message = said.append  # type: ignore[method-assign]
    trainer.fit()
    return said


def test_each_product_is_recorded(tiny: Tiny, tmp_path: Path) -> None:
    said = train(tiny(*NARROW, "observe.products_every=4"), tmp_path / "run")
    assert "narrow products (emulated): 14 matrices" in said
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert metrics[0]["products"] == {"saturated": 0, "underflowed": 0, "scale_age": 0}
    assert all(1 <= line["products"]["scale_age"] <= 3 for line in metrics[1:])
    records = lines(tmp_path / "run" / "records" / "products.jsonl")
    assert [record["step"] for record in records] == [1, 4, 8]
    last = records[-1]["products"]
    assert {"layers.0.mixer.wq/input", "layers.1.ffn.w_down/gradient"} <= last.keys()
    assert all(row["narrowed"] == 1 and row["amax"] > 0 for row in last.values())


def test_a_run_without_narrow_products_records_none(tiny: Tiny, tmp_path: Path) -> None:
    train(tiny("train.num_steps=2"), tmp_path / "run")
    assert not (tmp_path / "run" / "records").exists()
    assert lines(tmp_path / "run" / "metrics.jsonl")[0]["products"] == {}


def test_delayed_scales_resume_bitwise(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny(*NARROW)
    train(run, tmp_path / "whole")
    real = Trainer._after_step

    def stop(self: Trainer) -> None:
        real(self)
        if self.progress.step == 5:
            raise RunError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_after_step", stop)
        with pytest.raises(RunError):
            train(run, tmp_path / "parts")
    train(run, tmp_path / "parts")
    whole, parts = (json.loads((tmp_path / name / "facts.json").read_text())["result"] for name in ("whole", "parts"))
    assert parts["weights_sha256"] == whole["weights_sha256"]


def test_a_dry_run_runs_them(tiny: Tiny) -> None:
    run = tiny(
        *NARROW[1:3], "precision.products=mxfp8", "plan.tensor=2", "model.mixer.num_kv_heads=2", "model.ffn.hidden=64"
    )
    wide = run.model.mixer.model_copy(update={"head_size": 32})
    run = run.model_copy(update={"model": run.model.model_copy(update={"mixer": wide})})
    assert dry_run(run, 0).peak_bytes > 0
