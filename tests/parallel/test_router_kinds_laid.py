"""Routers that read words, count whole steps or keep counts, and limited room: what every layout trains, and their states."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from surefoot.blocks.base import RouterConfig
from surefoot.blocks.ffn.moe import MoEConfig
from surefoot.blocks.routers.hash import HashConfig
from surefoot.blocks.routers.noisy import NoisyConfig
from surefoot.blocks.routers.quantile import QuantileConfig
from surefoot.blocks.routers.relu import ReLUConfig
from surefoot.blocks.routers.sigmoid import SigmoidConfig
from surefoot.blocks.routers.topk import TopKConfig
from surefoot.dist.pool import Pool
from surefoot.models.decoder import DecoderConfig
from surefoot.parallel.plan import Plan
from surefoot.parallel.recompute import RecomputeConfig
from tests.parallel.parity import BATCH, assert_same_as_one_process, decoder, three_steps
from tests.spread import spread

PLANS = [
    Plan(shard=2, zero=3, tensor=2),
    Plan(context=2, expert=2),
    Plan(pipeline=2, expert=2, zero=1),
    Plan(replicate=2, shard=2, zero=1),
    Plan(context=2, context_kind="ring", tensor=2),
    Plan(shard=2, zero=3, recompute=RecomputeConfig(mode="full")),
]
ROUTERS: dict[str, tuple[RouterConfig, float | None]] = {
    "hash": (HashConfig(), None),
    "relu": (ReLUConfig(start=0.1), None),
    "relu over a step": (ReLUConfig(start=0.1, scope="global_batch"), None),
    "noisy": (NoisyConfig(importance_loss=0.3, load_loss=0.2), None),
    "quantile": (QuantileConfig(), None),
    "top-k over a step": (TopKConfig(balance_loss=0.3, scope="global_batch"), None),
    "sigmoid over a step": (SigmoidConfig(balance_loss=0.3, scope="global_batch"), None),
    "room": (TopKConfig(balance_loss=0.3), 0.6),
    "room for gates": (ReLUConfig(start=0.1), 0.6),
}


def routed(kind: str) -> DecoderConfig:
    router, factor = ROUTERS[kind]
    ffn = MoEConfig(num_experts=6, top_k=2, hidden=12, shared_hidden=8, router=router, capacity_factor=factor)
    return decoder(depth=2).model_copy(update={"ffn": ffn})


@pytest.mark.parametrize(("kind", "plan"), spread(product(ROUTERS, PLANS), 5))
def test_gradients_are_those_of_one_process(pool: Pool, kind: str, plan: Plan) -> None:
    assert_same_as_one_process(pool, plan, routed(kind), num_micro=2)


def steps(kind: str, plan: Plan, micro_batch: int) -> tuple[dict[str, Tensor], dict[str, float]] | None:
    """Every state after three steps, and what the last step says of its routers."""
    return three_steps(routed(kind), plan, micro_batch)


@pytest.mark.parametrize(
    ("kind", "plan"),
    spread(
        product(
            ["quantile", "noisy", "relu", "relu over a step", "room"],
            [Plan(replicate=2), Plan(context=2), Plan(pipeline=2, expert=2), Plan(tensor=2, shard=2, zero=3)],
        ),
        3,
    ),
)
def test_states_and_statistics_follow_the_whole_step(pool: Pool, kind: str, plan: Plan) -> None:
    expected = steps(kind, Plan(), BATCH)
    assert expected is not None
    states, statistics = expected
    assert (statistics["dropped_share"] > 0.05) == (kind == "room")
    assert bool(states) == (kind != "room")
    assert all(state.any() for state in states.values())
    names = set()
    for found in pool.run(steps, kind, plan, 2)[: plan.num_ranks]:
        assert found is not None
        names |= found[0].keys()
        for name, state in found[0].items():
            torch.testing.assert_close(state, states[name], rtol=1e-9, atol=1e-12)
        assert found[1] == pytest.approx(statistics, rel=1e-9)
    assert names == states.keys()
