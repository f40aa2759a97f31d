"""Training with narrow products: records, resumption with delayed scales, and the dry run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.study.dry import dry_run
from surefoot.train.run import Run
from tests.stopped import last_weights, train, train_stopped

Tiny = Callable[..., Run]
NARROW = ("precision.products=delayed", "precision.keep_first=0", "precision.keep_last=0", "precision.history=3")


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


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
    assert train_stopped(run, tmp_path / "parts", monkeypatch, step=5) == last_weights(tmp_path / "whole")


def test_a_dry_run_runs_them(tiny: Tiny) -> None:
    run = tiny(
        *NARROW[1:3], "precision.products=mxfp8", "plan.tensor=2", "model.mixer.num_kv_heads=2", "model.ffn.hidden=64"
    )
    wide = run.model.mixer.model_copy(update={"head_size": 32})
    run = run.model_copy(update={"model": run.model.model_copy(update={"mixer": wide})})
    assert dry_run(run, 0).peak_bytes > 0
