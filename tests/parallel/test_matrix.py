"""The matrix of layouts: a few that have every pair of values in `make test`, all of them in `make test-all`."""

from __future__ import annotations

import pytest

from surefoot.blocks.ffn.moe import MoEConfig
from surefoot.blocks.routers.topk import TopKConfig
from surefoot.config import ConfigError
from surefoot.dist.pool import Pool
from surefoot.models.decoder import DecoderConfig
from surefoot.parallel.apply import check
from surefoot.parallel.plan import Plan
from surefoot.study.matrix import MATRIX, combinations, covering, values_of
from tests.parallel.parity import LENGTH, assert_same_as_one_process, decoder

NUM_RANKS = 8
FFN = MoEConfig(num_experts=8, top_k=2, hidden=8, router=TopKConfig(balance_loss=0.3))


def model(plan: Plan) -> DecoderConfig:
    """Four heads and eight experts, that every axis can cut, and a layer for each stage."""
    config = decoder(num_kv_heads=4, width=8, depth=max(2, plan.num_stages))
    return config.model_copy(update={"ffn": FFN})


def is_legal(plan: Plan) -> bool:
    try:
        check(plan, model(plan), LENGTH)
    except ConfigError:
        return False
    return True


PLANS = [plan for plan in combinations(NUM_RANKS) if is_legal(plan)]
COVERING = covering(PLANS)


def test_every_legal_pair_of_values_is_covered() -> None:
    assert covering(PLANS) == COVERING
    assert set(COVERING) <= set(PLANS)
    assert len(COVERING) < len(PLANS) / 2
    assert set().union(*(values_of(plan, 2) for plan in COVERING)) == set().union(
        *(values_of(plan, 2) for plan in PLANS)
    )


def test_this_model_allows_every_value() -> None:
    seen = {item for plan in COVERING for pair in values_of(plan, 2) for item in pair}
    assert seen == {(axis, place) for axis, values in MATRIX.items() for place in range(len(values))}


@pytest.mark.parametrize(
    "plan",
    [pytest.param(plan, marks=[] if plan in COVERING else [pytest.mark.long], id=plan.describe()) for plan in PLANS],
)
def test_gradients_are_those_of_one_process(pool: Pool, plan: Plan) -> None:
    micro = next(number for number in range(1, 17) if plan.takes(number) and number >= plan.num_stages)
    assert_same_as_one_process(pool, plan, model(plan), num_micro=micro, batch=micro * plan.num_data_ranks)
