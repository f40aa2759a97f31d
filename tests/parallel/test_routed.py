"""Routed networks under layouts: gradients, auxiliary ones included, and biases are those of one process."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from surefoot.blocks.base import RouterConfig
from surefoot.blocks.ffn.moe import MoEConfig
from surefoot.blocks.routers.sigmoid import SigmoidConfig
from surefoot.blocks.routers.topk import TopKConfig
from surefoot.dist.pool import Pool
from surefoot.models.decoder import DecoderConfig
from surefoot.parallel.plan import Plan
from surefoot.parallel.schedules import Schedule
from tests.parallel.parity import BATCH, assert_same_as_one_process, decoder, three_steps

PLANS = [
    Plan(replicate=2),
    Plan(shard=2, zero=1),
    Plan(shard=4, zero=3),
    Plan(tensor=2),
    Plan(shard=2, zero=3, tensor=2),
    Plan(replicate=2, shard=2, zero=2, tensor=2),
    Plan(context=2),
    Plan(context=2, context_kind="ring", shard=2, tensor=2),
]


def routed(router: RouterConfig) -> DecoderConfig:
    ffn = MoEConfig(num_experts=6, top_k=2, hidden=12, shared_hidden=8, router=router)
    return decoder(depth=2).model_copy(update={"ffn": ffn})


@pytest.mark.parametrize("plan", PLANS, ids=Plan.describe)
@pytest.mark.parametrize("router", [TopKConfig(balance_loss=0.3, z_loss=0.1), SigmoidConfig(balance_loss=0.3)])
def test_gradients_are_those_of_one_process(pool: Pool, plan: Plan, router: RouterConfig) -> None:
    assert_same_as_one_process(pool, plan, routed(router), num_micro=2)


@pytest.mark.parametrize(
    "other", [{}, {"shard": 2, "zero": 3}, {"tensor": 2, "expert": 2}, {"expert": 2, "shard": 2, "zero": 2}], ids=str
)
@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_losses_of_routers_enter_once_in_every_schedule(pool: Pool, schedule: Schedule, other: dict[str, Any]) -> None:
    config = routed(TopKConfig(balance_loss=0.3, z_loss=0.1)).model_copy(update={"depth": 4})
    plan = Plan(pipeline=2, schedule=schedule, **other)
    # Four samples a rank, each a micro-batch: what the most demanding schedule wants.
    assert plan.takes(4)
    assert_same_as_one_process(pool, plan, config, num_micro=4, batch=4 * plan.num_data_ranks)


def biases(plan: Plan, micro_batch: int) -> tuple[dict[str, torch.Tensor], dict[str, float]] | None:
    """Every bias after three steps, and what the last step says of its routers."""
    return three_steps(routed(SigmoidConfig(bias_rate=0.01)), plan, micro_batch)


def test_biases_follow_the_loads_of_all_ranks_and_micro_batches(pool: Pool) -> None:
    expected = biases(Plan(), BATCH)
    assert expected is not None
    assert {abs(round(float(x), 6)) for x in torch.cat(list(expected[0].values()))} <= {0.0, 0.01, 0.02, 0.03}
    assert any(bias.any() for bias in expected[0].values())
    for plan in (
        Plan(replicate=2),
        Plan(shard=2, zero=3, tensor=2),
        Plan(context=2),
        Plan(pipeline=2),
        Plan(pipeline=2, expert=2),
    ):
        names = set()
        for found in pool.run(biases, plan, 2)[: plan.num_ranks]:
            assert found is not None
            names |= found[0].keys()
            for name, bias in found[0].items():
                assert torch.equal(bias, expected[0][name])
            assert found[1] == pytest.approx(expected[1], rel=1e-9)
        assert names == expected[0].keys()
