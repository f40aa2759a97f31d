"""Weights and moments in bf16: what rounding loses, what stochastic rounding and compensation keep, and that layouts agree."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.dist.layout import Layout, Place
from surefoot.dist.mesh import Grid
from surefoot.optim.adamw import AdamWConfig
from surefoot.optim.base import Optimizer, OptimizerConfig, Param, Storage
from surefoot.optim.muon import MuonConfig
from surefoot.optim.narrow import random_bits, stochastically

MASK = (1 << 32) - 1


def plain_bits(first: int, second: int, place: int) -> int:
    """The hash, one place at a time, in Python's integers."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D & MASK
        x ^= x >> 15
        x = x * 0x846CA68B & MASK
        return x ^ x >> 16

    return mix(mix(place & MASK ^ first) ^ (mix(place >> 32) if place >> 32 else 0) ^ second)


def test_bits_are_those_of_a_plain_hash() -> None:
    import hashlib

    digest = hashlib.sha256(b"w/weight/3").digest()
    first, second = (int.from_bytes(digest[start : start + 4], "little") for start in (0, 4))
    places = torch.tensor([0, 1, 2, 77_777, (1 << 31) + 5, (1 << 32) + 1, (1 << 40) + 9])
    expected = [plain_bits(first, second, place) for place in places.tolist()]
    assert [bits & MASK for bits in random_bits("w/weight/3", places).tolist()] == expected
    # A place does not depend on its company: one beyond 2^32 is hashed by both halves.
    assert [bits & MASK for place in places for bits in random_bits("w/weight/3", place[None]).tolist()] == expected


def test_stochastic_rounding_is_unbiased_and_goes_to_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, generator=generator) * torch.logspace(-6, 6, 64)
    count = 1 << 14
    rounded = torch.stack(
        [stochastically(x, random_bits(f"w/{draw}", torch.arange(64))) for draw in range(count)]
    ).double()
    assert bool((rounded.to(torch.bfloat16).double() == rounded).all())
    step = torch.ldexp(torch.ones(64), torch.frexp(x).exponent - 8).double()
    assert bool(((rounded - x).abs() < step).all())
    # The mean of `count` draws between two neighbours: 5 standard deviations of the widest.
    assert bool(((rounded.mean(0) - x).abs() <= 5 * 0.5 * step / count**0.5).all())
    exact = x.to(torch.bfloat16).float()
    assert torch.equal(stochastically(exact, random_bits("w", torch.arange(64))), exact)


def weights(rounding: str, moments: torch.dtype | None = None, dtype: torch.dtype = torch.bfloat16) -> Param:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(48, 64, generator=generator).to(torch.bfloat16).to(dtype)
    return Param("w", start, ("ffn", "embed"), storage=Storage(rounding, moments))  # type: ignore[arg-type]


def gradient(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(48, 64, generator=generator) + torch.linspace(-2, 2, 64)


def train(config: OptimizerConfig, param: Param, steps: int = 200) -> Tensor:
    """Steps of about 2^-12 of a weight: far below half a unit of bf16."""
    param.tensor.grad_dtype = torch.float32 if param.tensor.dtype is not torch.float64 else None
    optimizer = config.build([param])
    for step in range(steps):
        param.tensor.grad = gradient(step)
        optimizer.step(1.0)
    return param.tensor.double()


CONFIGS = [AdamWConfig(lr=2**-12, weight_decay=0.1), MuonConfig(lr=2**-10, weight_decay=0.1)]


@pytest.mark.parametrize("config", CONFIGS, ids=["adamw", "muon"])
def test_kahan_follows_fp32_and_rounding_to_nearest_does_not(config: OptimizerConfig) -> None:
    start = weights("nearest").tensor.double().clone()
    exact = train(config, weights("nearest", dtype=torch.float32))
    moved = float((exact - start).norm())
    errors = {
        rounding: float((train(config, weights(rounding)) - exact).norm()) / moved
        for rounding in ("nearest", "stochastic", "kahan")
    }
    rounded = float((exact.to(torch.bfloat16).double() - exact).norm()) / moved
    assert errors["nearest"] > 0.4, errors  # most of the way is not gone at all
    assert errors["kahan"] < 1.2 * rounded, (errors, rounded)  # as near as bf16 numbers can be
    assert errors["kahan"] < errors["stochastic"] < 0.8 * errors["nearest"], errors


@pytest.mark.parametrize("config", CONFIGS, ids=["adamw", "muon"])
def test_stochastic_rounding_keeps_the_mean_of_updates(config: OptimizerConfig) -> None:
    """What single weights lose to noise, their sum does not: 3,072 equal ones move together as in fp32."""
    params = {}
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.ones(48, 64, dtype=dtype)
        tensor.grad_dtype = torch.float32
        params[dtype] = Param("w", tensor, ("ffn", "embed"), storage=Storage("stochastic"))
        optimizer = config.build([params[dtype]])
        for _ in range(50):
            tensor.grad = gradient(0)
            optimizer.step(1.0)
    exact, rounded = (params[dtype].tensor.double() for dtype in (torch.float32, torch.bfloat16))
    moved = (exact - 1).abs().mean()
    # Per column the mean of 48 weights, each off by at most sqrt(50) roundings of one unit.
    assert float((rounded - exact).mean().abs() / moved) < 0.1
    assert float((rounded - exact).abs().mean() / moved) > 0.1


@pytest.mark.parametrize("config", CONFIGS, ids=["adamw", "muon"])
def test_moments_in_bf16_are_near_those_in_fp32(config: OptimizerConfig) -> None:
    exact = train(config, weights("nearest", dtype=torch.float32), steps=40)
    narrow = weights("nearest", torch.bfloat16, torch.float32)
    optimizer = config.build([narrow])
    moments = {key: value for key, value in optimizer.state()["w"].items() if value.dim()}
    assert {value.dtype for value in moments.values()} == {torch.bfloat16}
    start = weights("nearest").tensor.double()
    found = train(config, weights("nearest", torch.bfloat16, torch.float32), steps=40)
    assert float((found - exact).norm() / (exact - start).norm()) < 0.02


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_parts_round_as_the_whole(rounding: str) -> None:
    """Cut in rows and in columns, also into parts of other sizes."""
    config = AdamWConfig(lr=2**-9)
    whole = weights(rounding, torch.bfloat16)
    train(config, whole, 5)
    for splits, grid in (
        (((0, "shard"),), {"shard": 5}),
        (((1, "tensor"), (0, "shard")), {"shard": 2, "tensor": 4}),
    ):
        layout = Layout((48, 64))
        for dim, axis in splits:
            layout = layout.split(dim, axis)
        for rank in range(Grid(grid).num_ranks):
            place = Place(layout, FakeMesh(Grid(grid), rank))  # type: ignore[arg-type]
            part = weights(rounding, torch.bfloat16)
            own = part.tensor[place.box.slices].clone()
            own.grad_dtype = torch.float32
            param = Param("w", own, part.axes, place, part.storage)
            optimizer = config.build([param])
            for step in range(5):
                own.grad = gradient(step)[place.box.slices].clone()
                optimizer.step(1.0)
            assert torch.equal(own, whole.tensor[place.box.slices]), (splits, rank)


class FakeMesh:
    """A rank's place in a grid, without process groups."""

    def __init__(self, grid: Grid, rank: int) -> None:
        self.grid, self.rank, self.coordinates = grid, rank, grid.coordinates(rank)


@pytest.mark.parametrize("config", CONFIGS, ids=["adamw", "muon"])
@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_goes_on_with_the_same_bits(config: OptimizerConfig, rounding: str) -> None:
    def steps(optimizer: Optimizer, param: Param, numbers: range) -> None:
        for step in numbers:
            param.tensor.grad = gradient(step)
            optimizer.step(1.0)

    params = [weights(rounding, torch.bfloat16) for _ in range(2)]
    for param in params:
        param.tensor.grad_dtype = torch.float32
    first = config.build([params[0]])
    steps(first, params[0], range(3))
    second = config.build([params[1]])
    params[1].tensor.copy_(params[0].tensor)
    second.restore({name: {key: value.clone() for key, value in held.items()} for name, held in first.state().items()})
    steps(first, params[0], range(3, 6))
    steps(second, params[1], range(3, 6))
    assert torch.equal(params[0].tensor, params[1].tensor)
    for key, value in first.state()["w"].items():
        assert torch.equal(value, second.state()["w"][key]), key


def test_two_steps_round_otherwise() -> None:
    """With one noise for all steps an entry would always be rounded the same way."""
    places = torch.arange(1000)
    first, second = (random_bits(f"w/weight/{count}", places) for count in (1, 2))
    assert float((first == second).double().mean()) < 0.01
    halves = (((first ^ second) & 0x8000) != 0).double().mean()
    assert 0.4 < float(halves) < 0.6
