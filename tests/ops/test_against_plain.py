"""Every fast path against its plain reference: values and gradients, in fp64, fp32 and bf16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from surefoot.ops import attention, linear, loss, matmul, norm, rope, swiglu
from surefoot.ops.documents import Documents

Function = Callable[..., Tensor]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def compare(fast: Function, plain: Function, inputs: list[Tensor], dtype: torch.dtype) -> None:
    """Equal outputs and equal gradients of a random projection, relative to the reference's size (reference in fp64)."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    reference = [tensor.to(torch.float64).requires_grad_() for tensor in inputs]
    y, y_reference = fast(*leaves), plain(*reference)
    assert y.dtype == dtype
    weight = draw(*y.shape, seed=7)
    y.backward(weight.to(dtype))
    y_reference.backward(weight.to(dtype).double())
    close(y, y_reference, TOLERANCE[dtype])
    for leaf, wanted in zip(leaves, reference, strict=True):
        assert leaf.grad is not None
        assert leaf.grad.dtype == leaf.dtype
        close(leaf.grad, wanted.grad, TOLERANCE[dtype])


def close(found: Tensor, wanted: Tensor | None, tolerance: float) -> None:
    assert wanted is not None
    error = (found.double() - wanted).abs().max() / wanted.abs().max()
    assert error <= tolerance, f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [(5,), (8, 4, 4)])
def test_linear(dtype: torch.dtype, outputs: tuple[int, ...]) -> None:
    weight_dtype = torch.promote_types(dtype, torch.float32)
    weights = [draw(size, 6, dtype=weight_dtype, seed=size) for size in outputs]
    compare(linear.linear, linear.linear_plain, [draw(3, 7, 6, dtype=dtype), *weights], dtype)


def test_linear_skips_the_input_gradient_when_nobody_asks() -> None:
    x, weight = draw(4, 6, dtype=torch.bfloat16), draw(5, 6, dtype=torch.float32).requires_grad_()
    linear.linear(x, weight).float().sum().backward()
    assert x.grad is None
    assert weight.grad is not None


def test_widened_bf16_products_are_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both routes accumulate exact products in fp32: they differ by less than one rounding of the result."""
    left, right = draw(64, 256, dtype=torch.bfloat16), draw(256, 48, dtype=torch.bfloat16)
    results = []
    for widen in (True, False):
        monkeypatch.setattr(matmul, "_cpu_widens_bf16", lambda widen=widen: widen)
        results.append(matmul.mm(left, right, torch.bfloat16).double())
    exact = left.double() @ right.double()
    for result in results:
        assert ((result - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    scale = 1 + 0.5 * draw(6, dtype=torch.promote_types(dtype, torch.float32))
    compare(
        lambda x, w: norm.rms_norm(x, w, 1e-3),
        lambda x, w: norm.rms_norm_plain(x, w, 1e-3),
        [draw(2, 5, 6, dtype=dtype), scale],
        dtype,
    )


def test_rms_norm_leaves_its_input_alone() -> None:
    x = draw(3, 8, dtype=torch.float32)
    before = x.clone()
    norm.rms_norm(x, torch.ones(8), 1e-6)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate(dtype: torch.dtype) -> None:
    tables = rope.rope_tables(
        torch.arange(5, 11), rope.frequencies(8, 100.0), torch.promote_types(dtype, torch.float32)
    )
    wide = tuple(table.double() for table in tables)
    compare(
        lambda x: rope.rotate(x, tables),
        lambda x: rope.rotate_plain(x, (wide[0], wide[1])),
        [draw(2, 6, 3, 8, dtype=dtype)],
        dtype,
    )


def test_rotation_depends_on_distance_only() -> None:
    q, k = draw(1, 1, 1, 8), draw(1, 1, 1, 8, seed=3)

    def score(i: int, j: int) -> float:
        tables = [
            rope.rope_tables(torch.tensor([position]), rope.frequencies(8, 1e4), torch.float64) for position in (i, j)
        ]
        return float((rope.rotate(q, tables[0]) * rope.rotate(k, tables[1])).sum())

    assert score(100, 93) == pytest.approx(score(7, 0), abs=1e-9)
    assert score(100, 93) != pytest.approx(score(100, 94), abs=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype: torch.dtype) -> None:
    compare(swiglu.swiglu, swiglu.swiglu_plain, [draw(3, 9, dtype=dtype), draw(3, 9, dtype=dtype, seed=1)], dtype)


DOCUMENTS = {
    "single": Documents(None, 6),
    "packed": Documents(torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]], dtype=torch.int32), 6),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("docs", DOCUMENTS.values(), ids=DOCUMENTS.keys())
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attend(dtype: torch.dtype, docs: Documents, groups: int) -> None:
    inputs = [
        draw(2, 6, 4, 8, dtype=dtype),
        draw(2, 6, groups, 8, dtype=dtype, seed=1),
        draw(2, 6, groups, 8, dtype=dtype, seed=2),
    ]
    compare(
        lambda q, k, v: attention.attend(q, k, v, docs),
        lambda q, k, v: attention.attend_plain(q, k, v, docs),
        inputs,
        dtype,
    )


@pytest.mark.parametrize("length", [1, 3])
def test_attend_continues_from_a_start(length: int) -> None:
    q, k, v = draw(2, length, 4, 8), draw(2, 9, 2, 8, seed=1), draw(2, 9, 2, 8, seed=2)
    docs = Documents(None, length, start=9 - length)
    close(attention.attend(q, k, v, docs), attention.attend_plain(q, k, v, docs), 1e-12)


def test_positions_restart_with_each_document() -> None:
    docs = DOCUMENTS["packed"]
    assert docs.positions.tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
    assert not Documents(torch.tensor([[3, 3, 3]]), 3).is_packed
    with pytest.raises(ValueError, match="start must be 0"):
        Documents(torch.tensor([[0, 1]]), 2, start=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("z_weight", [0.0, 0.1])
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 25], ids=["chunked", "whole"])
def test_linear_cross_entropy(
    dtype: torch.dtype, z_weight: float, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "_CHUNK_BYTES", chunk_bytes)
    targets = torch.randint(0, 11, (150,), generator=torch.Generator().manual_seed(0))
    targets[[0, 70, 149]] = loss.IGNORED
    weight = draw(11, 8, dtype=torch.promote_types(dtype, torch.float32))

    def run(function: Callable[..., tuple[Tensor, loss.LossSums]], x: Tensor, w: Tensor) -> Tensor:
        objective, sums = function(x, w, targets, z_weight)
        assert objective.item() == pytest.approx((sums.nll + z_weight * sums.z).item(), rel=1e-5)
        return objective * 0.01

    x, w = draw(150, 8, dtype=dtype).requires_grad_(), weight.clone().requires_grad_()
    x64, w64 = draw(150, 8, dtype=dtype).double().requires_grad_(), weight.double().requires_grad_()
    y, y64 = run(loss.linear_cross_entropy, x, w), run(loss.linear_cross_entropy_plain, x64, w64)
    torch.autograd.backward([y, y64])
    for found, wanted in ((y, y64), (x.grad, x64.grad), (w.grad, w64.grad)):
        assert found is not None
        close(found, wanted, TOLERANCE[dtype])


def test_ignored_targets_get_no_gradient() -> None:
    x, weight = draw(4, 8).requires_grad_(), draw(11, 8).requires_grad_()
    loss.linear_cross_entropy(x, weight, torch.tensor([1, loss.IGNORED, 2, loss.IGNORED]), 0.1)[0].backward()
    assert x.grad is not None
    assert (x.grad[[1, 3]] == 0).all()
    assert (x.grad[[0, 2]] != 0).any()


def test_the_loss_gives_its_weight_gradient_away() -> None:
    """No second copy of the largest gradient there is, unless the graph is kept for another pass: then both are right."""
    x, weight = draw(4, 8).requires_grad_(), draw(11, 8).requires_grad_()
    targets = torch.tensor([1, 2, 3, 4])
    (loss.linear_cross_entropy(x, weight, targets)[0] * 0.5).backward()
    assert weight.grad is not None
    once = weight.grad.clone()
    objective = loss.linear_cross_entropy(x, weight, targets)[0]
    made = objective.grad_fn.saved_tensors[1].data_ptr()  # type: ignore[union-attr]
    weight.grad = None
    (objective * 0.5).backward(retain_graph=True)
    torch.testing.assert_close(weight.grad, once)
    assert weight.grad.data_ptr() != made
    (objective * 3.0).backward(retain_graph=True)
    torch.testing.assert_close(weight.grad, 7 * once)
    weight.grad = None
    (objective * 0.5).backward()
    torch.testing.assert_close(weight.grad, once)
    assert weight.grad.data_ptr() == made
    with pytest.raises(RuntimeError, match="second time"):
        objective.backward()


def test_cross_entropy_without_gradients_keeps_nothing() -> None:
    with torch.no_grad():
        objective, sums = loss.linear_cross_entropy(draw(4, 8), draw(11, 8), torch.tensor([1, 2, 3, 4]))
    assert objective.item() == pytest.approx(sums.nll.item())
