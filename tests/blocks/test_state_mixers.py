"""Mixers with a state: causal, within documents, the same stepped or at once, counted right, and laid out right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from surefoot.blocks.base import Mixer, MixerConfig
from surefoot.blocks.mixers.delta_net import GatedDeltaNetConfig
from surefoot.blocks.mixers.kda import KDAConfig
from surefoot.blocks.mixers.mamba2 import Mamba2Config
from surefoot.blocks.mixers.retention import RetentionConfig
from surefoot.blocks.mixers.rwkv7 import RWKV7Config
from surefoot.blocks.mixers.short_conv import ShortConvConfig
from surefoot.config import ConfigError
from surefoot.dist.pool import Pool
from surefoot.infer.states import stored_bytes
from surefoot.models.initialise import generator_for, initialise, named_weights
from surefoot.ops.documents import Documents
from surefoot.parallel.apply import check
from surefoot.parallel.plan import Plan
from tests.parallel.parity import LENGTH, assert_same_as_one_process, decoder

WIDTH = 16
MIXERS: dict[str, MixerConfig] = {
    "mamba2": Mamba2Config(num_heads=4, head_size=4, state_size=5, block=8),
    "mamba2-groups": Mamba2Config(
        num_heads=4,
        head_size=6,
        state_size=3,
        num_groups=2,
        norm_groups=2,
        conv_bias=False,
        block=7,
        dt_limit=(0.01, 0.5),
    ),
    "gdn": GatedDeltaNetConfig(num_heads=4, key_size=3, value_size=5, block=8),
    "gdn-groups": GatedDeltaNetConfig(
        num_heads=4, num_key_heads=2, key_size=4, value_size=3, conv_size=3, eigenvalues="signed", block=4
    ),
    "kda": KDAConfig(num_heads=4, key_size=3, value_size=4, rank=5, block=8),
    "rwkv7": RWKV7Config(num_heads=4, head_size=4, rank=3, gate_rank=5, block=8),
    "short-conv": ShortConvConfig(channels=12, conv_bias=True),
    "lightning": RetentionConfig(num_heads=4, head_size=4, slope_scale=0.2, block=8),
    "retention": RetentionConfig(num_heads=2, head_size=5, decay="retention", activation="none", block=7),
}


def built(config: MixerConfig) -> Mixer:
    """In fp64, everything drawn anew; small decays, so that states last."""
    mixer = config.build(width=WIDTH, output_scale=1.0).double()
    with torch.no_grad():
        for full_name, block, name in named_weights(mixer):
            weight = getattr(block, name)
            noise = torch.randn(weight.shape, generator=generator_for(0, full_name)).double()
            weight.copy_(1 + 0.3 * noise if "scale" in name else noise * weight.shape[-1] ** -0.5)
            if name in {"log_a", "dt_bias"}:
                weight.copy_(noise - 2)
    return mixer


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


mixers = pytest.mark.parametrize("config", MIXERS.values(), ids=MIXERS.keys())


@mixers
def test_nothing_is_seen_ahead_or_across_documents(config: MixerConfig) -> None:
    mixer, x = built(config), draw(2, 30, WIDTH)
    docs = Documents(torch.tensor([[0] * 11 + [1] * 19, [0] * 30]), 30)
    before = mixer(x, docs)
    changed = x.clone()
    changed[:, 20:] += 1
    after = mixer(changed, docs)
    assert torch.allclose(after[:, :20], before[:, :20], rtol=0, atol=1e-13)
    assert (after[:, 20:] - before[:, 20:]).abs().amax() > 1e-3
    changed = x.clone()
    changed[:, :11] += 1
    after = mixer(changed, docs)
    assert torch.allclose(after[0, 11:], before[0, 11:], rtol=0, atol=1e-13)
    reach = 11 + mixer.least_run if isinstance(config, ShortConvConfig) else 30
    assert (after[1, 11:reach] - before[1, 11:reach]).abs().amax(-1).min() > 1e-5, (
        "the row of one document has to see it"
    )


@mixers
@pytest.mark.parametrize("cuts", [(1,), (20,), (1, 2, 3, 4), (7, 8, 29)], ids=str)
def test_stepping_equals_one_pass(config: MixerConfig, cuts: tuple[int, ...]) -> None:
    mixer, x, length = built(config), draw(2, 30, WIDTH), 30
    whole, state, parts = mixer(x, Documents(None, length)), mixer.new_state(2, length, torch.float64), []
    for start, stop in zip((0, *cuts), (*cuts, length), strict=True):
        parts.append(mixer(x[:, start:stop], Documents(None, stop - start, start=start), state))
        assert state.length == stop
    assert torch.allclose(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)


@mixers
def test_a_packed_document_equals_the_document_alone(config: MixerConfig) -> None:
    mixer, x = built(config), draw(1, 24, WIDTH)
    packed = mixer(x, Documents(torch.tensor([[0] * 5 + [1] * 12 + [2] * 7]), 24))
    for start, stop in ((0, 5), (5, 17), (17, 24)):
        alone = mixer(x[:, start:stop], Documents(None, stop - start))
        assert torch.allclose(packed[:, start:stop], alone, rtol=0, atol=1e-12)


@mixers
def test_flops_and_bytes_are_those_measured(config: MixerConfig) -> None:
    mixer = config.build(width=WIDTH, output_scale=1.0)
    initialise(mixer, 0)
    for length in (5, 24, 37):
        with FlopCounterMode(display=False) as counter:
            mixer(torch.randn(3, length, WIDTH), Documents(None, length))
        assert counter.get_total_flops() == pytest.approx(3 * length * mixer.flops(length, causal=False), rel=1e-12)
        masked = mixer.flops(length, causal=False) - mixer.flops(length, causal=True)
        assert masked == 0 if isinstance(config, ShortConvConfig) else masked > 0
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert stored_bytes(mixer.new_state(1, 40, dtype)) == mixer.state_bytes(40, dtype)


@mixers
def test_bf16_keeps_what_has_to_be_wide(config: MixerConfig) -> None:
    mixer = config.build(width=WIDTH, output_scale=1.0)
    initialise(mixer, 0)
    x, docs = torch.randn(2, 40, WIDTH, generator=torch.Generator().manual_seed(0)), Documents(None, 40)
    narrow = mixer(x.bfloat16(), docs)
    assert narrow.dtype is torch.bfloat16
    narrow.sum().backward()
    assert all(weight.grad is not None and weight.grad.dtype is torch.float32 for weight in mixer.parameters())
    wide = mixer(x, docs).detach()
    assert float((narrow.detach().float() - wide).norm() / wide.norm()) < 0.02


PLANS = [
    Plan(shard=2, zero=3),
    Plan(tensor=2),
    Plan(context=2),
    Plan(context=4),
    Plan(pipeline=2, schedule="interleaved"),
    Plan(context=2, tensor=2, shard=2, zero=2),
    Plan(context=2, pipeline=2, schedule="1f1b", context_kind="ring"),
]


@mixers
@pytest.mark.parametrize("plan", PLANS, ids=Plan.describe)
def test_a_hybrid_is_laid_out_right(pool: Pool, plan: Plan, config: MixerConfig) -> None:
    base: dict[str, Any] = dict(decoder())
    hybrid = type(decoder())(**(base | {"other_mixers": {"s": config}, "mixer_pattern": "sm"}))
    assert_same_as_one_process(pool, plan, hybrid, num_micro=4 if plan.pipeline > 1 else 2)


def test_what_cannot_be_cut_is_refused() -> None:
    base: dict[str, Any] = dict(decoder())

    def model(mixer: MixerConfig) -> Any:
        return type(decoder())(**(base | {"mixer": mixer}))

    one_norm = Mamba2Config(num_heads=4, head_size=4, state_size=5, norm_groups=1)
    with pytest.raises(ConfigError, match=r"plan.tensor: 2: must divide 1 norm_heads of layers.0.mixer.norm"):
        check(Plan(tensor=2), model(one_norm), LENGTH)
    long_taps = Mamba2Config(num_heads=4, head_size=4, state_size=5, conv_size=16)
    with pytest.raises(ConfigError, match=r"chunks of 12 positions, and layers\.0\.mixer needs 15"):
        check(Plan(context=2), model(long_taps), LENGTH)
    with pytest.raises(ConfigError, match="num_groups: 3: must divide num_heads 4"):
        Mamba2Config(num_heads=4, num_groups=3)


def test_delta_blocks_that_cannot_be_halved_are_refused() -> None:
    for mixer in (GatedDeltaNetConfig, KDAConfig, RWKV7Config):
        with pytest.raises(ConfigError, match="block: 48: must be a power of two; the next is 64"):
            mixer(num_heads=4, block=48)
    with pytest.raises(ConfigError, match="num_key_heads: 3: must divide num_heads 4"):
        GatedDeltaNetConfig(num_heads=4, num_key_heads=3)
