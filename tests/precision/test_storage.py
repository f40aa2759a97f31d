"""Weights, sums and moments in bf16 by role: gradients of every block, every kind of layout, resumption, and what is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surefoot.config import ConfigError, override
from surefoot.dist.mesh import Mesh
from surefoot.dist.pool import Pool
from surefoot.models.decoder import DecoderConfig
from surefoot.parallel.apply import check, lay_out
from surefoot.parallel.plan import Plan
from surefoot.precision.policy import PrecisionConfig
from surefoot.recipes.find import find_recipe
from surefoot.study.contracts import Example, examples_of, find_blocks
from surefoot.study.verify import shrunk, verify
from surefoot.train.run import Run
from tests.precision.test_narrow_layouts import LENGTH, batch
from tests.spread import spread
from tests.stopped import train, train_stopped

Tiny = Callable[..., Run]
CPU = torch.device("cpu")
NARROW = ("precision.parameters=bf16", "precision.optimizer_state=bf16")


def gradients(
    config: DecoderConfig, precision: PrecisionConfig, weights: dict[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    laid = lay_out(
        Plan(),
        config,
        Mesh(Plan().grid),
        sequence_length=LENGTH,
        dtype=torch.float64,
        device=CPU,
        seed=0,
        precision=precision,
    )
    for local in laid.locals if weights is not None else ():
        local.part.detach().copy_(weights[local.name])
    tokens_BL, targets_BL, docs_BL = (tensor[:2] for tensor in batch())
    size = config.vocab_size
    laid.accumulate([(tokens_BL % size, targets_BL % size, docs_BL)], 2 * LENGTH, torch.float64)
    found = {local.name: local.part.grad for local in laid.locals if local.part.grad is not None}
    return {local.name: local.part.detach() for local in laid.locals}, found


EXAMPLES = [example for cls in find_blocks() for example in examples_of(cls)]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_gradients_of_bf16_weights_are_wide(example: Example) -> None:
    """To the last digits those of wide weights of the same values: no operation rounds them to the weights' numbers."""
    narrow = PrecisionConfig(compute="fp64", parameters="bf16", narrow_roles=("matrix", "vocabulary"))
    weights, found = gradients(example.model, narrow)
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16, torch.float64}
    _, expected = gradients(example.model, PrecisionConfig(compute="fp64"), weights)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        error = float((gradient - expected[name]).norm() / expected[name].norm().clamp_min(1e-300))
        assert gradient.dtype is torch.float64
        assert error < 1e-12, f"gradient of {name} is off by {error:.1e}"


PLANS = [
    Plan(shard=2, tensor=2),
    Plan(shard=2, zero=1),
    Plan(replicate=2, shard=2),
    Plan(pipeline=2, shard=2, schedule="zero-bubble"),
    Plan(context=2),
    Plan(replicate=2, tensor=2),
]


LAYOUTS = spread(((plan, rounding) for rounding in ("stochastic", "kahan") for plan in PLANS), 7)


@pytest.mark.parametrize(("plan", "rounding"), LAYOUTS)
def test_layouts_round_alike(pool: Pool, plan: Plan, rounding: str) -> None:
    """Around fp64 arithmetic, where gradients are equal to the last digits, bf16 weights are too, and stop and go on."""
    sets = [*NARROW, f"precision.rounding={rounding}"]
    run = shrunk(override(find_recipe("quickstart", []), sets))
    (verdict,) = verify(run, [plan], pool, lambda _verdict: None)
    assert verdict.failure is None, verdict.failure
    assert verdict.worst["updated weights"] < 1e-11


@pytest.mark.parametrize("plan", [Plan(shard=2, zero=1), *(pytest.param(p, marks=pytest.mark.long) for p in PLANS)])
def test_layouts_with_sums_in_bf16(pool: Pool, plan: Plan) -> None:
    """There rounding differs by layout: as far from fp64 as one process in bf16, or up to twice that."""
    sets = [*NARROW, "precision.reduce=bf16", "precision.accumulate=bf16"]
    run = shrunk(override(find_recipe("quickstart", []), sets), "bf16")
    (verdict,) = verify(run, [plan], pool, lambda _verdict: None)
    assert verdict.failure is None, verdict.failure
    assert verdict.worst["gradients"] > 1e-4


def test_fsdp_that_would_add_up_otherwise_is_refused(tiny: Tiny) -> None:
    run = tiny("precision.reduce=bf16")
    check(Plan(shard=2, zero=1), run.model, 32, run.precision)
    with pytest.raises(ConfigError, match=r"precision.reduce: 'bf16'.*precision.accumulate=bf16.*plan.zero=1"):
        check(Plan(shard=2), run.model, 32, run.precision)


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_resumes_bitwise_and_says_what_is_in_effect(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounding: str
) -> None:
    run = tiny(*NARROW, "precision.compute=bf16", f"precision.rounding={rounding}")
    said = train(run, tmp_path / "whole")
    wide = "weights fp32, gradients added up in fp32 and over ranks in fp32, optimizer state fp32"
    own = f"weights bf16 (rounded {rounding}), gradients added up in fp32 and over ranks in fp32, optimizer state bf16"
    assert f"  matrix: {own}" in said
    assert f"  vocabulary, router, state, vector: {wide}" in said
    facts = json.loads((tmp_path / "whole" / "facts.json").read_text())
    assert facts["precision"] == {
        "compute": "bf16",
        "weights": {"matrix": own, "vocabulary, router, state, vector": wide},
    }
    assert train_stopped(run, tmp_path / "parts", monkeypatch, step=5) == facts["result"]["weights_sha256"]
