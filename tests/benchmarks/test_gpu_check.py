"""The GPU check on a CPU: the report it writes, the parity it sees fail, and the budget it keeps."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check, plain
from benchmarks.gpu_check import MODELS, Row, check, flops_per_token, main, no_longer_than, parity, rows, tiny_models
from surefoot.parallel import apply

CPU = torch.device("cpu")


@pytest.fixture
def one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"attention": tiny_models()["attention"]}
    monkeypatch.setattr(gpu_check, "tiny_models", lambda: models)


@pytest.mark.usefixtures("one_model")
def test_rows_have_times_and_those_without_time_are_skipped() -> None:
    wanted = [Row("160M", None, "bf16", False), Row("160M", "full", "bf16", False), Row("1B", "none", "fp8", False)]
    lines, holds = check(CPU, 60, tiny=True, wanted=wanted)
    assert holds
    table = [line for line in lines if line.startswith(("| 160M", "| 1B"))]
    assert len(table) == 3
    assert all(float(line.split("|")[2]) > 0 for line in table)
    lines, holds = check(CPU, 0, tiny=True, wanted=wanted)
    assert holds
    assert lines[-1].startswith("Skipped for want of time: 160M plain loop, bf16, eager; 160M surefoot, full")


@pytest.mark.usefixtures("one_model")
def test_a_device_that_computes_otherwise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def lay_out(*arguments: object, **named: object) -> object:
        laid = apply.lay_out(*arguments, **named)  # type: ignore[arg-type]
        if named["dtype"] is torch.float32:
            for local in laid.locals:
                local.part.detach().mul_(1.01)
        return laid

    monkeypatch.setattr(gpu_check, "lay_out", lay_out)
    lines, holds = check(CPU, 0, tiny=True, wanted=[])
    assert not holds
    assert any("DIFFERS" in line for line in lines)


@pytest.mark.usefixtures("one_model")
def test_a_row_that_fails_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object) -> None:
        raise RuntimeError("no | room\nleft")

    monkeypatch.setattr(gpu_check, "measured", measured)
    lines, _ = check(CPU, 60, tiny=True, wanted=rows()[:1])
    assert lines[-1] == "| 160M plain loop, bf16, eager | RuntimeError: no / room left | | | | |"


@pytest.mark.parametrize("name", [name for name in tiny_models() if name != "attention"])
def test_one_device_agrees_with_itself(name: str) -> None:
    found = parity(tiny_models()[name], CPU)
    assert max(found.values()) < 1e-4
    assert found["gradients"] > 0, "fp32 is not fp64"


def test_time_runs_out() -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError), no_longer_than(0.05):
        time.sleep(10)
    assert time.monotonic() - started < 5


def test_models_have_the_sizes_they_are_named_by() -> None:
    sizes = {"160M": 160e6, "410M": 410e6, "1B": 1e9}
    for name, size in MODELS.items():
        with torch.device("meta"):
            count = sum(weight.numel() for weight in plain.Llama(size).parameters())
        assert count == pytest.approx(sizes[name], rel=0.05)
        matrices = count - size.vocabulary * size.width - (2 * size.depth + 1) * size.width
        assert flops_per_token(size) == 6 * matrices + 6 * size.depth * size.width * size.length


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    assert "try --device cpu --tiny" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.md"
    assert main(["--device", "cpu", "--tiny", "--budget", "40", "--report", str(file)]) == 0
    said = file.read_text()
    assert said.strip() in capsys.readouterr().out
    assert said.count("| same |") == len(tiny_models())
    for row in rows():
        assert row.name in said
