"""Recurrences by blocks against one position after the other, in fp64 with gradients; convolutions against the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.ops.conv import causal_conv
from surefoot.ops.delta import delta, delta_plain, unit_inverse
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


def delta_inputs(num_decays: int, length: int = LENGTH) -> list[Tensor]:
    """Query, read, write, value, decay, and k and v: keys of norm 1, so that states stay bounded, and slow decay."""
    keys = [torch.nn.functional.normalize(draw(BATCH, length, 3, 4, seed=seed), dim=-1) for seed in (0, 1, 2, 3)]
    beta = draw(BATCH, length, 3, 1, seed=4).sigmoid()
    values = [draw(BATCH, length, 3, 5, seed=seed) for seed in (5, 6)]
    log_decay = -0.05 * draw(BATCH, length, 3, num_decays, seed=7).abs()
    found = [keys[0], -beta * keys[1], keys[1], values[0], log_decay, keys[3], values[1]]
    return [tensor.requires_grad_() for tensor in found]


@pytest.mark.parametrize("block", [1, 4, 16, 64])
@pytest.mark.parametrize("num_decays", [1, 4])
@pytest.mark.parametrize("has_added", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_delta_by_blocks_is_the_recurrence(block: int, num_decays: int, has_added: bool, with_state: bool) -> None:
    *inputs, k, v = delta_inputs(num_decays)
    added = (k, v) if has_added else None
    starts = (documents().positions == 0).clone()
    state = draw(BATCH, 3, 4, 5, seed=8).requires_grad_() if with_state else None
    if with_state:
        starts[:, 0] = False
    sources = [*inputs, *(added or ()), *([] if state is None else [state])]
    y, last = delta(*inputs, starts, state, added, block=block)
    results = []
    for outputs, final in (delta_plain(*inputs, starts, state, added), (y, last())):
        total = (outputs * draw(*outputs.shape, seed=9)).sum() + (final * draw(*final.shape, seed=10)).sum()
        results.append([outputs, final, *torch.autograd.grad(total, sources)])
    for wanted, found in zip(*results, strict=True):
        assert torch.allclose(found, wanted, rtol=0, atol=1e-11)


def test_delta_returns_the_value_of_the_key_just_stored() -> None:
    """Without decay, at full strength: what a key has just been given is what it gives back, whatever came before."""
    key, value = torch.nn.functional.normalize(draw(1, LENGTH, 2, 4), dim=-1), draw(1, LENGTH, 2, 5, seed=1)
    starts = Documents(None, LENGTH).positions == 0
    y, _ = delta(key, -key, key, value, torch.zeros(1, LENGTH, 2, 1).double(), starts, block=16)
    assert torch.allclose(y, value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_decays", [1, 4])
def test_delta_is_exact_where_decay_is_sudden(num_decays: int) -> None:
    """A decay of e^-400 in one position: its inverse overflows fp32, so no exponent may ever be positive."""
    *inputs, _, _ = (tensor.detach().float() for tensor in delta_inputs(num_decays))
    inputs[4][:, 9] = -400.0
    starts = Documents(None, LENGTH).positions == 0
    y, _ = delta(*inputs, starts, block=16)
    wanted, _ = delta_plain(*(tensor.double() for tensor in inputs), starts)
    # Sums of decays near 400 are rounded to 3e-5, and so are the decays between positions after it.
    assert torch.allclose(y.double(), wanted, rtol=0, atol=2e-4)


def test_delta_keeps_documents_apart() -> None:
    *inputs, _, _ = (tensor.detach() for tensor in delta_inputs(4))
    docs = documents()
    assert docs.ids_BL is not None
    is_fifth = docs.ids_BL[1] == 5
    before, _ = delta(*inputs, docs.positions == 0, block=8)
    for tensor in inputs[:4]:
        tensor[1, ~is_fifth] *= -1.3
    after, _ = delta(*inputs, docs.positions == 0, block=8)
    assert torch.equal(after[1, is_fifth], before[1, is_fifth])
    assert not torch.allclose(after[1, ~is_fifth], before[1, ~is_fifth])


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_the_inverse_by_halves_is_the_inverse(size: int) -> None:
    """Equal keys at full strength are the worst case for a series of powers: its terms reach 2^63."""
    for lower in (draw(3, 2, size, size).tril(-1) * size**-0.5, -torch.ones(1, 1, size, size).double().tril(-1)):
        wanted = torch.linalg.inv(torch.eye(size).double() - lower)
        assert torch.allclose(unit_inverse(lower), wanted, rtol=1e-9, atol=1e-11)


def test_rwkv7_is_its_transition_matrix_and_gated_deltanet_a_case_of_it() -> None:
    """S = S (diag(w) - kappa (a kappa)^T) + v k^T, from values to keys; with a = beta w, k = beta kappa: the delta rule."""
    length, size = 21, 4
    kappa = torch.nn.functional.normalize(draw(length, size), dim=-1)
    r, v, beta = draw(length, size, seed=1), draw(length, size, seed=2), draw(length, 1, seed=3).sigmoid()
    for log_decay in (-0.6 * draw(length, size, seed=4).sigmoid(), -0.6 * draw(length, 1, seed=4).sigmoid()):
        is_scalar, decay = log_decay.shape[1] == 1, log_decay.exp()
        a = beta * decay if is_scalar else draw(length, size, seed=5).sigmoid()
        k = beta * kappa if is_scalar else draw(length, size, seed=6)
        state, wanted = torch.zeros(size, size).double(), []
        for t in range(length):
            transition = torch.diag(decay[t].expand(size)) - torch.outer(kappa[t], a[t] * kappa[t])
            state = state @ transition + torch.outer(v[t], k[t])
            wanted.append(state @ r[t])
        starts = Documents(None, length).positions == 0
        batched = [x[None, :, None] for x in (r, -kappa / decay, kappa * a, torch.zeros_like(v), log_decay, k, v)]
        y, _ = delta(*batched[:5], starts, None, (batched[5], batched[6]), block=8)
        assert torch.allclose(y[0, :, 0], torch.stack(wanted), rtol=0, atol=1e-13)
        if is_scalar:
            gated = [x[None, :, None] for x in (r, -beta * kappa, kappa, beta * v, log_decay)]
            y, _ = delta(*gated, starts, block=8)
            assert torch.allclose(y[0, :, 0], torch.stack(wanted), rtol=0, atol=1e-13)
