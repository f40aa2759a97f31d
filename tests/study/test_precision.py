"""The error budget: of known numbers, and of a tiny run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from surefoot.cli.verbs.precision import advice
from surefoot.config import override
from surefoot.study.precision import Budget, Error, Gap, budget
from surefoot.train.run import Run

Tiny = Callable[..., Run]


def error(largest: float, **shares: float) -> Error:
    return Error(largest / 2, largest, largest / 3, **shares)


def test_layers_that_stand_out_are_to_be_kept() -> None:
    usual = {f"layers.{layer}.ffn.w_up": error(0.03) for layer in range(5)}
    found = {
        **usual,
        "layers.1.ffn.w_down": error(0.03, saturated=0.01),
        "layers.2.ffn.w_down": error(0.03, underflowed=0.3),
        "layers.3.ffn.w_down": error(0.09),
    }
    kept = Budget({"rowwise": found, "mxfp8": usual}, {}, {})
    assert kept.to_keep("mxfp8") == {}
    assert kept.to_keep("rowwise") == {
        1: "layers.1.ffn.w_down saturates in 1.0%",
        2: "layers.2.ffn.w_down underflows in 30%",
        3: "its error is 3.0 times the usual",
    }


def test_advice_is_an_option_to_copy_or_that_none_will_do() -> None:
    calm, loud = error(0.03), error(0.03, underflowed=0.5)
    some = {"layers.0.ffn.w_up": calm, "layers.1.ffn.w_up": loud, "layers.2.ffn.w_up": loud}
    assert advice(Budget({"rowwise": some}, {}, {}))[0].endswith("--set precision.keep_layers=[1,2]")
    assert "every layer" in advice(Budget({"mxfp4": dict.fromkeys(some, loud)}, {}, {}))[0]
    assert advice(Budget({"mxfp8": dict.fromkeys(some, calm)}, {}, {})) == ["no layer stands out"]


def test_a_gap_is_a_mean_with_its_error() -> None:
    gap = Gap((0.01, 0.03, 0.02))
    assert gap.mean == pytest.approx(0.02)
    assert gap.error == pytest.approx(0.01 / 3**0.5)


def test_errors_of_a_run_are_those_of_its_formats(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WARM_UP", 2), ("STEPS", 1), ("SEEDS", 2)):
        monkeypatch.setattr(f"surefoot.study.precision.{name}", value)
    run = override(tiny(), ["data.sequence_length=64", "train.batch=4"])
    said: list[str] = []
    found = budget(run, run.data.build(), ["bf16", "delayed", "blockwise", "mxfp8", "mxfp4"], said.append)
    assert found.refused.keys() == {"blockwise"}, "tiles of 128 tokens in sequences of 64"
    assert found.errors.keys() == found.gaps.keys() == {"bf16", "delayed", "mxfp8", "mxfp4"}
    names = [
        f"layers.{i}.{name}"
        for i in (0, 1)
        for name in ("mixer.wq+wk+wv", "mixer.wo", "ffn.w_gate", "ffn.w_up", "ffn.w_down")
    ]
    for numbers, (least, most) in {
        "bf16": (5e-4, 0.01),
        "delayed": (0.01, 0.2),
        "mxfp8": (0.01, 0.1),
        "mxfp4": (0.05, 0.5),
    }.items():
        assert sorted(found.errors[numbers]) == sorted(names)
        assert all(least < error.largest < most for error in found.errors[numbers].values()), numbers
        assert len(found.gaps[numbers].seeds) == 2
        assert abs(found.gaps[numbers].mean) < 0.5
    assert len({found.gaps[numbers].seeds for numbers in found.gaps}) == 4, "each format trains in its own numbers"
    assert any("mxfp8" in line for line in said)
