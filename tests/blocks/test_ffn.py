"""Feed-forward networks against their formulas written out, with gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from surefoot.blocks.ffn.glu import GLUConfig
from surefoot.blocks.ffn.mlp import MLPConfig
from surefoot.models.initialise import initialise

PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x * (x > 0),
    "relu2": lambda x: x * x * (x > 0),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "identity": lambda x: x,
}


def gradients(y: Tensor, x: Tensor, block: nn.Module) -> list[Tensor]:
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)
    return list(torch.autograd.grad((y * weights).sum(), [x, *block.parameters()]))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "identity"])
def test_gated(activation: str) -> None:
    block = GLUConfig(hidden=10, activation=activation).build(width=6, output_scale=0.7).double()
    initialise(block, 0)
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    wanted = (PLAIN[activation](x @ block.w_gate.t()) * (x @ block.w_up.t())) @ block.w_down.t()
    found = block(x)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-14)
    for ours, theirs in zip(gradients(found, x, block), gradients(wanted, x, block), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("activation", ["relu2", "relu", "gelu", "gelu_tanh", "silu"])
def test_without_a_gate(activation: str) -> None:
    block = MLPConfig(hidden=10, activation=activation).build(width=6, output_scale=0.7).double()
    initialise(block, 0)
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    wanted = PLAIN[activation](x @ block.w_up.t()) @ block.w_down.t()
    found = block(x)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-14)
    for ours, theirs in zip(gradients(found, x, block), gradients(wanted, x, block), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-13)
