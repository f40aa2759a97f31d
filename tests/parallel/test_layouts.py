"""Every layout of data and tensor parallelism has the gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surefoot.blocks.connections.add import AddConfig
from surefoot.blocks.connections.first import FirstConfig
from surefoot.blocks.connections.hyper import HyperConfig
from surefoot.blocks.ffn.glu import GLUConfig
from surefoot.blocks.ffn.mlp import MLPConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.config import ConfigError
from surefoot.dist.pool import Pool
from surefoot.models.decoder import DecoderConfig
from surefoot.parallel.apply import check
from surefoot.parallel.plan import Plan
from tests.parallel.parity import assert_same_as_one_process, decoder

PLANS = [
    Plan(replicate=2),
    Plan(replicate=8),
    Plan(shard=2, zero=1),
    Plan(shard=4, zero=1),
    Plan(shard=2, zero=2),
    Plan(shard=4, zero=3),
    Plan(shard=4, zero=3, reshard=2),
    Plan(replicate=2, shard=2, zero=1),
    Plan(replicate=2, shard=2, zero=2),
    Plan(replicate=2, shard=4, zero=3),
    Plan(tensor=2),
    Plan(tensor=2, replicate=2),
    Plan(tensor=2, shard=4, zero=1),
    Plan(tensor=2, shard=2, zero=2),
    Plan(tensor=2, shard=4, zero=3),
    Plan(tensor=2, replicate=2, shard=2, zero=1),
    Plan(tensor=2, replicate=2, shard=2, zero=3),
]


@pytest.mark.parametrize("plan", PLANS, ids=Plan.describe)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_gradients_are_those_of_one_process(pool: Pool, plan: Plan, tied: bool) -> None:
    assert_same_as_one_process(pool, plan, decoder(tied=tied), num_micro=1 if plan.num_data_ranks == 8 else 2)


OPTIONS: dict[str, dict[str, Any]] = {
    "sandwich": {"norm_placement": "sandwich", "embedding_scale": 2.0, "logit_scale": 0.5, "logit_softcap": 3.0},
    "parallel": {"arrangement": "parallel", "connection": AddConfig(scale=0.5)},
    "hyper": {"connection": HyperConfig(streams=2)},
    "first": {"connection": FirstConfig(first=0.3), "norm_placement": "post"},
    "pattern": {
        "other_mixers": {"w": AttentionConfig(num_heads=2, num_kv_heads=2, head_size=6)},
        "mixer_pattern": "wm-m",
        "other_ffns": {"g": GLUConfig(hidden=8), "r": MLPConfig(hidden=20)},
        "ffn_pattern": "gfr-",
    },
}


@pytest.mark.parametrize(
    "plan",
    [
        Plan(shard=2, zero=3, tensor=2),
        Plan(replicate=2, shard=2, zero=1),
        Plan(pipeline=2, schedule="zero-bubble", tensor=2, shard=2),
        Plan(context=2, context_kind="ring", pipeline=2),
    ],
    ids=Plan.describe,
)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_option_of_a_decoder_is_laid_out_right(pool: Pool, plan: Plan, options: dict[str, Any]) -> None:
    config = DecoderConfig(**(dict(decoder(tied="logit_softcap" in options)) | options))
    assert_same_as_one_process(pool, plan, config, num_micro=4 if plan.pipeline > 1 else 2)


@pytest.mark.parametrize("size", [2, 3])
def test_a_vocabulary_that_does_not_divide(pool: Pool, size: int) -> None:
    config = decoder(vocab_size=50257, num_heads=6, num_kv_heads=6, depth=1)
    assert_same_as_one_process(pool, Plan(tensor=size, shard=2), config)


@pytest.mark.parametrize(
    ("plan", "config", "length", "said"),
    [
        (Plan(tensor=3), decoder(), 15, ("4 heads of layers.0.mixer", "nearest that does: 2")),
        (Plan(tensor=4), decoder(), 24, ("2 kv_heads of layers.0.mixer", "nearest that does: 2")),
        (Plan(tensor=2), decoder(), 15, ("15 data.sequence_length", "nearest that does: 1")),
        (Plan(tensor=4), decoder(vocab_size=5, num_kv_heads=4), 24, ("5 rows of embedding",)),
    ],
)
def test_what_cannot_be_cut_is_refused_with_numbers(
    plan: Plan, config: DecoderConfig, length: int, said: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(plan, config, length)
    for part in ("plan.tensor", *said):
        assert part in str(caught.value)


def test_the_pool_reports_a_failure_and_goes_on(pool: Pool) -> None:
    with pytest.raises(Exception, match="planted on rank 3"):
        pool.run(_fail_on, 3)
    assert pool.run(torch.distributed.get_rank) == list(range(8))


def _fail_on(rank: int) -> None:
    if torch.distributed.get_rank() == rank:
        raise ValueError(f"planted on rank {rank}")
    torch.distributed.barrier()
