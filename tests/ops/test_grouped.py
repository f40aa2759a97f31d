"""Grouped products and moved rows against their references: every dtype, uneven and empty groups."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.ops import grouped, matmul
from surefoot.ops.balance import balance_loss, count
from surefoot.ops.native import build, calls
from surefoot.ops.rows import copy_rows, sum_rows, sum_rows_plain

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}
COUNTS = {
    "even": [8, 8, 8],
    "uneven": [1, 20, 3],
    "empty": [0, 24, 0],
    "first empty": [0, 7, 17],
    "no rows": [0, 0, 0],
}


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def close(found: Tensor | None, wanted: Tensor | None, tolerance: float) -> None:
    assert found is not None
    assert wanted is not None
    assert found.shape == wanted.shape
    if wanted.numel():
        assert (found.double() - wanted.double()).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
@pytest.mark.parametrize("widens", [False, True])
def test_grouped_linear(dtype: torch.dtype, counts: list[int], widens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients in fp64 of the same numbers; an empty group's weight has gradient 0."""
    monkeypatch.setattr(matmul, "_cpu_widens_bf16", lambda: widens)
    x = draw(sum(counts), 6, dtype=dtype).requires_grad_()
    weight = draw(3, 5, 6, dtype=torch.promote_types(dtype, torch.float32), seed=1).requires_grad_()
    wanted_x, wanted_weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    y = grouped.grouped_linear(x, torch.tensor(counts), weight)
    wanted = grouped.grouped_linear_plain(wanted_x, torch.tensor(counts), wanted_weight)
    close(y, wanted, TOLERANCE[dtype])
    assert y.dtype is dtype
    grad = draw(*y.shape, dtype=dtype, seed=2)
    y.backward(grad)
    wanted.backward(grad.double())
    close(x.grad, wanted_x.grad, TOLERANCE[dtype])
    close(weight.grad, wanted_weight.grad, TOLERANCE[dtype])
    assert weight.grad is not None
    assert weight.grad.dtype is weight.dtype
    for part, size in zip(weight.grad, counts, strict=True):
        assert size or not part.any()


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_the_kernel_of_a_gpu_is_called_rightly(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has the same kernel on a CPU, where it is not used for being slower: offsets and transpositions show here."""
    results = []
    for has_kernel in (True, False):
        monkeypatch.setattr(grouped, "_has_kernel", lambda *_, has_kernel=has_kernel: has_kernel)
        x = draw(sum(counts), 16, dtype=torch.bfloat16).requires_grad_()
        weight = draw(3, 8, 16, dtype=torch.float32, seed=1).requires_grad_()
        y = grouped.grouped_linear(x, torch.tensor(counts), weight)
        y.backward(draw(*y.shape, dtype=torch.bfloat16, seed=2))
        results.append((y, x.grad, weight.grad))
    for found, wanted in zip(*results, strict=True):
        close(found, wanted, 1e-2)


def test_unaligned_rows_do_not_go_to_the_kernel() -> None:
    with torch.device("meta"):
        for shape in ((3, 16, 12), (3, 12, 16)):
            x = torch.empty(4, shape[1], dtype=torch.bfloat16)
            assert not grouped._has_kernel(x, torch.empty(shape))


def permutation(num_tokens: int, top_k: int) -> tuple[Tensor, Tensor]:
    order_R = torch.randperm(num_tokens * top_k, generator=torch.Generator().manual_seed(3))
    rows_R = torch.empty_like(order_R)
    rows_R[order_R] = torch.arange(len(order_R))
    return order_R // top_k, rows_R.view(num_tokens, top_k)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("num_tokens", "top_k", "width"), [(1, 1, 1), (7, 2, 33), (5, 3, 16), (0, 2, 4)])
def test_rows_go_there_and_back(
    dtype: torch.dtype, compiled: bool, num_tokens: int, top_k: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(calls, "library", lambda: None)
    elif build.library() is None:
        pytest.skip(f"elementwise passes are {build.status()}")
    tokens_R, rows_TK = permutation(num_tokens, top_k)
    x_TD = draw(num_tokens, width, dtype=dtype).requires_grad_()
    x_RD = draw(num_tokens * top_k, width, dtype=dtype, seed=1).requires_grad_()
    weights_TK = draw(num_tokens, top_k, dtype=torch.promote_types(dtype, torch.float32), seed=2).requires_grad_()
    wanted = [tensor.detach().double().requires_grad_() for tensor in (x_TD, x_RD, weights_TK)]
    copies, sums = copy_rows(x_TD, tokens_R, rows_TK), sum_rows(x_RD, rows_TK, weights_TK)
    wanted_copies, wanted_sums = wanted[0][tokens_R], sum_rows_plain(wanted[1], rows_TK, wanted[2])
    assert copies.dtype is sums.dtype is dtype
    close(copies, wanted_copies, 0)
    close(sums, wanted_sums, TOLERANCE[dtype])
    grad_R, grad_T = draw(*copies.shape, dtype=dtype, seed=4), draw(*sums.shape, dtype=dtype, seed=5)
    torch.autograd.backward([copies, sums], [grad_R, grad_T])
    torch.autograd.backward([wanted_copies, wanted_sums], [grad_R.double(), grad_T.double()])
    for leaf, reference in zip((x_TD, x_RD, weights_TK), wanted, strict=True):
        close(leaf.grad, reference.grad, TOLERANCE[dtype])


def test_balance_loss_is_its_definition() -> None:
    """E Σ f p of each sequence times its tokens, by hand; 1 a token at balance, E where one expert has it all."""
    scores_TE = draw(12, 4).softmax(1)
    experts_TK = scores_TE.topk(2).indices
    counts_BE = count(experts_TK.view(3, 8), 4)
    wanted = 0.0
    for scores_LE, experts_LK in zip(scores_TE.split(4), experts_TK.split(4), strict=True):
        shares_E = F.one_hot(experts_LK, 4).double().sum((0, 1)) / 8
        wanted += 4 * 4 * float((shares_E * scores_LE.mean(0)).sum())
    assert float(balance_loss(scores_TE, counts_BE, "sequence")) == pytest.approx(wanted, rel=1e-12)
    even = torch.full((12, 4), 0.25, dtype=torch.float64)
    assert float(balance_loss(even, counts_BE, "sequence")) == pytest.approx(12)
    one = torch.eye(4, dtype=torch.float64)[torch.zeros(12, dtype=torch.int64)]
    assert float(balance_loss(one, count(one.argmax(1).view(3, 4), 4), "sequence")) == pytest.approx(48)


def test_parts_of_a_sequence_add_up_to_its_balance_loss() -> None:
    """Where counts are pooled over those who hold the parts, their losses and gradients are shares of the whole's."""
    scores_TE = draw(8, 4).softmax(1).requires_grad_()
    counts_BE = count(scores_TE.detach().topk(2).indices.view(1, 16), 4)
    whole = balance_loss(scores_TE, counts_BE, "sequence")
    parts = [
        balance_loss(
            scores_PE, count(scores_PE.detach().topk(2).indices.view(1, 8), 4), "sequence", lambda _: counts_BE
        )
        for scores_PE in scores_TE.split(4)
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole)
    gradients = [torch.autograd.grad(loss, scores_TE, retain_graph=True)[0] for loss in (parts[0] + parts[1], whole)]
    torch.testing.assert_close(*gradients)


def test_the_scope_decides_what_must_be_even() -> None:
    """Two sequences that each use one half of the experts: even together, not one by one."""
    scores_TE = torch.eye(4, dtype=torch.float64)[torch.tensor([0, 1, 0, 1, 2, 3, 2, 3])]
    counts_BE = count(scores_TE.argmax(1).view(2, 4), 4)
    assert float(balance_loss(scores_TE, counts_BE, "micro_batch")) == pytest.approx(8)
    assert float(balance_loss(scores_TE, counts_BE, "sequence")) == pytest.approx(16)
