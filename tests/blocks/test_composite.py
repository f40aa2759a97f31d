"""Mixers made of others: blocks that layers have in common, and mixers side by side."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.blocks.base import EMBEDDED
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.blocks.mixers.common import CommonBlock, CommonBlockConfig
from surefoot.blocks.mixers.composite import CompositeState
from surefoot.blocks.mixers.mamba2 import Mamba2Config
from surefoot.blocks.mixers.side_by_side import SideBySideConfig
from surefoot.config import ConfigError
from surefoot.dist.pool import Pool
from surefoot.infer.states import narrow
from surefoot.models.count import build_meta, count_parameters
from surefoot.models.decoder import Decoder, DecoderConfig
from surefoot.ops.documents import Documents
from surefoot.parallel.plan import Plan
from surefoot.parallel.recompute import RecomputeConfig
from tests.parallel.parity import assert_same_as_one_process, decoder
from tests.redraw import redraw

WIDTH = 16
ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=4, qk_norm="none", rope="none")
COMMON = CommonBlockConfig(attention=ATTENTION, hidden=24, rank=3)
SPACE = Mamba2Config(num_heads=4, head_size=8, state_size=6, block=8)


def common(pattern: str = "amambm", **changes: Any) -> DecoderConfig:
    """Two blocks that take turns between layers of attention."""
    others = {letter: COMMON for letter in "ab" if letter in pattern}
    values = {"depth": len(pattern), "other_mixers": others, "mixer_pattern": pattern} | changes
    return decoder().model_copy(update=values)


def side_by_side() -> DecoderConfig:
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_size=4, rope_theta=20.0)
    return decoder().model_copy(update={"mixer": SideBySideConfig(mixers=(attention, SPACE), factors=(0.5, 2.0))})


def blocks_of(model: Decoder) -> list[CommonBlock]:
    return [mixer for mixer in model.mixers() if isinstance(mixer, CommonBlock)]


def test_layers_of_one_letter_have_one_block_and_their_own_adapters() -> None:
    model = redraw(common().build())
    first, second, other = blocks_of(model)
    assert first.common is second.common
    assert first.common is not other.common
    assert first.adapter is not second.adapter
    names = [name for name, _ in model.named_parameters() if "wq" in name and "common" in name]
    assert names == ["layers.0.mixer.common.attention.wq", "layers.4.mixer.common.attention.wq"]
    own = sum(weight.numel() for weight in first.parameters())
    shared = sum(weight.numel() for weight in first.common.parameters())
    less, more = (count_parameters(build_meta(common("am" * n)))["total"] for n in (1, 2))
    plain = sum(weight.numel() for name, weight in model.named_parameters() if name.startswith("layers.1."))
    norms = 2 * WIDTH + sum(
        weight.numel() for name, weight in model.named_parameters() if name.startswith("layers.0.ffn")
    )
    assert more - less == own - shared + plain + norms


def test_the_gradient_of_a_common_block_is_the_sum_over_its_layers() -> None:
    model = redraw(common("amam").build())
    apart = copy.deepcopy(model)
    second = blocks_of(apart)[1]
    second.common = copy.deepcopy(second.common)
    tokens, docs = torch.randint(61, (2, 20)), Documents(None, 20)
    for one in (model, apart):
        one.loss(tokens, tokens, docs)[0].backward()
    both = [dict(block.common.named_parameters()) for block in blocks_of(apart)]
    for name, weight in blocks_of(model)[0].common.named_parameters():
        found, parts = weight.grad, [own[name].grad for own in both]
        assert found is not None
        assert all(part is not None and part.abs().max() > 0 for part in parts)
        torch.testing.assert_close(found, parts[0] + parts[1], rtol=1e-10, atol=1e-12)


def test_it_is_zamba2s_block() -> None:
    """Against transformers, each use with its own adapter."""
    zamba = pytest.importorskip("transformers.models.zamba2")
    theirs_config = zamba.configuration_zamba2.Zamba2Config(
        hidden_size=WIDTH,
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
        num_attention_heads=4,
        intermediate_size=24,
        adapter_rank=3,
        rms_norm_eps=1e-5,
        attn_implementation="eager",
    )
    theirs = zamba.modeling_zamba2.Zamba2AttentionDecoderLayer(theirs_config, block_id=0).double()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3)
    head_size = 2 * WIDTH // 4
    described = COMMON.model_copy(update={"attention": ATTENTION.model_copy(update={"scale": (head_size / 2) ** -0.5})})
    model = redraw(common("mama", other_mixers={"a": described}).build())
    copied = dict(theirs.named_parameters())
    mask = torch.full((20, 20), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    x, embedded = torch.randn(2, 2, 20, WIDTH, dtype=torch.float64)
    for use, block in enumerate(blocks_of(model)):
        with torch.no_grad():
            for name in "qkvo":
                block.common.attention.get_parameter(f"w{name}").copy_(copied[f"self_attn.{name}_proj.weight"])
            block.common.norm_in.scale.copy_(copied["input_layernorm.weight"])
            block.common.norm_network.scale.copy_(copied["pre_ff_layernorm.weight"])
            gate, up = copied["feed_forward.gate_up_proj.weight"].chunk(2)
            block.common.network.w_gate.copy_(gate)
            block.common.network.w_up.copy_(up)
            block.common.network.w_down.copy_(copied["feed_forward.down_proj.weight"])
            adapter = f"feed_forward.gate_up_proj_adapter_list.{use}"
            block.adapter.get_parameter("w_in").copy_(copied[f"{adapter}.0.weight"])
            gate, up = copied[f"{adapter}.1.weight"].chunk(2)
            block.adapter.get_parameter("w_gate").copy_(gate)
            block.adapter.get_parameter("w_up").copy_(up)
        wanted = theirs(x, embedded, layer_idx=2 * use + 1, attention_mask=mask)
        wanted = wanted[0] if isinstance(wanted, tuple) else wanted
        found: Tensor = block.common(x, embedded, Documents(None, 20), None, block.adapter)
        torch.testing.assert_close(found, wanted, rtol=0, atol=5e-7)  # their norms and softmax are in fp32


def test_side_by_side_adds_what_each_finds_times_its_factor() -> None:
    mixer = redraw(side_by_side().mixer.build(width=WIDTH, output_scale=1.0))
    attention, space = mixer.mixers()
    x, docs = torch.randn(2, 12, WIDTH, dtype=torch.float64), Documents(None, 12)
    torch.testing.assert_close(mixer(x, docs), 0.5 * attention(x, docs) + 2.0 * space(x, docs))


def test_keys_inside_are_kept_narrow_too() -> None:
    model = redraw(side_by_side().build())
    states = model.new_states(1, 12, torch.float64)
    assert narrow(states, "int8") == model.config.depth
    assert all(isinstance(state, CompositeState) for state in states)


PLANS = [
    Plan(shard=4, zero=3),
    Plan(shard=4, zero=2),
    Plan(shard=2, zero=3, replicate=2),
    Plan(shard=2, zero=1, tensor=2),
    Plan(shard=2, zero=3, tensor=2),
    Plan(shard=2, zero=3, context=2, context_kind="ring"),
    Plan(tensor=2, context=2, context_kind="gather"),
    Plan(shard=2, zero=3, tensor=2, recompute=RecomputeConfig(mode="full")),
    Plan(shard=4, zero=3, reshard=2, recompute=RecomputeConfig(mode="selective", every=2)),
]


@pytest.mark.parametrize("plan", PLANS, ids=Plan.describe)
@pytest.mark.parametrize("config", [common("amambm"), side_by_side()], ids=["common", "side by side"])
def test_layouts_train_the_same_model(pool: Pool, plan: Plan, config: DecoderConfig) -> None:
    assert_same_as_one_process(pool, plan, config)


def test_a_short_model_still_uses_a_common_block_twice() -> None:
    short = common("amamam").in_short(1)
    assert short.mixer_pattern == "am"
    assert short.depth == 4


@pytest.mark.parametrize(
    ("field", "refused"),
    [
        ("attention.leaves", lambda: COMMON.model_copy(update={"attention": _validated(ATTENTION, leaves="keys")})),
        ("mixers", lambda: SideBySideConfig(mixers=(SPACE, COMMON))),
        ("mixers", lambda: SideBySideConfig(mixers=(SPACE, _validated(ATTENTION, reads="keys")))),
        ("factors", lambda: SideBySideConfig(mixers=(SPACE, ATTENTION), factors=(1.0,))),
        ("mixers", lambda: SideBySideConfig(mixers=tuple(_validated(ATTENTION, value_rows=n) for n in (5, 6)))),
        ("ahead_weight", lambda: DecoderConfig(**(dict(common("mama")) | {"ahead_weight": 0.1}))),
        ("width", lambda: DecoderConfig(**(dict(common()) | {"width": 15}))),
    ],
)
def test_what_cannot_be_is_refused(field: str, refused: Any) -> None:
    with pytest.raises((ConfigError, ValueError), match=field.rsplit(".", maxsplit=1)[-1]):
        _ = type(found)(**dict(found)) if isinstance(found := refused(), CommonBlockConfig) else found


def test_embeddings_must_be_there() -> None:
    block = redraw(COMMON.build(width=WIDTH, output_scale=1.0))
    with pytest.raises(ValueError, match=EMBEDDED):
        block(torch.zeros(1, 4, WIDTH, dtype=torch.float64), Documents(None, 4))


def _validated(config: AttentionConfig, **changes: Any) -> AttentionConfig:
    return AttentionConfig(**(dict(config) | changes))
