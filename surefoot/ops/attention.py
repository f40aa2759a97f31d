"""Causal softmax attention within documents: a plain reference and the fast path of this device.

Legend: B batch, L queries, S keys, H query heads, G key-value heads, R = H / G query heads a key-value head, K head size,
N = B·G, I queries of one block, J keys that it may see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.ops.autograd import apply
from surefoot.ops.documents import Documents
from surefoot.ops.matmul import widens_bf16

_BLOCK_BYTES = 1 << 24
"""Scores held at once on a CPU: they stay in cache, and memory grows with the length, not with its square."""

_LEAST_BLOCKS = 8
"""Blocks of queries even where one would fit: with n of them (n + 1) / 2n of the scores are computed, not all."""


def attend(q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, docs: Documents) -> Tensor:
    """Attention of each query over the keys `docs` lets it see, scaled by 1/√K; returns (B, L, H, K) in q's dtype."""
    if q_BLHK.device.type == "cpu":
        y: Tensor = apply(_BlockedAttention, q_BLHK, k_BSGK, v_BSGK, docs)
        return y
    q_BHLK, k_BGSK, v_BGSK = (x.transpose(1, 2) for x in (q_BLHK, k_BSGK, v_BSGK))
    is_full_pass = not docs.is_packed and docs.start == 0
    y_BHLK = F.scaled_dot_product_attention(
        q_BHLK,
        k_BGSK,
        v_BGSK,
        attn_mask=None if is_full_pass or (docs.length == 1 and not docs.is_packed) else docs.mask(),
        is_causal=is_full_pass,
        enable_gqa=q_BHLK.shape[1] != k_BGSK.shape[1],
    )
    return y_BHLK.transpose(1, 2)


class _BlockedAttention(torch.autograd.Function):
    """Attention by batched products over blocks of queries; scores are made again in backward.

    torch's fused kernel reaches a third of this on CPUs with fast products: 4.8 ms forward and 13.3 ms backward for 64
    heads of 256 x 32 in bf16, against about 2 and 4 (two cores with AVX512_BF16). Scores, softmax and its gradient are in
    at least fp32; the products with values, and those of the gradients, in the inputs' dtype.
    """

    @staticmethod
    def forward(ctx: Any, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, docs: Documents) -> Tensor:
        ctx.save_for_backward(q_BLHK, k_BSGK, v_BSGK)
        ctx.docs = docs
        work = _Work(q_BLHK, k_BSGK, v_BSGK, docs)
        y_NRLK = torch.empty_like(work.q_NRLK)
        for queries, num_keys in work.blocks():
            p_NRIJ = work.probabilities(queries, num_keys)
            y_NRLK[:, :, queries] = _bmm(p_NRIJ.to(work.v_NSK.dtype), work.v_NSK[:, :num_keys])
        return _heads_last(y_NRLK, q_BLHK.shape).to(q_BLHK.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_BLHK, k_BSGK, v_BSGK = ctx.saved_tensors
        work = _Work(q_BLHK, k_BSGK, v_BSGK, ctx.docs)
        dy_NRLK = _heads_first(grads[0].to(work.v_NSK.dtype), k_BSGK.shape[2])
        wide_dy_NRLK, wide_v_NSK = (x.to(work.wide) for x in (dy_NRLK, work.v_NSK))
        dq_NRLK = torch.empty_like(work.q_NRLK)
        dk_NSK, dv_NSK = (torch.zeros_like(work.k_NSK, dtype=work.wide) for _ in range(2))
        for queries, num_keys in work.blocks():
            p_NRIJ = work.probabilities(queries, num_keys)
            dv_NSK[:, :num_keys] += _bmm_t(p_NRIJ.to(dy_NRLK.dtype), dy_NRLK[:, :, queries])
            dp_NRIJ = _bmm(wide_dy_NRLK[:, :, queries], wide_v_NSK[:, :num_keys].mT)
            ds_NRIJ = torch._softmax_backward_data(dp_NRIJ, p_NRIJ, -1, work.wide).to(work.k_NSK.dtype)
            dq_NRLK[:, :, queries] = _bmm(ds_NRIJ, work.k_NSK[:, :num_keys])
            dk_NSK[:, :num_keys] += _bmm_t(ds_NRIJ, work.q_NRLK[:, :, queries])
        scale, dtype = work.scale, q_BLHK.dtype
        dq_BLHK = _heads_last(dq_NRLK.mul_(scale), q_BLHK.shape)
        dk_BSGK, dv_BSGK = (x.view(k_BSGK.shape[0], -1, *x.shape[1:]).transpose(1, 2) for x in (dk_NSK.mul_(scale), dv_NSK))
        return dq_BLHK.to(dtype), dk_BSGK.to(dtype), dv_BSGK.to(dtype), None


class _Work:
    """Operands laid out for batched products, one batch entry a key-value head, and the scores of a block."""

    def __init__(self, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, docs: Documents) -> None:
        dtype = torch.float32 if q_BLHK.dtype is torch.bfloat16 and widens_bf16(q_BLHK.device) else q_BLHK.dtype
        self.wide = torch.promote_types(dtype, torch.float32)
        self.scale = q_BLHK.shape[-1] ** -0.5
        self.docs, self.num_groups = docs, k_BSGK.shape[2]
        self.q_NRLK = _heads_first(q_BLHK.to(dtype), self.num_groups)
        self.k_NSK, self.v_NSK = (x.to(dtype).transpose(1, 2).flatten(0, 1).contiguous() for x in (k_BSGK, v_BSGK))
        self.scaled_q_NRLK = self.q_NRLK.to(self.wide) * self.scale
        self.wide_k_NSK = self.k_NSK.to(self.wide)

    def blocks(self) -> Iterator[tuple[slice, int]]:
        """Runs of queries, and how many keys the last of each may see."""
        num_heads, length, num_keys = self.q_NRLK.shape[0] * self.q_NRLK.shape[1], *self.docs_shape
        fitting = _BLOCK_BYTES // max(1, num_heads * num_keys * self.wide.itemsize)
        size = max(1, min(-(-length // _LEAST_BLOCKS), fitting), min(length, 16))
        for start in range(0, length, size):
            stop = min(start + size, length)
            yield slice(start, stop), num_keys - length + stop

    @property
    def docs_shape(self) -> tuple[int, int]:
        """Queries and keys."""
        return self.q_NRLK.shape[2], self.k_NSK.shape[1]

    def probabilities(self, queries: slice, num_keys: int) -> Tensor:
        """(N, R, I, J)."""
        scores_NRIJ = _bmm(self.scaled_q_NRLK[:, :, queries], self.wide_k_NSK[:, :num_keys].mT)
        if self.docs.is_packed:
            hidden_B1IJ = ~self.docs.mask()[:, :, queries, :num_keys]
            batch = hidden_B1IJ.shape[0]
            scores_NRIJ.view(batch, -1, *scores_NRIJ.shape[-2:]).masked_fill_(hidden_B1IJ, float("-inf"))
        elif (size := queries.stop - queries.start) > 1:
            # Only the last keys can lie after a query: those of the block itself.
            future_II = torch.ones(size, size, dtype=torch.bool).triu_(1)
            scores_NRIJ[..., num_keys - size :].masked_fill_(future_II, float("-inf"))
        return scores_NRIJ.softmax(-1)


def _heads_first(x_BLHK: Tensor, num_groups: int) -> Tensor:
    """(B, L, G·R, K) to (B·G, R, L, K)."""
    batch, length, num_heads, size = x_BLHK.shape
    x_BLGRK = x_BLHK.reshape(batch, length, num_groups, num_heads // num_groups, size)
    return x_BLGRK.permute(0, 2, 3, 1, 4).flatten(0, 1).contiguous()


def _heads_last(x_NRLK: Tensor, shape: torch.Size) -> Tensor:
    """(B·G, R, L, K) to (B, L, G·R, K)."""
    x_BHLK = x_NRLK.reshape(shape[0], shape[2], shape[1], shape[3])
    return x_BHLK.transpose(1, 2)


def _bmm(left_NRIJ: Tensor, right_NJK: Tensor) -> Tensor:
    """(N, R, I, J) times (N, J, K), as (N, R, I, K)."""
    left = left_NRIJ.flatten(1, 2)
    return torch.bmm(left, right_NJK).view(*left_NRIJ.shape[:3], -1)


def _bmm_t(left_NRIJ: Tensor, right_NRIK: Tensor) -> Tensor:
    """The transpose of the left (N, J, R·I) times (N, R·I, K)."""
    return torch.bmm(left_NRIJ.flatten(1, 2).mT, right_NRIK.flatten(1, 2))


def attend_plain(q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, docs: Documents) -> Tensor:
    """The reference of `attend`: scores, mask, softmax and sum written out."""
    num_groups = q_BLHK.shape[2] // k_BSGK.shape[2]
    k_BSHK, v_BSHK = (x.repeat_interleave(num_groups, 2) for x in (k_BSGK, v_BSGK))
    scores_BHLS = torch.einsum("blhk,bshk->bhls", q_BLHK, k_BSHK) * q_BLHK.shape[-1] ** -0.5
    weights_BHLS = scores_BHLS.masked_fill(~docs.mask(), float("-inf")).softmax(-1)
    return torch.einsum("bhls,bshk->blhk", weights_BHLS, v_BSHK)
