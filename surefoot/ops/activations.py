"""Elementwise activations by the name that a configuration gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)² (So et al., 2021)."""
    return F.relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU (Hendrycks and Gimpel, 2016)."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x), the approximation of GELU (Hendrycks and Gimpel, 2016) that CLIP uses."""
    return x * torch.sigmoid(1.702 * x)


def identity(x: Tensor) -> Tensor:
    """x itself."""
    return x


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": relu2,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "identity": identity,
}
