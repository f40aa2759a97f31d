"""Reading run folders in every state."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from synthetic import make_run, write_lines

from surefoot.config import RunError
from surefoot.report.reading import flatten, read_run, read_runs
from surefoot.report.summary import MISSING, duration, percent, power, short, size, summarise


def test_summary_of_a_finished_run(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", num_steps=200))
    summary = summarise(run)
    assert summary.is_finished
    assert summary.heldout_is_whole
    assert summary.heldout_bits_per_byte == run.evaluations["bits_per_byte"][-1]
    assert (summary.step, summary.tokens, summary.parameters) == (200, 200 * 2048, 6_300_000)
    assert summary.memory_bytes == 952_000_000
    assert summary.train_loss == pytest.approx(run.metrics["loss"][-11:].mean())
    waited = run.metrics["data_seconds"].sum() / run.metrics["step_seconds"].sum()
    assert summary.waiting_share == pytest.approx(waited)


def test_steps_out_of_order_and_taken_twice(tmp_path: Path) -> None:
    lines = [{"step": 3, "loss": 3.0}, {"step": 1, "loss": 9.0}, {"step": 2, "loss": 2.0}, {"step": 1, "loss": 1.0}]
    write_lines(tmp_path / "metrics.jsonl", [*lines, {"loss": 5.0}, {"step": "4"}, {"step": True}])
    run = read_run(tmp_path)
    assert run.steps.tolist() == [1, 2, 3]
    assert run.metrics["loss"].tolist() == [1, 2, 3]
    assert np.isnan(run.metrics["mfu"]).all()


def test_evaluations_find_their_place_on_every_axis(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": step, "tokens": 10 * step} for step in (1, 2, 4)])
    write_lines(tmp_path / "evaluations.jsonl", [{"step": step, "split": "heldout", "loss": 1.0} for step in (0, 2, 3)])
    run = read_run(tmp_path)
    assert run.at_steps("tokens", run.evaluation_steps).tolist() == [0, 20, 30]
    assert np.isnan(run.at_steps("flops", run.evaluation_steps)).all()


def test_other_splits_are_not_held_out(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1}])
    lines = [{"step": 1, "split": split, "loss": loss} for split, loss in (("heldout", 2.0), ("train", 1.0))]
    write_lines(tmp_path / "evaluations.jsonl", lines)
    assert read_run(tmp_path).evaluations["loss"].tolist() == [2.0]


def test_odd_samples(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=20)
    for name, value in (
        ("step-x", []),
        ("step-00000030", {"a": 1}),
        ("step-00000031", [3, {"text": None}, {"prompt": 5}]),
    ):
        (run / "samples" / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    (run / "samples" / "step-00000032.json").write_text("[", encoding="utf-8")
    read = read_run(run)
    assert read.samples[-1] == (31, [{"prompt": "", "text": ""}, {"prompt": "5", "text": ""}])
    assert len(read.notes) == 1
    assert "step-00000032.json" in read.notes[0]


def test_names_are_told_apart(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / parent / "run", num_steps=5) for parent in ("a", "b")]
    other = make_run(tmp_path / "c" / "other", num_steps=5)
    assert [run.name for run in read_runs([*folders, other])] == ["a/run", "b/run", "other"]
    with pytest.raises(RunError, match="named twice"):
        read_runs([folders[0], folders[0]])


def test_flatten() -> None:
    assert flatten({"a": {"b": [1, {"c": None}]}, "d": {}, "e": []}) == {"a.b.0": 1, "a.b.1.c": None, "d": {}, "e": []}


def test_numbers_as_people_write_them() -> None:
    assert [short(value) for value in (950, 999_600, 12_345_678, 7e9, math.nan)] == [
        "950",
        "1 M",
        "12.3 M",
        "7 B",
        MISSING,
    ]
    assert [duration(value) for value in (3.14, 59.7, 252, 7_260, 90_000)] == [
        "3.1 s",
        "1 min",
        "4 min 12 s",
        "2 h 1 min",
        "1 d 1 h",
    ]
    assert (power(1.917e14), power(2e-3)) == ("1.92 × 10¹⁴", "2.00 × 10⁻³")
    assert (percent(0.4091), percent(0.00899)) == ("40.9%", "0.90%")
    assert (size(3 * 2**30), size(5 * 2**20)) == ("3.00 GiB", "5 MiB")
