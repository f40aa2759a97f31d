"""Numbers that may be trusted are; those that lose too much, or an outlier unseen, are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest

from surefoot.cli.verbs import verify as verb
from surefoot.config import override
from surefoot.dist.pool import Pool
from surefoot.parallel.plan import Plan
from surefoot.precision.formats import Format
from surefoot.precision.kinds import Name
from surefoot.study.outlier import BUDGET, BUDGET_OF_4_BITS, trust
from surefoot.study.verify import shrunk, verify
from surefoot.train.run import Run
from tests.spread import spread

Tiny = Callable[..., Run]
WIDE = ["model.mixer.num_kv_heads=2", "model.mixer.head_size=32", "model.ffn.hidden=64", "data.sequence_length=128"]
ENDS = ["precision.keep_first=0", "precision.keep_last=0"]
PLANS = [Plan(shard=2), Plan(tensor=2), Plan(pipeline=2), Plan(context=2), Plan(shard=2, tensor=2, zero=2)]


def narrow(tiny: Tiny, name: Name) -> Run:
    return shrunk(override(tiny(), [*WIDE, *ENDS, f"precision.products={name}"]))


@pytest.mark.parametrize(("plan", "name"), spread([(plan, name) for name in get_args(Name) for plan in PLANS], 18))
def test_every_kind_passes_in_every_layout(tiny: Tiny, pool: Pool, plan: Plan, name: Name) -> None:
    (verdict,) = verify(narrow(tiny, name), [plan], pool, lambda _: None, restarted=())
    assert verdict.failure is None
    assert "largest magnitudes" in verdict.worst


@pytest.mark.parametrize("name", get_args(Name))
def test_every_kind_may_be_trusted(tiny: Tiny, name: Name) -> None:
    found = trust(narrow(tiny, name))
    assert found is not None
    assert found.failure is None
    assert 0 < found.gap < found.allowed == (BUDGET_OF_4_BITS if "4" in name else BUDGET)
    assert found.outlier is not None
    assert found.outlier.counter == ("saturated" if name == "delayed" else "underflowed")
    assert len(found.describe()) == 2


def test_bf16_has_a_budget_and_fp64_none(tiny: Tiny) -> None:
    found = trust(shrunk(tiny(), "bf16"))
    assert found is not None
    assert found.failure is None
    assert found.outlier is None
    assert trust(shrunk(tiny())) is None


def test_what_may_not_be_trusted_is_named(tiny: Tiny) -> None:
    found = trust(narrow(tiny, "rowwise"))
    assert found is not None
    assert found.outlier is not None
    far = replace(found, loss=found.exact * 1.01)
    assert far.failure is not None
    assert far.failure.startswith("loss is")
    assert far.describe()[-1] == f"FAILED: {far.failure}"
    lost = replace(found, outlier=replace(found.outlier, loss=float("nan")))
    assert "loss and gradient norm are nan" in (lost.failure or "")
    unseen = replace(found, outlier=replace(found.outlier, after=found.outlier.before))
    assert "leaves the underflowed share" in (unseen.failure or "")


def test_the_command_fails_where_rounding_is_wrong(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A format that rounds everything away from zero, on all ranks and on one process alike: no layout differs by that."""
    real = Format.round
    run = override(tiny(), [*WIDE, *ENDS, "precision.products=rowwise"])
    monkeypatch.setattr(verb, "find_recipe", lambda *_: run)
    monkeypatch.setattr(Format, "round", lambda form, x, dtype: real(form, x, dtype).mul_(1.5))
    assert verb.run("tiny", ["replicate=2"], False, 2, [], []) == 1
    said = capsys.readouterr().out
    assert "1 of 1 layouts train the same model" in said
    assert "FAILED: loss is" in said
