"""Recurrences by blocks against one position after the other, in fp64 with gradients; convolutions against the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.ops.conv import causal_conv
from surefoot.ops.documents import Documents
from surefoot.ops.runs import OneRun
from surefoot.ops.ssd import ssd, ssd_plain

BATCH, LENGTH = 2, 37


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def documents(length: int = LENGTH) -> Documents:
    """Documents of all lengths from 1 up, and a row of one document."""
    ids = torch.tensor([[0] * length, sorted(int((2 * position) ** 0.5) for position in range(length))])
    return Documents(ids, length)


def ssd_inputs(length: int = LENGTH) -> list[Tensor]:
    """Slow decay, so that a leak between documents would show."""
    x, b, c = draw(BATCH, length, 4, 3), draw(BATCH, length, 2, 5, seed=1), draw(BATCH, length, 2, 5, seed=2)
    log_decay = -0.05 * draw(BATCH, length, 4, seed=3).abs()
    return [tensor.requires_grad_() for tensor in (x, log_decay, b, c)]


@pytest.mark.parametrize("block", [1, 4, 16, 64])
@pytest.mark.parametrize("with_state", [False, True])
def test_ssd_by_blocks_is_the_recurrence(block: int, with_state: bool) -> None:
    inputs, starts = ssd_inputs(), documents().positions == 0
    state = draw(BATCH, 4, 3, 5, seed=4).requires_grad_() if with_state else None
    if with_state:
        starts = starts.clone()
        starts[:, 0] = False
    sources = [*inputs, *([state] if state is not None else [])]
    results = []
    for y, last in (ssd_plain(*inputs, starts, state), ssd(*inputs, starts, state, block=block)):
        gradients = torch.autograd.grad(
            (y * draw(*y.shape, seed=5)).sum() + (last * draw(*last.shape, seed=6)).sum(), sources
        )
        results.append([y, last, *gradients])
    for wanted, found in zip(*results, strict=True):
        assert torch.allclose(found, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("split", [1, 20, 36])
def test_ssd_goes_on_from_a_state(split: int) -> None:
    inputs, starts = ssd_inputs(), documents().positions == 0
    whole, last = ssd(*inputs, starts, block=8)
    head, state = ssd(*(tensor[:, :split] for tensor in inputs), starts[:, :split], block=8)
    rest, state = ssd(*(tensor[:, split:] for tensor in inputs), starts[:, split:], state, block=8)
    assert torch.allclose(torch.cat((head, rest), 1), whole, rtol=0, atol=1e-12)
    assert torch.allclose(state, last, rtol=0, atol=1e-12)


def test_no_document_sees_another() -> None:
    inputs, docs = [tensor.detach() for tensor in ssd_inputs()], documents()
    assert docs.ids_BL is not None
    before, _ = ssd(*inputs, docs.positions == 0, block=8)
    is_fifth, x, log_decay, b, c = docs.ids_BL[1] == 5, *inputs
    for tensor in (x, b, c):
        tensor[1, ~is_fifth] = 1e6
    after, _ = ssd(*inputs, docs.positions == 0, block=8)
    assert torch.equal(after[1, is_fifth], before[1, is_fifth])
    log_decay[1, ~is_fifth] = -3.0  # sums of decays in a block are taken over all of it, and rounded
    after, _ = ssd(*inputs, docs.positions == 0, block=8)
    assert torch.allclose(after[1, is_fifth], before[1, is_fifth], rtol=0, atol=1e-13)


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_convolution_is_its_definition(taps: int, with_bias: bool) -> None:
    docs, x, weight = documents(), draw(BATCH, LENGTH, 3).requires_grad_(), draw(3, taps, seed=1).requires_grad_()
    bias = draw(3, seed=2).requires_grad_() if with_bias else None
    assert docs.ids_BL is not None
    wanted = torch.zeros_like(x)
    for row in range(BATCH):
        for t in range(LENGTH):
            for back in range(taps):
                if t - back >= 0 and docs.ids_BL[row, t - back] == docs.ids_BL[row, t]:
                    term = torch.zeros_like(wanted)
                    term[row, t] = 1
                    wanted = wanted + term * (weight[:, taps - 1 - back] * x[row, t - back])
    wanted = wanted if bias is None else wanted + bias
    found, tail = causal_conv(x, weight, bias, docs, OneRun())
    assert torch.allclose(found, wanted, rtol=0, atol=1e-14)
    assert torch.equal(tail, x[:, LENGTH - taps + 1 :])
    sources = [x, weight, *([bias] if bias is not None else [])]
    weights = draw(*x.shape, seed=3)
    for ours, theirs in zip(
        torch.autograd.grad((found * weights).sum(), sources),
        torch.autograd.grad((wanted * weights).sum(), sources),
        strict=True,
    ):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-13)


def test_the_convolution_goes_on_from_its_tail() -> None:
    x, weight = draw(BATCH, LENGTH, 3), draw(3, 4, seed=1)
    whole, last = causal_conv(x, weight, None, Documents(None, LENGTH), OneRun())
    parts, tail, start = [], None, 0
    for stop in (1, 2, 9, 10, LENGTH):
        docs = Documents(None, stop - start, start=start)
        y, tail = causal_conv(x[:, start:stop], weight, None, docs, OneRun(), tail)
        parts.append(y)
        start = stop
    assert torch.allclose(torch.cat(parts, 1), whole, rtol=0, atol=1e-14)
    assert torch.equal(tail, last)
