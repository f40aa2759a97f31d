"""Quantised values against a search through every value of a format, in plain Python."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from surefoot.precision.formats import (
    E2M1,
    E4M3,
    E5M2,
    Format,
    Tile,
    amax_of,
    quantise,
    scale_in_two_levels,
    scale_of,
)

BITS = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m1": (2, 1, 1)}
TILES = [Tile(None, None), Tile(1, None), Tile(None, 1), Tile(1, 4), Tile(4, 1), Tile(4, 4), Tile(3, 5)]


def grid(form: Format) -> list[tuple[Fraction, int]]:
    """Every value of the format that is not negative, and its mantissa, from the definition of its bits."""
    num_exponent_bits, num_mantissa_bits, bias = BITS[form.name]
    found = []
    for exponent in range(2**num_exponent_bits):
        for mantissa in range(2**num_mantissa_bits):
            part = Fraction(mantissa, 2**num_mantissa_bits)
            value = part * Fraction(2) ** (1 - bias) if exponent == 0 else (1 + part) * Fraction(2) ** (exponent - bias)
            if value <= Fraction(form.largest):
                found.append((value, mantissa))
    return found


def rounded(x: float, form: Format) -> float:
    """To nearest, of two the one with an even mantissa; saturating."""
    size = abs(Fraction(x))
    nearest = min(abs(size - value) for value, _ in grid(form))
    value = min((mantissa % 2, value) for value, mantissa in grid(form) if abs(size - value) == nearest)[1]
    return math.copysign(float(value), x)


def slow(x_RC: Tensor, tile: Tile, form: Format, *, two_levels: bool = False) -> Tensor:
    """Tile by tile, entry by entry."""
    rows, columns = tile.rows or x_RC.shape[0], tile.columns or x_RC.shape[1]
    y_RC = torch.empty_like(x_RC)
    whole = float(x_RC.abs().max())
    for top in range(0, x_RC.shape[0], rows):
        for left in range(0, x_RC.shape[1], columns):
            part = x_RC[top : top + rows, left : left + columns]
            amax = float(part.abs().max())
            scale = slow_scale(amax, form.largest)
            if two_levels:
                unit = slow_scale(float(torch.tensor(whole) / form.largest), 448.0)
                stored = rounded(float(torch.tensor(amax) / form.largest) / unit, E4M3)
                scale = max(stored, 2.0**-9) * unit
            for i, row in enumerate(part):
                for j, value in enumerate(row):
                    units = float(torch.tensor(float(value)) / torch.tensor(scale))
                    y_RC[top + i, left + j] = rounded(units, form) * scale
    return y_RC


def slow_scale(amax: float, largest: float) -> float:
    """The least power of two under which `amax` fits, tried one after another."""
    exponent = -126
    while Fraction(amax) > Fraction(largest) * Fraction(2) ** exponent:
        exponent += 1
    return 2.0**exponent


def fast(x_RC: Tensor, tile: Tile, form: Format) -> Tensor:
    scale = scale_of(amax_of(x_RC, tile), form.largest)
    return quantise(x_RC, scale, tile, form, x_RC.dtype, can_saturate=True).values


def wide(*shape: int, seed: int = 0) -> Tensor:
    """Magnitudes over 16 powers of two."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp2(16 * torch.rand(shape, generator=generator) - 8)


@pytest.mark.parametrize("form", [E4M3, E5M2, E2M1], ids=lambda form: form.name)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_values_are_those_of_a_search(form: Format, tile: Tile) -> None:
    x_RC = wide(9, 13)
    x_RC[2] = 0
    assert torch.equal(fast(x_RC, tile, form), slow(x_RC, tile, form))


@pytest.mark.parametrize("form", [E4M3, E5M2, E2M1], ids=lambda form: form.name)
def test_ties_go_to_the_even_mantissa_and_the_grid_stays(form: Format) -> None:
    values = [float(value) for value, _ in grid(form)]
    middles = [(low + high) / 2 for low, high in itertools.pairwise(values)]
    x_1C = torch.tensor([[*values, *middles, *(-x for x in middles)]])
    ones = torch.ones(1, 1)
    found = quantise(x_1C, ones, Tile(None, None), form, torch.float32, can_saturate=True)
    assert torch.equal(found.values, torch.tensor([[rounded(x, form) for x in x_1C[0].tolist()]]))
    assert found.saturated == 0


def test_scales_of_two_levels_are_those_of_a_search() -> None:
    x_RC = wide(5, 48)
    x_RC[:, :32] *= 2**-9
    tile = Tile(1, 16)
    amax = amax_of(x_RC, tile)
    scale = scale_in_two_levels(amax, amax.amax((-2, -1), keepdim=True), E2M1)
    found = quantise(x_RC, scale, tile, E2M1, torch.float32, can_saturate=True)
    assert torch.equal(found.values, slow(x_RC, tile, E2M1, two_levels=True))
    assert found.saturated == 0


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
def test_scales_are_what_e8m0_holds_and_the_least_that_fit(form: Format) -> None:
    boundary = torch.exp2(torch.arange(-60.0, 60.0)) * form.largest
    amax = torch.cat([boundary, torch.nextafter(boundary, torch.tensor(math.inf)), wide(200).abs()])
    scale = scale_of(amax, form.largest)
    assert torch.equal(scale.to(torch.float8_e8m0fnu).float(), scale)
    assert bool((amax <= scale * form.largest).all())
    assert bool((amax > scale * form.largest / 2).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("form", [E4M3, E5M2, E2M1], ids=lambda form: form.name)
def test_quantised_values_are_exact_in_every_compute_dtype(form: Format, dtype: torch.dtype) -> None:
    x_RC = wide(8, 64).bfloat16()
    expected = fast(x_RC.float(), Tile(1, 32), form)
    assert torch.equal(fast(x_RC.to(dtype), Tile(1, 32), form).float(), expected)


def test_fp8_is_torchs_own_cast() -> None:
    x_RC = wide(32, 32)
    for form in (E4M3, E5M2):
        scale = scale_of(amax_of(x_RC, Tile(1, 8)), form.largest).repeat_interleave(8, 1)
        assert form.dtype is not None
        assert torch.equal(fast(x_RC, Tile(1, 8), form), (x_RC / scale).to(form.dtype).float() * scale)


def test_what_saturates_and_vanishes_is_counted_and_stays_finite() -> None:
    x_RC = torch.ones(4, 8)
    x_RC[0, 0], x_RC[1, :4] = 1e6, 1e-6
    scale = torch.full((1, 1), 2**-3)
    found = quantise(x_RC, scale, Tile(None, None), E4M3, torch.float32, can_saturate=True)
    assert (found.saturated, found.seen, found.lost) == (1, 32, 4)
    assert float(found.values[0, 0]) == 448 * 2**-3
    assert bool(found.values.isfinite().all())


def test_what_is_not_finite_is_not_hidden() -> None:
    x_RC = torch.ones(2, 8)
    x_RC[1, 3] = math.inf
    found = fast(x_RC, Tile(1, None), E4M3)
    assert bool(found[0].isfinite().all())
    assert bool(found[1].isnan().all())


def test_no_rows_and_stacks_of_matrices() -> None:
    assert fast(torch.empty(0, 8), Tile(None, None), E4M3).shape == (0, 8)
    x_ERC = wide(3, 8, 8)
    together = fast(x_ERC, Tile(None, None), E4M3)
    assert torch.equal(together, torch.stack([fast(x, Tile(None, None), E4M3) for x in x_ERC]))
