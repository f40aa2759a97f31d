"""Quantised products against plain autograd through explicitly quantised operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from surefoot.precision.formats import amax_of, quantise, scale_in_two_levels, scale_of
from surefoot.precision.kinds import Kind, Name, kind_of
from surefoot.precision.meter import Meter, Role
from surefoot.precision.product import Operand, Operands, Quantising, alone

KINDS = [name for name in get_args(Name) if name != "delayed"]
NAMES = ("wq", "wk")


def product_of(
    kind: Kind, names: tuple[str, ...] = NAMES, *, history: int | None = None, narrows: bool = True
) -> tuple[Quantising, Meter]:
    meter = Meter(names, torch.device("cpu"), history)

    def operand(name: str, role: Role) -> Operand:
        return Operand(kind, meter, name, role, (alone, alone))

    operands = {
        name: Operands(operand(name, "input"), operand(name, "weight"), operand(name, "gradient")) for name in names
    }
    return Quantising(kind, operands, narrows_weight_gradients=narrows), meter


def narrow(x_RC: Tensor, kind: Kind, role: Role, *, along_rows: bool) -> Tensor:
    """One operand by the formats alone, whose values have tests of their own."""
    tile, form = kind.tile(role, along_rows=along_rows), kind.form(role)
    amax = amax_of(x_RC, tile)
    scale = scale_of(amax, form.largest)
    if kind.has_two_levels:
        scale = scale_in_two_levels(amax, amax.amax((-2, -1), keepdim=True), form)
    return quantise(x_RC, scale, tile, form, x_RC.dtype, can_saturate=False).values


class Explicit(torch.autograd.Function):
    """y = x Wᵀ with every operand of the three products quantised where it stands."""

    @staticmethod
    def forward(ctx, x_NI: Tensor, weight_OI: Tensor, kind: Kind, narrows: bool) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.kind, ctx.narrows = kind, narrows
        return narrow(x_NI, kind, "input", along_rows=False) @ narrow(weight_OI, kind, "weight", along_rows=False).T

    @staticmethod
    def backward(ctx, grad_NO: Tensor):  # type: ignore[no-untyped-def]
        x_NI, weight_OI = ctx.saved_tensors
        kind = ctx.kind
        grad_x = narrow(grad_NO, kind, "gradient", along_rows=False) @ narrow(
            weight_OI, kind, "weight", along_rows=True
        )
        if not ctx.narrows:
            return grad_x, grad_NO.T @ x_NI, None, None
        left, right = narrow(grad_NO, kind, "gradient", along_rows=True), narrow(x_NI, kind, "input", along_rows=True)
        return grad_x, left.T @ right, None, None


def drawn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(6 * torch.rand(shape, generator=generator, dtype=torch.float64))
    return torch.randn(shape, generator=generator, dtype=torch.float64) * spread


@pytest.mark.parametrize("narrows", [True, False], ids=["narrow-dw", "wide-dw"])
@pytest.mark.parametrize("name", KINDS)
def test_output_and_gradients_are_those_of_explicit_quantisation(name: Name, narrows: bool) -> None:
    kind = kind_of(name, gradient="e5m2", tile=16)
    product, _ = product_of(kind, narrows=narrows)
    x, weights = drawn(3, 32, 40, seed=0), {"wq": drawn(24, 40, seed=1), "wk": drawn(36, 40, seed=2)}
    grad = drawn(3, 32, 60, seed=3)

    def outcome(multiply: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_(), *(weight.clone().requires_grad_() for weight in weights.values())]
        y = multiply(*leaves)
        y.backward(grad)
        return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    def explicit(x: Tensor, *weights: Tensor) -> Tensor:
        rows = [Explicit.apply(x.flatten(0, 1), weight, kind, narrows) for weight in weights]
        return torch.cat(rows, 1).view(3, 32, -1)

    ours = outcome(lambda x, q, k: product.linear(x, {"wq": q, "wk": k}))
    for found, expected in zip(ours, outcome(explicit), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_each_expert_is_a_product_of_its_own(name: Name) -> None:
    """Tensorwise shares one scale of rows over all experts; kinds with tiles leave dW in the compute dtype."""
    kind = kind_of(name, gradient="e5m2", tile=16)
    product, _ = product_of(kind, ("w_up",))
    counts_E, weight_EOI = torch.tensor([5, 0, 27, 16]), drawn(4, 24, 40, seed=1).requires_grad_()
    x_RI, grad_RO = drawn(48, 40, seed=0).requires_grad_(), drawn(48, 24, seed=3)
    y_RO = product.grouped(x_RI, counts_E, "w_up", weight_EOI)
    y_RO.backward(grad_RO)
    x, sizes = x_RI.detach(), counts_E.tolist()
    is_whole = name == "tensorwise"
    for number, (start, size) in enumerate(zip([0, 5, 5, 32], sizes, strict=True)):
        rows, weight = slice(start, start + size), weight_EOI[number].detach()
        narrow_x, narrow_g = (
            narrow(both, kind, role, along_rows=False)[rows] for both, role in ((x, "input"), (grad_RO, "gradient"))
        )
        weight_O, weight_I = (narrow(weight, kind, "weight", along_rows=along) for along in (False, True))
        torch.testing.assert_close(y_RO[rows].detach(), narrow_x @ weight_O.T, rtol=1e-13, atol=1e-12)
        torch.testing.assert_close(x_RI.grad[rows], narrow_g @ weight_I, rtol=1e-13, atol=1e-12)
        if is_whole:
            left, right = narrow_g, narrow_x
        elif kind.has_tiles or not size:
            left, right = grad_RO[rows], x[rows]
        else:
            left, right = (
                narrow(both[rows], kind, role, along_rows=True) for both, role in ((grad_RO, "gradient"), (x, "input"))
            )
        torch.testing.assert_close(weight_EOI.grad[number], left.T @ right, rtol=1e-13, atol=1e-12)


def test_a_weight_that_stays_wide_may_lie_between_narrow_ones() -> None:
    product, meter = product_of(kind_of("rowwise", gradient="e5m2", tile=16))
    x = drawn(8, 40, seed=0)
    weights = {"wq": drawn(24, 40, seed=1), "w_dt": drawn(3, 40, seed=4), "wk": drawn(36, 40, seed=2)}
    parts = product.linear(x, weights).split([24, 3, 36], -1)
    assert torch.equal(parts[1], x @ weights["w_dt"].T)
    for part, name in ((parts[0], "wq"), (parts[2], "wk")):
        torch.testing.assert_close(part, product.linear(x, {name: weights[name]}), rtol=1e-13, atol=1e-12)
    assert "w_dt/weight" not in end(meter)


def test_bf16_operands_are_multiplied_exactly() -> None:
    """What a unit for e4m3 computes: products of 8-bit numbers added up in fp32, rounded to bf16 once."""
    kind = kind_of("mxfp8", gradient="e5m2", tile=128)
    product, _ = product_of(kind, ("w",))
    x, weight = drawn(64, 64, seed=0).bfloat16(), drawn(32, 64, seed=1).float()
    exact = (
        narrow(x.double(), kind, "input", along_rows=False)
        @ narrow(weight.double(), kind, "weight", along_rows=False).T
    )
    y = product.linear(x, {"w": weight})
    assert y.dtype is torch.bfloat16
    magnitude = float(exact.abs().max())
    # fp32 sums of 64 terms, then half a unit of bf16.
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=64 * 2**-24 * magnitude)


def end(meter: Meter) -> dict[str, dict[str, float]]:
    return meter.end_step(lambda x: x, lambda x: x)


def test_delayed_scales_look_back_and_an_outlier_saturates() -> None:
    kind = kind_of("delayed", gradient="e5m2", tile=128)
    product, meter = product_of(kind, ("w",), history=2)
    weight = drawn(8, 16, seed=1).float().requires_grad_()

    def step(x: Tensor) -> dict[str, float]:
        y = product.linear(x.requires_grad_(), {"w": weight})
        y.sum().backward()
        assert bool(y.isfinite().all())
        assert x.grad is not None
        assert bool(x.grad.isfinite().all())
        return end(meter)["w/input"]

    calm = torch.linspace(-1, 1, 64).view(4, 16)
    assert step(calm.clone()) == {"amax": 1, "narrowed": 0, "saturated": 0, "underflowed": 0, "scale_age": 0}
    assert step(calm.clone()) == {"amax": 1, "narrowed": 1, "saturated": 0, "underflowed": 0, "scale_age": 1}
    outlier = calm.clone()
    outlier[1, 2] = 1e4
    found = step(outlier)
    assert (found["amax"], found["saturated"]) == (1e4, 1 / 64)
    assert step(calm.clone())["scale_age"] == 1
    assert step(calm.clone())["scale_age"] == 2
    assert step(calm.clone())["scale_age"] == 1, "the outlier is forgotten after two steps"


def test_a_history_continues_where_it_was_kept() -> None:
    kind = kind_of("delayed", gradient="e5m2", tile=128)
    weight, x = drawn(8, 16, seed=1).float(), drawn(4, 16, seed=2).float()
    product, meter = product_of(kind, ("w",), history=4)
    product.linear(x.requires_grad_(), {"w": weight.requires_grad_()}).sum().backward()
    end(meter)
    other, restored = product_of(kind, ("w",), history=4)
    restored.restore(meter.state())
    assert restored.state() == meter.state() != {}
    with torch.no_grad():
        assert torch.equal(product.linear(x * 3, {"w": weight}), other.linear(x * 3, {"w": weight}))
    assert end(meter) == {}, "a pass without gradients is not counted"


def test_an_operand_that_was_all_zero_is_not_scaled_by_that() -> None:
    product, meter = product_of(kind_of("delayed", gradient="e5m2", tile=128), ("w",), history=4)
    weight = drawn(8, 16, seed=1).float().requires_grad_()
    for x in (torch.zeros(4, 16), torch.ones(4, 16)):
        y = product.linear(x.requires_grad_(), {"w": weight})
        y.sum().backward()
        found = end(meter)
    assert found["w/input"]["narrowed"] == 0
    assert found["w/weight"]["narrowed"] == 1
