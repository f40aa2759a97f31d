"""Keys and values of one layer used by later ones: gradients of all of them, one state, every layout, refusals."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from surefoot.blocks.base import Shared
from surefoot.blocks.mixers.attention import Attention, AttentionConfig
from surefoot.blocks.mixers.mla import MLAConfig
from surefoot.config import ConfigError
from surefoot.dist.pool import Pool
from surefoot.infer.states import stored_bytes
from surefoot.models.decoder import Decoder, DecoderConfig
from surefoot.ops.documents import Documents
from surefoot.parallel.context import Kind
from surefoot.parallel.plan import Plan
from tests.parallel.parity import assert_same_as_one_process, decoder
from tests.redraw import redraw

WIDTH = 16


def config(**changes: Any) -> AttentionConfig:
    return AttentionConfig(**({"num_heads": 4, "num_kv_heads": 2, "head_size": 4, "rope_theta": 20.0} | changes))


def model(pattern: str = "mrwswr", **changes: Any) -> DecoderConfig:
    """As in YOCO and CLA: some layers have keys, others read those of m or of w."""
    others = {
        "r": config(reads="far", gate="sigmoid"),
        "w": config(window=5, leaves="near", sinks="learned"),
        "s": config(window=5, reads="near", bias="qkv"),
    }
    return decoder(depth=len(pattern)).model_copy(
        update={
            "mixer": config(leaves="far"),
            "other_mixers": {letter: mixer for letter, mixer in others.items() if letter in pattern},
            "mixer_pattern": pattern,
        }
        | changes
    )


def pair(**changes: Any) -> tuple[Attention, Attention]:
    """One that leaves its keys, and one that reads them and has otherwise the same weights."""
    writer = redraw(config(leaves="keys", **changes).build(width=WIDTH, output_scale=1.0))
    reader = config(reads="keys", **changes).build(width=WIDTH, output_scale=1.0).double()
    assert not {"wk", "wv", "bk", "bv", "norm_k.scale"} & dict(reader.named_parameters()).keys()
    reader.load_state_dict({name: writer.state_dict()[name] for name in reader.state_dict()})
    return writer, reader


def keys_of(mixer: Attention) -> list[torch.nn.Parameter]:
    return [weight for name, weight in mixer.named_parameters() if name in {"wk", "wv", "norm_k.scale", "bk", "bv"}]


@pytest.mark.parametrize("changes", [{}, {"window": 3, "bias": "qkv"}, {"qk_norm": "width"}], ids=str)
def test_reading_ones_own_keys_is_plain_attention(changes: dict[str, Any]) -> None:
    """And what reads them twice pulls at them twice."""
    writer, reader = pair(**changes)
    x = torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    docs = Documents(torch.tensor([[0] * 5 + [1] * 7] * 2), 12)
    shared: Shared = {}
    plain = writer(x, docs, None, shared)
    again = reader(x, docs, None, shared)
    torch.testing.assert_close(again, plain, rtol=0, atol=1e-13)
    once = torch.autograd.grad(plain.square().sum(), keys_of(writer), retain_graph=True)
    twice = torch.autograd.grad(plain.square().sum() + again.square().sum(), keys_of(writer))
    for one, two in zip(once, twice, strict=True):
        torch.testing.assert_close(two, 2 * one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cuts", [(1,) * 12, (12,), (7, 1, 1, 1, 1, 1), (2, 6, 4)])
def test_stepping_equals_one_pass(cuts: tuple[int, ...]) -> None:
    built: Decoder = redraw(model().build())
    ids = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))
    whole = built(ids, Documents(None, 12))
    states, parts, start = built.new_states(2, 12, torch.float64), [], 0
    with torch.no_grad():
        for piece in ids.split(cuts, 1):
            parts.append(built(piece, Documents(None, piece.shape[1], start=start), states))
            start += piece.shape[1]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
    assert {state.length for state in states if state is not None} == {12}


def test_readers_hold_nothing_and_read_everything() -> None:
    built = model().build()
    assert stored_bytes(built.new_states(1, 12, torch.bfloat16)) == 2 * 2 * 4 * 2 * (12 + 5 + 5)
    held = [mixer.state_bytes(12, torch.bfloat16) for mixer in built.mixers()]
    moved = [mixer.decode_bytes(12, torch.bfloat16) for mixer in built.mixers()]
    token = 2 * 2 * 4 * 2
    assert held == [12 * token, 0, 5 * token, 0, 5 * token, 0]
    assert moved == [12 * token, 12 * token, 5 * token, 5 * token, 5 * token, 12 * token]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(tensor=2),
        Plan(shard=2, zero=3, tensor=2),
        Plan(shard=4, zero=3),
        *(Plan(context=2, context_kind=kind, shard=2, zero=3) for kind in get_args(Kind)),
    ],
    ids=Plan.describe,
)
def test_gradients_are_those_of_one_process(pool: Pool, plan: Plan) -> None:
    assert_same_as_one_process(pool, plan, model(), num_micro=2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mixer": config(), "other_mixers": {"r": config(reads="far")}}, "layer 1 read far, which no earlier layer"),
        ({"mixer": config(reads="far"), "other_mixers": {"r": config(leaves="far")}}, "layer 0 read far"),
        (
            {"mixer": config(leaves="far"), "other_mixers": {"r": config(reads="far", window=4)}},
            "window: 4: must be None as in the layer that leaves far",
        ),
        (
            {"mixer": config(leaves="far"), "other_mixers": {"r": config(reads="far", num_kv_heads=4)}},
            "num_kv_heads: 4: must be 2 as in the layer",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], said: str) -> None:
    described = decoder(depth=2)
    values = {name: getattr(described, name) for name in ("vocab_size", "width", "depth", "ffn")}
    with pytest.raises(ConfigError) as caught:
        DecoderConfig(**values, mixer_pattern="mr", **changes)
    assert said in str(caught.value)


def test_keys_read_are_not_left_again() -> None:
    with pytest.raises(ConfigError, match="leaves: 'b': has no keys of its own to leave where reads=a"):
        config(reads="a", leaves="b")
    with pytest.raises(ValueError, match="was left by MLAConfig"):
        config(reads="a").check_writer(MLAConfig(num_heads=2, latent_size=4, head_size=4, rope_size=4, value_size=4))
