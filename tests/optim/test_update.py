"""The update meter against the full ratio, and that it only reads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.optim.base import Param
from surefoot.optim.update import UpdateMeter, _sample


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_params() -> list[Param]:
    return [
        Param("embedding", draw(50, 8, seed=0), ("vocab", "embed")),
        Param("up", draw(24, 8, seed=1), ("ffn", "embed")),
        Param("down", 5 * draw(8, 40, seed=2), ("embed", "ffn")),
        Param("norm", 1 + draw(8, seed=3), ("embed",)),
    ]


def move(params: list[Param]) -> None:
    for index, param in enumerate(params):
        param.tensor.add_(draw(*param.tensor.shape, seed=100 + index), alpha=0.01 * (index + 1))


def full_ratios(before: list[Tensor], params: list[Param]) -> dict[str, float]:
    ratios = {}
    for role in {param.role for param in params}:
        pairs = [(old, param.tensor) for old, param in zip(before, params, strict=True) if param.role == role]
        update = torch.cat([(new - old).flatten() for old, new in pairs])
        ratios[role] = (
            (update.square().mean() / torch.cat([new.flatten() for _, new in pairs]).square().mean()).sqrt().item()
        )
    return ratios


@pytest.mark.parametrize(("num_entries", "tolerance"), [(65_536, 1e-5), (100, 0.2)])
def test_equals_the_full_ratio(num_entries: int, tolerance: float) -> None:
    params = make_params()
    meter = UpdateMeter(params, num_entries)
    for _ in range(2):
        before = [param.tensor.clone() for param in params]
        meter.before()
        move(params)
        assert meter.after() == pytest.approx(full_ratios(before, params), rel=tolerance)


def test_a_large_weight_counts_for_its_full_size() -> None:
    """A sampled weight stands for all its entries beside a small one that is seen whole."""
    params = [Param("large", torch.ones(100, 100), ("out", "in")), Param("small", torch.ones(10, 10), ("out", "in"))]
    meter = UpdateMeter(params, num_entries=100)
    meter.before()
    params[0].tensor.add_(1.0)
    assert meter.after()["matrix"] == pytest.approx((10_000 / 40_100) ** 0.5, rel=1e-6)


def test_reads_only() -> None:
    params = make_params()
    versions, values = [param.tensor._version for param in params], [param.tensor.clone() for param in params]
    state = torch.get_rng_state()
    meter = UpdateMeter(params)
    meter.before()
    assert meter.after() == {"matrix": 0.0, "vocabulary": 0.0, "vector": 0.0}
    assert [param.tensor._version for param in params] == versions
    assert all(torch.equal(param.tensor, value) for param, value in zip(params, values, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_that_start_at_zero() -> None:
    param = Param("w", torch.zeros(4, 4), ("out", "in"))
    meter = UpdateMeter([param])
    meter.before()
    assert meter.after() == {"matrix": 0.0}
    meter.before()
    param.tensor.add_(0.5)
    assert meter.after() == {"matrix": 1.0}


@pytest.mark.parametrize("shape", [(64, 64), (64, 48), (30, 30), (8, 16, 32)])
def test_the_sample_sees_every_column(shape: tuple[int, ...]) -> None:
    """A stride that divides the row length would read a few columns only."""
    columns = torch.arange(shape[-1]).expand(shape).contiguous()
    for num_entries in (1000, 500, 300, 128):
        sample = _sample(columns, num_entries)
        assert len(sample) <= num_entries
        assert len(set(sample.tolist())) == min(shape[-1], len(sample))


def test_needs_a_before() -> None:
    with pytest.raises(RuntimeError, match="needs a call of before"):
        UpdateMeter(make_params()).after()
