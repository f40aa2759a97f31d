"""Decays that are given by a head's number, and the recurrence written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from surefoot.blocks.mixers.retention import RetentionConfig
from surefoot.models.initialise import initialise
from surefoot.ops.documents import Documents


def test_decays_are_those_of_the_papers() -> None:
    retention = RetentionConfig(num_heads=3, decay="retention").log_decays()
    assert [math.exp(value) for value in retention] == pytest.approx([1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128], rel=1e-14)
    lightning = RetentionConfig(num_heads=8, slope_scale=0.5).log_decays()
    assert lightning == pytest.approx([-0.5 / 2**head for head in range(1, 9)], rel=1e-14)


def test_the_mixer_is_its_recurrence() -> None:
    config = RetentionConfig(num_heads=2, head_size=3, block=4)
    mixer = config.build(width=6, output_scale=1.0)
    initialise(mixer, 0)
    mixer.double()
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(0)).double()
    q, k, v = (F.silu(x @ weight.T).view(9, 2, 3) for weight in (mixer.w_q, mixer.w_k, mixer.w_v))
    state, y = torch.zeros(2, 3, 3).double(), []
    decay = torch.tensor(config.log_decays()).double().exp()
    for t in range(9):
        state = decay[:, None, None] * state + k[t, :, :, None] * v[t, :, None]
        out = (q[t, :, :, None] * state).sum(1)
        y.append(out * (out.square().mean(-1, keepdim=True) + config.norm_eps).rsqrt())
    wanted = (torch.stack(y).flatten(1) * (x @ mixer.w_z.T).sigmoid()) @ mixer.w_out.T
    assert torch.allclose(mixer(x[None], Documents(None, 9))[0], wanted, rtol=0, atol=1e-12)
