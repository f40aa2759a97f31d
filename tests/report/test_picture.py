"""The static picture: well-formed, inside its frame, and refused where there is nothing to draw."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from synthetic import make_run, metrics, write_lines

from surefoot.config import RunError
from surefoot.report.picture import HEIGHT, LEFT, WIDTH, write_picture

SVG = "{http://www.w3.org/2000/svg}"


def test_picture(tmp_path: Path) -> None:
    picture = write_picture(make_run(tmp_path / "run & <b>", num_steps=1_000), tmp_path / "run.svg")
    root = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    paths = [path.get("d") or "" for path in root.iter(f"{SVG}path")]
    assert len(paths) == 2
    for path in paths:
        points = [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path)]
        assert 300 < len(points) <= 600
        assert points[0][0] == pytest.approx(LEFT, abs=1)
        assert all(LEFT <= x <= WIDTH for x, _ in points)
        assert all(0 < y < HEIGHT for _, y in points[len(points) // 10 :])
    assert len(list(root.iter(f"{SVG}circle"))) == 10 + 1  # ten evaluations and the key
    assert root.findtext(f"{SVG}title") == "Bits per byte of run & <b>"
    assert "held-out text at" in (root.findtext(f"{SVG}desc") or "")
    assert "http" not in picture.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")


def test_one_constant_step(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", metrics(1, learning_rate=0.1))
    ElementTree.fromstring(write_picture(tmp_path, tmp_path / "run.svg").read_text(encoding="utf-8"))


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run folder"):
        write_picture(tmp_path, tmp_path / "run.svg")
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    with pytest.raises(RunError, match="no bits per byte"):
        write_picture(tmp_path, tmp_path / "run.svg")
    run = make_run(tmp_path / "run", num_steps=10)
    with pytest.raises(RunError, match="cannot be written"):
        write_picture(run, tmp_path / "absent" / "run.svg")
