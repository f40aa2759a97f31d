"""The norm and the clip on known numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from surefoot.optim.base import Param, gradients_of
from surefoot.optim.clip import clip_, gradient_norm


def test_known_numbers() -> None:
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([[0.0], [4.0]]), torch.tensor(12.0)]
    norm = gradient_norm(gradients)
    assert norm.item() == 13.0
    assert clip_(gradients, norm, 6.5) == 0.5
    assert [gradient.tolist() for gradient in gradients] == [[1.5, 0.0], [[0.0], [2.0]], 6.0]
    assert gradient_norm(gradients).item() == 6.5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_equals_numpy(dtype: torch.dtype, tolerance: float) -> None:
    random = np.random.default_rng(0)
    arrays = [random.normal(size=shape) for shape in ((40, 30), (7,), (3, 5, 2))]
    gradients = [torch.tensor(array, dtype=dtype) for array in arrays]
    expected = np.sqrt(sum((array**2).sum() for array in arrays))
    norm = gradient_norm(gradients)
    assert norm.shape == ()
    assert norm.dtype is dtype
    assert norm.item() == pytest.approx(expected, rel=tolerance)
    coefficient = clip_(gradients, norm, 2.0)
    assert coefficient == pytest.approx(2.0 / expected, rel=tolerance)
    for gradient, array in zip(gradients, arrays, strict=True):
        np.testing.assert_allclose(gradient.numpy(), array * 2.0 / expected, rtol=10 * tolerance)


def test_bf16_is_summed_in_fp32() -> None:
    gradients = [torch.ones(100, 100, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)]
    norm = gradient_norm(gradients)
    assert norm.dtype is torch.float32
    assert norm.item() == pytest.approx(math.sqrt(10001), rel=1e-6)


def test_a_norm_within_bounds_writes_nothing() -> None:
    gradient = torch.tensor([3.0, 4.0])
    version = gradient._version
    assert clip_([gradient], gradient_norm([gradient]), 5.0) == 1.0
    assert gradient._version == version


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_scale_nothing(bad: float) -> None:
    gradients = [torch.tensor([3.0, bad]), torch.tensor([4.0])]
    norm = gradient_norm(gradients)
    assert math.isnan(norm.item()) if math.isnan(bad) else norm.item() == math.inf
    assert clip_(gradients, norm, 1.0) == 1.0
    assert gradients[0][0].item() == 3.0
    assert gradients[1].item() == 4.0


def test_nothing_has_norm_zero() -> None:
    assert gradient_norm([]).item() == 0.0
    assert clip_([], gradient_norm([]), 1.0) == 1.0


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_a_bound_that_bounds_nothing_is_an_error(max_norm: float) -> None:
    with pytest.raises(ValueError, match="not positive"):
        clip_([], torch.zeros(()), max_norm)


def test_gradients_are_those_there_are() -> None:
    params = [Param(name, torch.zeros(2), ("embed",)) for name in "abc"]
    params[0].tensor.grad, params[2].tensor.grad = torch.ones(2), torch.full((2,), 2.0)
    assert [gradient.tolist() for gradient in gradients_of(params)] == [[1.0, 1.0], [2.0, 2.0]]
