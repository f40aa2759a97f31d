"""Softmax attention over whatever keys a mask names, and nothing where it names none: the parts of sparse attention.

Legend: B batch, L queries, S keys, H query heads, G key-value heads, R = H / G, K head size, I queries of one run, J keys it is
shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.ops.autograd import apply
from surefoot.ops.partial_attention import attend_part, attend_part_backward

Seen = Callable[[slice], Tensor]
"""What a run of queries sees of the first J keys, (B or 1, G or 1, I, J); J is up to the function, and no later key is seen."""

_BLOCK_BYTES = 1 << 24
"""Of a mask and its scores held at once."""


class _SeenAttention(torch.autograd.Function):
    """Masks are made again in backward, and scores with them."""

    is_costly = True

    @staticmethod
    def forward(ctx: Any, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, seen: Seen) -> Tensor:
        q_BHLK, k_BGSK, v_BGSK = (x.transpose(1, 2) for x in (q_BLHK, k_BSGK, v_BSGK))
        wide = torch.promote_types(q_BLHK.dtype, torch.float32)
        y_BHLK = q_BHLK.new_empty(q_BHLK.shape, dtype=wide)
        lse_BHL = q_BHLK.new_empty(q_BHLK.shape[:3], dtype=wide)
        for run in _runs(q_BHLK, k_BGSK.shape[2]):
            seen_BHIJ = _by_head(seen(run), q_BHLK.shape[1], k_BGSK.shape[1])
            shown = slice(0, seen_BHIJ.shape[-1])
            y_BHLK[:, :, run], lse_BHL[:, :, run] = attend_part(
                q_BHLK[:, :, run].contiguous(), k_BGSK[:, :, shown], v_BGSK[:, :, shown], seen_BHIJ
            )
        ctx.seen = seen
        ctx.save_for_backward(q_BLHK, k_BSGK, v_BSGK, y_BHLK, lse_BHL)
        return y_BHLK.transpose(1, 2).to(q_BLHK.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_BLHK, k_BSGK, v_BSGK, y_BHLK, lse_BHL = ctx.saved_tensors
        q_BHLK, k_BGSK, v_BGSK, dy_BHLK = (x.transpose(1, 2) for x in (q_BLHK, k_BSGK, v_BSGK, grads[0]))
        # Of a query that sees nothing: any finite number makes its probabilities exp(-inf) = 0.
        lse_BHL = lse_BHL.masked_fill(lse_BHL == float("-inf"), 0)
        dq_BHLK = torch.empty_like(q_BHLK)
        dk_BGSK, dv_BGSK = (torch.zeros_like(x, dtype=y_BHLK.dtype) for x in (k_BGSK, v_BGSK))
        for run in _runs(q_BHLK, k_BGSK.shape[2]):
            seen_BHIJ = _by_head(ctx.seen(run), q_BHLK.shape[1], k_BGSK.shape[1])
            shown = slice(0, seen_BHIJ.shape[-1])
            dy_BHIK, q_BHIK = (x[:, :, run].contiguous() for x in (dy_BHLK, q_BHLK))
            dq_BHIK, dk_BGJK, dv_BGJK = attend_part_backward(
                dy_BHIK,
                q_BHIK,
                k_BGSK[:, :, shown],
                v_BGSK[:, :, shown],
                y_BHLK[:, :, run].contiguous(),
                lse_BHL[:, :, run].contiguous(),
                seen_BHIJ,
            )
            dq_BHLK[:, :, run] = dq_BHIK.to(dq_BHLK.dtype)
            dk_BGSK[:, :, shown] += dk_BGJK
            dv_BGSK[:, :, shown] += dv_BGJK
        dk_BSGK, dv_BSGK = (x.transpose(1, 2).to(q_BLHK.dtype) for x in (dk_BGSK, dv_BGSK))
        return dq_BHLK.transpose(1, 2), dk_BSGK, dv_BSGK, None


def attend_seen(q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, seen: Seen) -> Tensor:
    """Attention of each query over the keys that `seen` names, (B, L, H, K) in q's dtype; 0 where it names none."""
    y_BLHK: Tensor = apply(_SeenAttention, q_BLHK, k_BSGK, v_BSGK, seen)
    return y_BLHK


def attend_seen_plain(q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
    """The reference of `attend_seen`: scores, mask, softmax and sum written out, by autograd; and the weights (B, H, L, S)."""
    num_heads, (num_keys, num_groups) = q_BLHK.shape[2], k_BSGK.shape[1:3]
    k_BSHK, v_BSHK = (x.repeat_interleave(num_heads // num_groups, 2) for x in (k_BSGK, v_BSGK))
    scores_BHLS = torch.einsum("blhk,bshk->bhls", q_BLHK, k_BSHK) * q_BLHK.shape[-1] ** -0.5
    seen_BHLJ = _by_head(seen(slice(0, q_BLHK.shape[1])), num_heads, num_groups)
    seen_BHLS = F.pad(seen_BHLJ, (0, num_keys - seen_BHLJ.shape[-1]))
    any_BHL1 = seen_BHLS.any(-1, keepdim=True)
    scores_BHLS = scores_BHLS.masked_fill(~seen_BHLS, float("-inf")).masked_fill(~any_BHL1, 0)
    weights_BHLS = scores_BHLS.softmax(-1) * any_BHL1
    return torch.einsum("bhls,bshk->blhk", weights_BHLS, v_BSHK), weights_BHLS


@torch.no_grad()
def weights_seen(q_BLHK: Tensor, k_BSGK: Tensor, seen: Seen) -> Tensor:
    """The weights of `attend_seen`, without gradient, summed over the query heads of each key-value head, (B, G, L, S)."""
    num_groups, wide = k_BSGK.shape[2], torch.promote_types(q_BLHK.dtype, torch.float32)
    q_BHLK, k_BGSK = q_BLHK.transpose(1, 2).to(wide), k_BSGK.transpose(1, 2).to(wide)
    batch, num_heads, length, size = q_BHLK.shape
    found_BGLS = q_BHLK.new_zeros(batch, num_groups, length, k_BGSK.shape[2])
    for run in _runs(q_BHLK, k_BGSK.shape[2]):
        q_BGXK = q_BHLK[:, :, run].unflatten(1, (num_groups, -1)).flatten(2, 3)
        seen_BGIJ = seen(run)
        shown = slice(0, seen_BGIJ.shape[-1])
        scores_BGXJ = (q_BGXK @ k_BGSK[:, :, shown].mT).mul_(size**-0.5)
        scores_BGRIJ = scores_BGXJ.unflatten(2, (num_heads // num_groups, -1))
        scores_BGRIJ = scores_BGRIJ.masked_fill(~seen_BGIJ[:, :, None], float("-inf"))
        weights_BGIJ = scores_BGRIJ.softmax(-1).sum(2)
        found_BGLS[:, :, run, shown] = torch.where(seen_BGIJ.any(-1, keepdim=True), weights_BGIJ, 0)
    return found_BGLS


def _by_head(seen_BGIJ: Tensor, num_heads: int, num_groups: int) -> Tensor:
    """For each query head what its key-value head has."""
    return seen_BGIJ.repeat_interleave(num_heads // num_groups, 1) if seen_BGIJ.shape[1] > 1 else seen_BGIJ


def _runs(q_BHLK: Tensor, num_keys: int) -> Iterator[slice]:
    (batch, num_heads, length, _), itemsize = q_BHLK.shape, torch.float32.itemsize
    size = max(16, _BLOCK_BYTES // max(1, batch * num_heads * num_keys * itemsize))
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))
