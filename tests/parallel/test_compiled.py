"""Layers through torch's compiler: the gradients of one process under every kind of plan, and a word where it cannot be."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from surefoot.blocks.ffn.moe import MoEConfig
from surefoot.config import ConfigError
from surefoot.dist.pool import Pool
from surefoot.models.decoder import DecoderConfig
from surefoot.parallel import compiled
from surefoot.parallel.apply import check
from surefoot.parallel.plan import Plan
from surefoot.parallel.recompute import RecomputeConfig
from tests.parallel.parity import LENGTH, decoder, share, whole
from tests.spread import spread

PLANS = [
    Plan(shard=2, zero=3, tensor=2),
    Plan(),
    Plan(recompute=RecomputeConfig(mode="full")),
    Plan(pipeline=2, shard=2),
    Plan(context=2, context_kind="ring", shard=2, zero=2),
    Plan(shard=2, zero=3, recompute=RecomputeConfig(mode="selective")),
    Plan(tensor=2, replicate=2),
]
ROUTED = decoder().model_copy(update={"ffn": MoEConfig(num_experts=4, top_k=2, hidden=12)})


def traced(plan: Plan, config: DecoderConfig, num_micro: int) -> Any:
    """The share of a rank whose layers are traced; code is generated in `test_the_code_that_it_makes` alone."""
    compiled.BACKEND = "aot_eager"
    try:
        found = share(plan.model_copy(update={"compile": "layers"}), config, num_micro)
        from torch._dynamo.utils import counters

        assert found is None or counters["stats"]["unique_graphs"] > 0
    finally:
        compiled.BACKEND = "inductor"
        torch.compiler.reset()
    return found


@pytest.mark.parametrize(("plan", "config"), spread([(plan, c) for plan in PLANS for c in (decoder(), ROUTED)], 14))
def test_gradients_are_those_of_one_process(pool: Pool, plan: Plan, config: DecoderConfig) -> None:
    if config is ROUTED:
        plan = plan.model_copy(update={"context": 1})
    expected, _ = whole([share(Plan(), config, 1)])
    num_micro = 2 if plan.pipeline > 1 else 1
    found, _ = whole(pool.run(traced, plan, config, num_micro))
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_the_code_that_it_makes() -> None:
    expected, _ = whole([share(Plan(), decoder(), 1)])
    found, _ = whole([share(Plan(compile="layers"), decoder(), 1)])
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-10, atol=1e-12, msg=name)


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check(Plan(), decoder(), LENGTH)
    with pytest.raises(ConfigError, match=r"plan.compile: 'layers': needs a C\+\+ compiler"):
        check(Plan(compile="layers"), decoder(), LENGTH)
