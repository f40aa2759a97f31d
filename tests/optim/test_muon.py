"""Muon against the singular value decomposition and against a slow reference that takes one matrix at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.config import ConfigError
from surefoot.optim import muon
from surefoot.optim.base import Param
from surefoot.optim.muon import MuonConfig, orthogonalise

A, B, C = 3.4445, -4.7750, 2.0315


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def plain_orthogonalise(matrix: Tensor, num_iterations: int = 5) -> Tensor:
    """Newton-Schulz of one matrix of any orientation, spelled out: no transposition, no Gram shortcut."""
    x = matrix / matrix.square().sum().sqrt()
    for _ in range(num_iterations):
        x = A * x + B * x @ x.T @ x + C * x @ x.T @ x @ x.T @ x
    return x


def plain_muon(
    weight: Tensor, gradients: list[Tensor], lrs: list[float], momentum: float, decay: float, size: float
) -> Tensor:
    """Jordan et al. (2024) for one matrix, with decoupled weight decay (Liu et al., 2025)."""
    velocity = torch.zeros_like(weight)
    for gradient, lr in zip(gradients, lrs, strict=True):
        velocity = momentum * velocity + gradient
        update = plain_orthogonalise(gradient + momentum * velocity)
        weight = weight - lr * decay * weight - lr * size * update
    return weight


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (8, 10), (8, 24), (1, 5)])
def test_equals_the_slow_iteration(rows: int, columns: int) -> None:
    stack = draw(3, rows, columns)
    for matrix, found in zip(stack, orthogonalise(stack), strict=True):
        torch.testing.assert_close(found, plain_orthogonalise(matrix), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("rows", "columns"), [(32, 32), (32, 40), (32, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_is_near_the_polar_factor(rows: int, columns: int, dtype: torch.dtype) -> None:
    matrix = draw(rows, columns)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    # A spectrum of condition 20: every singular value is within what five iterations reach.
    matrix = left * torch.logspace(0, -1.3, rows, dtype=torch.float64) @ right
    found = orthogonalise(matrix[None].to(dtype))[0].double()
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.65
    assert values.max() < 1.25
    # The singular vectors are kept: U' X V is diagonal.
    inside = left.T @ found @ right.T
    assert (inside - inside.diagonal().diag()).abs().max() < (1e-12 if dtype is torch.float64 else 2e-2)
    assert torch.linalg.matrix_norm(found - left @ right, 2) < 0.35


def test_more_iterations_of_a_convergent_step_find_the_polar_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Newton-Schulz's own coefficients (15, -10, 3)/8 the same code converges to U V' exactly, on both paths."""
    monkeypatch.setattr(muon, "COEFFICIENTS", (15 / 8, -10 / 8, 3 / 8))
    for rows, columns in ((6, 7), (6, 20)):
        matrix = draw(rows, columns, seed=3)
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        torch.testing.assert_close(orthogonalise(matrix[None], 20)[0], left @ right, rtol=0, atol=1e-11)


def test_gram_path_in_fp32_on_a_hard_spectrum() -> None:
    left, _, right = torch.linalg.svd(draw(64, 192), full_matrices=False)
    for decades in (2, 6, 12):
        matrix = left * torch.logspace(0, -decades, 64, dtype=torch.float64) @ right
        expected = plain_orthogonalise(matrix)
        found = orthogonalise(matrix[None].float())[0].double()
        # 4e-4 measured; bf16, where machines use it, is 0.1 to 0.2 away on the same spectra.
        limit = 0.3 if muon._compute_dtype(matrix.float()) is torch.bfloat16 else 2e-3
        assert (found - expected).norm() / expected.norm() < limit


def test_bf16_comes_near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "_compute_dtype", lambda _: torch.bfloat16)
    matrix = draw(16, 48, dtype=torch.float32)
    found = orthogonalise(matrix[None])[0]
    assert found.dtype is torch.bfloat16
    assert (found.double() - plain_orthogonalise(matrix.double())).norm() < 0.05 * 16**0.5


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-10, 1e15])
def test_any_size_of_gradient(scale: float) -> None:
    """Bounded always; and down to 1e-10 the update's size does not depend on the gradient's."""
    found = orthogonalise((draw(2, 8, 24) * scale).float())
    assert found.isfinite().all()
    assert torch.linalg.matrix_norm(found.double(), 2).max() < 1.3
    if scale >= 1e-10:
        torch.testing.assert_close(found.double(), orthogonalise(draw(2, 8, 24)), rtol=0, atol=0.02)
    if scale == 0:
        assert not found.any()


SHAPES = {
    "square": (6, 6),
    "square_2": (6, 6),
    "wide": (6, 9),
    "tall": (9, 6),
    "wide_3": (4, 12),
    "tall_3": (12, 4),
}
SIZES = {
    "update_rms": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
    "spectral": lambda rows, columns: (rows / columns) ** 0.5,
}


@pytest.mark.parametrize("scaling", SIZES)
def test_equals_the_slow_optimizer(scaling: str) -> None:
    params = [Param(name, draw(*shape, seed=i), ("out", "in")) for i, (name, shape) in enumerate(SHAPES.items())]
    params.append(Param("experts", draw(3, 12, 4, seed=50), ("experts", "ffn", "embed")))
    starts = {param.name: param.tensor.clone() for param in params}
    optimizer = MuonConfig(lr=0.02, momentum=0.9, weight_decay=0.3, scaling=scaling).build(params)
    history: list[dict[str, Tensor]] = []
    scales = [1.0, 0.5, 0.25]
    for step, scale in enumerate(scales):
        for index, param in enumerate(params):
            param.tensor.grad = draw(*param.tensor.shape, seed=100 * step + index)
        history.append({param.name: param.tensor.grad.clone() for param in params})  # type: ignore[union-attr]
        optimizer.step(scale)
    lrs = [0.02 * scale for scale in scales]
    for param in params:
        gradients = [row[param.name] for row in history]
        size = SIZES[scaling](*param.tensor.shape[-2:])
        if param.name == "experts":
            expected = torch.stack(
                [plain_muon(starts["experts"][e], [g[e] for g in gradients], lrs, 0.9, 0.3, size) for e in range(3)]
            )
        else:
            expected = plain_muon(starts[param.name], gradients, lrs, 0.9, 0.3, size)
        torch.testing.assert_close(param.tensor, expected, rtol=0, atol=1e-12, msg=param.name)


def test_stacking_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Tensor]:
        params = [Param(str(i), draw(6, 9, seed=i), ("out", "in")) for i in range(5)]
        params += [Param(f"tall{i}", draw(9, 6, seed=9 + i), ("out", "in")) for i in range(2)]
        optimizer = MuonConfig(lr=0.1).build(params)
        for step in range(2):
            for index, param in enumerate(params):
                param.tensor.grad = draw(*param.tensor.shape, seed=100 * step + index)
            optimizer.step(1.0)
        return [param.tensor for param in params]

    together = run()
    monkeypatch.setattr(muon, "_CPU_STACK_ELEMENTS", 1)
    for left, right in zip(together, run(), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


def test_stacks_are_bounded_and_hold_every_matrix_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "_CPU_STACK_ELEMENTS", 2 * 54)
    params = [Param(str(i), torch.zeros((6, 9) if i % 2 else (9, 6)), ("out", "in")) for i in range(5)]
    params.append(Param("large", torch.zeros(40, 40), ("out", "in")))
    stacks = MuonConfig().build(params)._stacks
    assert sorted(len(stack) for stack in stacks) == [1, 1, 2, 2]
    assert sorted(slot.param.name for stack in stacks for slot in stack) == ["0", "1", "2", "3", "4", "large"]


def test_update_rms_is_adam_like() -> None:
    for shape in ((64, 64), (32, 96), (96, 32)):
        weight = Param("w", torch.zeros(shape, dtype=torch.float64), ("out", "in"))
        optimizer = MuonConfig(lr=1.0, weight_decay=0.0).build([weight])
        weight.tensor.grad = draw(*shape)
        optimizer.step(1.0)
        assert 0.15 < weight.tensor.square().mean().sqrt().item() < 0.25


def test_weights_that_are_no_matrix_are_refused() -> None:
    for shape, axes in (((2, 3, 4), ("channels", "kernel", "embed")), ((2, 2, 3, 4), ("experts", "a", "b", "c"))):
        with pytest.raises(ConfigError, match="use AdamW") as caught:
            MuonConfig().build([Param("odd", torch.zeros(shape), axes)])
        assert caught.value.value == "odd"


def test_learns_a_linear_map() -> None:
    target, inputs = draw(8, 12, seed=1), draw(64, 12, seed=2)
    weight = torch.nn.Parameter(torch.zeros(8, 12, dtype=torch.float64))
    optimizer = MuonConfig(lr=0.3, weight_decay=0.0).build([Param("w", weight, ("out", "in"))])
    losses = []
    # Singular values move by at most 0.3 * 0.2 sqrt(12) a step: 200 decaying steps go 21, the target's norm is about 6.
    for step in range(200):
        optimizer.zero_grad()
        loss = (inputs @ (weight - target).T).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step(1 - step / 200)
    assert losses[-1] < 1e-3 * losses[0]
