"""Values of tokens: what they add, whose weights they are, layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surefoot.blocks.base import TOKENS
from surefoot.blocks.mixers.attention import Attention, AttentionConfig
from surefoot.config import ConfigError
from surefoot.dist.pool import Pool
from surefoot.models.count import build_meta, count_parameters
from surefoot.models.decoder import DecoderConfig
from surefoot.models.initialise import named_weights
from surefoot.ops.attention import attend_plain
from surefoot.ops.documents import Documents
from surefoot.optim.base import Param
from surefoot.parallel.plan import Plan
from surefoot.parallel.recompute import RecomputeConfig
from surefoot.planner.serving import Serving
from tests.parallel.parity import assert_same_as_one_process, decoder
from tests.redraw import redraw

ROWS, WIDTH, SIZE = 61, 16, 4


def attention(**changes: Any) -> AttentionConfig:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_size": SIZE, "rope_theta": 20.0, "value_rows": ROWS}
    return AttentionConfig(**(sizes | changes))


def model(**changes: Any) -> DecoderConfig:
    """Every second layer has them, as in modded-nanogpt."""
    mixers = {"mixer": attention(), "other_mixers": {"p": attention(value_rows=None)}, "mixer_pattern": "mp"}
    return DecoderConfig(**(dict(decoder(depth=4)) | mixers | changes))


def test_they_are_added_to_the_values() -> None:
    """By a row for each token, written out; gradients too, also of tokens that come twice."""
    mixer: Attention = redraw(attention(rope="none", qk_norm="none").build(width=WIDTH, output_scale=1.0))
    assert mixer.values is not None
    generator = torch.Generator().manual_seed(1)
    x_BLD = torch.randn(2, 9, WIDTH, generator=generator).double()
    tokens_BL = torch.randint(7, (2, 9), generator=generator)
    docs = Documents(torch.tensor([[0] * 4 + [1] * 5] * 2), 9)
    q, k, v = ((x_BLD @ weight.mT).unflatten(-1, (-1, SIZE)) for weight in (mixer.wq, mixer.wk, mixer.wv))
    rows = [torch.stack([mixer.values.weight[token] for token in row]) for row in tokens_BL.tolist()]
    v = v + mixer.values.share * torch.stack(rows).unflatten(-1, (-1, SIZE))
    expected = attend_plain(q, k, v, docs).flatten(2) @ mixer.wo.mT
    found = mixer(x_BLD, docs, None, {TOKENS: tokens_BL})
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    names, weights = zip(*mixer.named_parameters(), strict=True)
    for name, ours, theirs in zip(
        names,
        torch.autograd.grad(found.square().sum(), weights),
        torch.autograd.grad(expected.square().sum(), weights),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, msg=name)


def test_a_table_is_a_vocabulary_that_multiplies_nothing() -> None:
    """Optimizers treat it as the embedding; it is no part of what multiplies tokens, and serving reads it by the row."""
    with_them, without = (
        build_meta(model()),
        build_meta(model(mixer=attention(value_rows=None), other_mixers={}, mixer_pattern="m")),
    )
    roles = {
        name: Param(name, getattr(block, own), block.axes[own]).role for name, block, own in named_weights(with_them)
    }
    assert roles["layers.0.mixer.values.weight"] == "vocabulary"
    assert roles["layers.0.mixer.values.share"] == "vector"
    more = {key: count - count_parameters(without)[key] for key, count in count_parameters(with_them).items()}
    table = 2 * ROWS * 2 * SIZE
    assert more == {"total": table + 2, "non_embedding": 2, "active": table + 2, "matmul": 0, "vector": 2}
    read = [Serving(config, torch.bfloat16).weight_bytes_read(1) for config in (with_them.config, without.config)]
    assert read[0] - read[1] == 2 * (2 * 2 * SIZE + 2)


PLANS = [
    Plan(tensor=2),
    Plan(tensor=2, shard=2, zero=1),
    Plan(shard=2, zero=3),
    Plan(context=2, context_kind="ring"),
    Plan(pipeline=2),
    Plan(replicate=2, recompute=RecomputeConfig(mode="full")),
]


@pytest.mark.parametrize("plan", PLANS, ids=Plan.describe)
def test_gradients_are_those_of_one_process(pool: Pool, plan: Plan) -> None:
    assert_same_as_one_process(pool, plan, model(), num_micro=2)


def test_the_layer_ahead_has_them_too(pool: Pool) -> None:
    config = model(mixer_pattern="pm", ahead_weight=0.3)
    assert_same_as_one_process(pool, Plan(tensor=2), config, num_micro=2)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocab_size: 60: must be the 61 rows"):
        model(vocab_size=60)
    with pytest.raises(ConfigError, match="value_rows: 61: has no values to be added to where reads=keys"):
        attention(reads="keys")
