"""RWKV-7's channel mixing: by hand, against the PyPI package `rwkv` where it is installed, in layers of its own, in layouts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.blocks.mixers.channel_mix import ChannelMix, ChannelMixConfig
from surefoot.blocks.mixers.rwkv7 import RWKV7Config
from surefoot.dist.pool import Pool
from surefoot.infer.states import stored_bytes
from surefoot.models.decoder import DecoderConfig
from surefoot.ops.documents import Documents
from surefoot.parallel.plan import Plan
from tests.parallel.parity import assert_same_as_one_process, decoder
from tests.redraw import redraw

WIDTH, LENGTH = 16, 14


def built() -> ChannelMix:
    """fp64, and every weight drawn."""
    mixer = redraw(ChannelMixConfig(hidden=24).build(width=WIDTH, output_scale=1.0))
    assert not mixer.mix.eq(0.5).any()
    return mixer


def x(batch: int = 2) -> Tensor:
    return torch.randn(batch, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).double()


def by_hand(mixer: ChannelMix, inputs: Tensor, starts: list[int]) -> Tensor:
    """One position after the other."""
    rows = []
    for row in inputs:
        outputs = []
        for place, token in enumerate(row):
            before = torch.zeros_like(token) if place in starts else row[place - 1]
            mixed = token + mixer.mix * (before - token)
            outputs.append(mixer.w_v @ (mixer.w_k @ mixed).clamp_min(0).square())
        rows.append(torch.stack(outputs))
    return torch.stack(rows)


def test_it_is_what_the_paper_says() -> None:
    mixer, inputs = built(), x()
    ids_BL = torch.tensor([[0] * 5 + [1] + [2] * 8] * 2)
    found, expected = mixer(inputs, Documents(ids_BL, LENGTH)), by_hand(mixer, inputs, [0, 5, 6])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = list(mixer.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(found.square().sum(), weights),
        torch.autograd.grad(expected.square().sum(), weights),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_it_equals_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}.items():
        monkeypatch.setenv(name, value)
    model = pytest.importorskip("rwkv.model")
    mixer, inputs = built().float(), x(1).float()
    with torch.no_grad():
        expected, _ = model.RWKV_x070_CMix_seq(inputs[0], torch.zeros(WIDTH), mixer.mix, mixer.w_k.t(), mixer.w_v.t())
        torch.testing.assert_close(mixer(inputs, Documents(None, LENGTH))[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cuts", [(1,) * LENGTH, (9, 1, 4), (1, 13)])
@torch.no_grad()
def test_stepping_equals_one_pass(cuts: tuple[int, ...]) -> None:
    mixer, inputs = built(), x()
    state, parts = mixer.new_state(2, LENGTH, torch.float64), []
    for piece in inputs.split(cuts, 1):
        parts.append(mixer(piece, Documents(None, piece.shape[1], start=state.length), state))
    torch.testing.assert_close(torch.cat(parts, 1), mixer(inputs, Documents(None, LENGTH)), rtol=0, atol=1e-12)
    assert stored_bytes(state) == 2 * mixer.state_bytes(LENGTH, torch.float64) == 2 * WIDTH * 8


def rwkv() -> DecoderConfig:
    """Time and channel mixing in turn, and no other network."""
    time = RWKV7Config(num_heads=4, head_size=4, rank=4, gate_rank=4, block=4)
    changes = {
        "mixer": time,
        "other_mixers": {"c": ChannelMixConfig(hidden=24)},
        "mixer_pattern": "mc",
        "ffn": None,
        "ffn_pattern": "-",
    }
    return DecoderConfig(**(dict(decoder(depth=4)) | changes))


@pytest.mark.parametrize(
    "plan",
    [Plan(tensor=2), Plan(shard=2, zero=3), Plan(context=2), Plan(pipeline=2)],
    ids=Plan.describe,
)
def test_gradients_are_those_of_one_process(pool: Pool, plan: Plan) -> None:
    assert_same_as_one_process(pool, plan, rwkv(), num_micro=2)
