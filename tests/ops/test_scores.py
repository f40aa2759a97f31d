"""Every option of attention against the plain reference, with gradients, and each against an identity of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.ops import attention
from surefoot.ops.attention import attend, attend_fused, attend_plain
from surefoot.ops.documents import Documents, Reach
from surefoot.ops.scores import Scores

BATCH, LENGTH, HEADS, GROUPS, SIZE, VALUE = 2, 70, 4, 2, 8, 6
OPTIONS = {
    "scale": Scores(scale=0.9),
    "softcap": Scores(softcap=1.5),
    "window": Scores(reach=Reach(7)),
    "itself": Scores(reach=Reach(1)),
    "wide": Scores(reach=Reach(1000)),
    "first": Scores(reach=Reach(5, 3)),
    "all": Scores(scale=0.7, softcap=2.0, reach=Reach(9, 2)),
}


def documents(name: str) -> Documents:
    ids_BL = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    ids_BL[0, [1, 4, 30, 31, 60]] = 1
    return Documents(ids_BL.cumsum(1) if name == "packed" else None, LENGTH)


def drawn(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, LENGTH, HEADS, SIZE), (BATCH, LENGTH, GROUPS, SIZE), (BATCH, LENGTH, GROUPS, VALUE), (HEADS,)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def outcome(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Output and gradients of a random projection."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def assert_close(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for x, y in zip(found, wanted, strict=True):
        # A query that sees itself alone has a gradient of 0.
        error = float((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-3))
        assert error < tolerance, f"off by {error:.1e}"


@pytest.mark.parametrize("scores", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", ["single", "packed"])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str
)
def test_blocks_are_the_plain_form(
    scores: Scores, name: str, with_sinks: bool, dtype: torch.dtype, tolerance: float
) -> None:
    docs, inputs = documents(name), drawn(dtype)[: 4 if with_sinks else 3]
    found = outcome(lambda q, k, v, *s: attend(q, k, v, docs, scores, *s), inputs)
    wanted = outcome(lambda q, k, v, *s: attend_plain(q, k, v, docs, scores, *s), [x.double() for x in inputs])
    assert all(x.dtype is dtype for x in found)
    assert_close(found, wanted, tolerance)


@pytest.mark.parametrize("scores", [s for s in OPTIONS.values() if s.softcap is None], ids=repr)
@pytest.mark.parametrize("name", ["single", "packed"])
def test_fused_kernels_are_the_plain_form(scores: Scores, name: str) -> None:
    docs, inputs = documents(name), drawn()[:3]
    wanted = outcome(lambda q, k, v: attend_plain(q, k, v, docs, scores), inputs)
    assert_close(outcome(lambda q, k, v: attend_fused(q, k, v, docs, scores), inputs), wanted, 1e-13)


@pytest.mark.parametrize("form", [attend, attend_fused, attend_plain])
def test_a_window_is_the_mask_written_down(form: Callable[..., Tensor]) -> None:
    """Query i sees keys i - W < j <= i of its document: W keys, itself the last."""
    docs, (q, k, v, _) = documents("packed"), drawn()
    window, first = 6, 2
    assert docs.ids_BL is not None
    y = form(q, k, v, docs, Scores(reach=Reach(window, first)))
    for batch, i, head in [(0, 0, 0), (0, 3, 1), (0, 29, 3), (0, 40, 2), (1, 5, 0), (1, 6, 1), (1, 69, 2)]:
        own = [j for j in range(i + 1) if docs.ids_BL[batch, j] == docs.ids_BL[batch, i]]
        seen = [j for place, j in enumerate(own) if i - window < j or place < first]
        weights = torch.softmax(k[batch, seen, head // 2] @ q[batch, i, head] * SIZE**-0.5, 0)
        torch.testing.assert_close(y[batch, i, head], weights @ v[batch, seen, head // 2], rtol=0, atol=1e-14)


def test_a_window_computes_what_is_seen_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores made, from the shapes of the blocks."""
    made: list[int] = []
    real = attention._Work.weigh

    def weigh(self: Any, run: slice, keys: slice | Tensor) -> Any:
        found = real(self, run, keys)
        made.append(found.p_NIJ[0, :, 0].numel() * found.p_NIJ.shape[-1] // (HEADS // GROUPS))
        return found

    monkeypatch.setattr(attention._Work, "weigh", weigh)
    length, window = 1024, 32
    q, k, v = (torch.randn(1, length, heads, SIZE) for heads in (HEADS, GROUPS, GROUPS))
    for reach, most in [(Reach(window), 2 * window), (Reach(window, 4), 2 * window + 4), (Reach(), length * 5 / 8)]:
        made.clear()
        attend(q, k, v, Documents(None, length), Scores(reach=reach))
        assert sum(made) <= length * most


def test_a_sink_scales_by_a_sigmoid() -> None:
    """softmax over keys and sink = softmax over keys times sigmoid(log-sum-exp - sink)."""
    docs, (q, k, v, sinks) = documents("packed"), drawn()
    scores_BHLS = torch.einsum("blhk,bshk->bhls", q, k.repeat_interleave(2, 2)) * SIZE**-0.5
    lse_BLH = scores_BHLS.masked_fill(~docs.mask(), float("-inf")).logsumexp(-1).transpose(1, 2)
    expected = attend(q, k, v, docs) * torch.sigmoid(lse_BLH - sinks)[..., None]
    torch.testing.assert_close(attend(q, k, v, docs, Scores(), sinks), expected, rtol=0, atol=1e-14)


def test_a_cap_far_away_is_none() -> None:
    docs, inputs = documents("packed"), drawn()[:3]
    capped = outcome(lambda q, k, v: attend(q, k, v, docs, Scores(softcap=1e6)), inputs)
    assert_close(capped, outcome(lambda q, k, v: attend(q, k, v, docs), inputs), 1e-10)


def test_gradients_by_differences() -> None:
    docs, inputs = Documents(torch.tensor([[0, 0, 0, 1, 1, 1]]), 6), [x[:1, :6] for x in drawn()[:3]]
    sinks = drawn()[3]
    leaves = [x.clone().requires_grad_() for x in (*inputs, sinks)]
    scores = Scores(scale=0.8, softcap=1.2, reach=Reach(2, 1))
    assert torch.autograd.gradcheck(lambda q, k, v, s: attend(q, k, v, docs, scores, s), leaves)
