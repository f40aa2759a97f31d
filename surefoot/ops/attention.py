"""Causal softmax attention within documents: a plain reference and the fast path of this device.

Legend: B batch, L queries, S keys, H query heads, G key-value heads, R = H / G query heads a key-value head, K head size;
of one block: N = B·G, I queries (times R), J keys that they may see.
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

_KEPT_BYTES = 1 << 24
"""Probabilities that one call may keep for its backward instead of making them again."""

_LEAST_BLOCKS = 4
"""Blocks of queries even where one would fit: with n of them (n + 1) / 2n of the scores are computed, not all."""


def attend(q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, docs: Documents) -> Tensor:
    """Attention of each query over the keys `docs` lets it see, scaled by 1/√K; returns (B, L, H, K) in q's dtype."""
    if docs.whole is not None:
        raise ValueError("the keys of a cut sequence are elsewhere: its attention must be swapped for a parallel form")
    if q_BLHK.device.type == "cpu":
        y: Tensor = apply(_BlockedAttention, q_BLHK, k_BSGK, v_BSGK, docs)
        return y
    q_BHLK, k_BGSK, v_BGSK = (x.transpose(1, 2) for x in (q_BLHK, k_BSGK, v_BSGK))
    is_full_pass = not docs.is_packed and docs.start == 0
    y_BHLK = F.scaled_dot_product_attention(
        q_BHLK,
        k_BGSK,
        v_BGSK,
        # As a bias that all layers share: of a mask torch would make one a layer, and keep each for backward.
        attn_mask=None
        if is_full_pass or (docs.length == 1 and not docs.is_packed)
        else _shared_bias(docs, q_BLHK.dtype),
        is_causal=is_full_pass,
        enable_gqa=q_BHLK.shape[1] != k_BGSK.shape[1],
    )
    return y_BHLK.transpose(1, 2)


class _BlockedAttention(torch.autograd.Function):
    """Attention by batched products over blocks of queries.

    torch's fused kernel reaches a third of this on CPUs with fast products: 4.8 ms forward and 13.3 ms backward for 64
    heads of 256 x 32 in bf16, against 3 and 4 (two cores with AVX512_BF16). Scores and softmax are in at least fp32, sums
    over blocks too; the products of probabilities, and those of gradients, are in the inputs' dtype.
    """

    is_costly = True

    @staticmethod
    def forward(ctx: Any, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, docs: Documents) -> Tensor:
        work = _Work(q_BLHK, k_BSGK, v_BSGK, docs)
        y_BLHK = torch.empty_like(q_BLHK)
        kept, ctx.docs = [], docs
        for run, num_keys in work.blocks():
            p_NIJ = work.probabilities(run, num_keys)
            work.place(y_BLHK, run, torch.bmm(p_NIJ, work.v_NSK[:, :num_keys]))
            if work.keeps:
                kept.append(p_NIJ)
        ctx.save_for_backward(q_BLHK, k_BSGK, v_BSGK, *kept)
        return y_BLHK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_BLHK, k_BSGK, v_BSGK, *kept = ctx.saved_tensors
        work = _Work(q_BLHK, k_BSGK, v_BSGK, ctx.docs)
        dq_BLHK = torch.empty_like(q_BLHK)
        dk_NSK, dv_NSK = (torch.zeros_like(work.k_NSK, dtype=work.wide) for _ in range(2))
        for index, (run, num_keys) in enumerate(work.blocks()):
            p_NIJ = kept[index] if kept else work.probabilities(run, num_keys)
            dy_NIK = work.take(grads[0], run)
            dv_NSK[:, :num_keys] += torch.bmm(p_NIJ.mT, dy_NIK)
            dp_NIJ = torch.bmm(dy_NIK, work.v_NSK[:, :num_keys].mT)
            ds_NIJ = torch._softmax_backward_data(dp_NIJ, p_NIJ, -1, p_NIJ.dtype)
            work.place(dq_BLHK, run, torch.bmm(ds_NIJ, work.k_NSK[:, :num_keys]).mul_(work.scale))
            dk_NSK[:, :num_keys] += torch.bmm(ds_NIJ.mT, work.take(q_BLHK, run))
        shape = (*k_BSGK.shape[:1], k_BSGK.shape[2], k_BSGK.shape[1], k_BSGK.shape[3])
        dk_BSGK, dv_BSGK = (
            x_NSK.view(shape).transpose(1, 2).to(q_BLHK.dtype) for x_NSK in (dk_NSK.mul_(work.scale), dv_NSK)
        )
        return dq_BLHK, dk_BSGK, dv_BSGK, None


class _Work:
    """Operands laid out for batched products, one batch entry a key-value head, and the scores of a block.

    The R query heads of a key-value head lie one after the other along I.
    """

    def __init__(self, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, docs: Documents) -> None:
        is_widened = q_BLHK.dtype is torch.bfloat16 and widens_bf16(q_BLHK.device)
        self.dtype = torch.float32 if is_widened else q_BLHK.dtype
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.scale = q_BLHK.shape[-1] ** -0.5
        self.docs, self.q_BLHK = docs, q_BLHK
        self.groups = (k_BSGK.shape[2], q_BLHK.shape[2] // k_BSGK.shape[2])
        self.k_NSK, self.v_NSK = (
            x_BSGK.transpose(1, 2).to(self.dtype, memory_format=torch.contiguous_format).flatten(0, 1)
            for x_BSGK in (k_BSGK, v_BSGK)
        )
        self.wide_k_NSK = self.k_NSK.to(self.wide)
        num_scores = q_BLHK[..., 0].numel() * k_BSGK.shape[1]
        self.keeps = num_scores * self.dtype.itemsize <= _KEPT_BYTES

    def blocks(self) -> Iterator[tuple[slice, int]]:
        """Runs of queries, and how many keys the last of each may see."""
        (batch, length, num_heads, _), num_keys = self.q_BLHK.shape, self.k_NSK.shape[1]
        fitting = _BLOCK_BYTES // (batch * num_heads * num_keys * self.wide.itemsize)
        size = min(length, max(16, min(-(-length // _LEAST_BLOCKS), fitting)))
        for start in range(0, length, size):
            stop = min(start + size, length)
            yield slice(start, stop), num_keys - length + stop

    def take(self, x_BLHK: Tensor, run: slice) -> Tensor:
        """A run of queries (or of their gradients) as an operand, (N, I, K)."""
        x_BGRIK = x_BLHK[:, run].unflatten(2, self.groups).permute(0, 2, 3, 1, 4)
        taken: Tensor = x_BGRIK.to(self.dtype, memory_format=torch.contiguous_format)
        return taken.flatten(2, 3).flatten(0, 1)

    def place(self, x_BLHK: Tensor, run: slice, y_NIK: Tensor) -> None:
        """Put a product back where its queries are."""
        x_BGRIK = x_BLHK[:, run].unflatten(2, self.groups).permute(0, 2, 3, 1, 4)
        x_BGRIK.copy_(y_NIK.view(x_BGRIK.shape))

    def probabilities(self, run: slice, num_keys: int) -> Tensor:
        """(N, I, J) in the products' dtype."""
        q_NIK = self.take(self.q_BLHK, run).to(self.wide) * self.scale
        scores_NIJ = torch.bmm(q_NIK, self.wide_k_NSK[:, :num_keys].mT)
        size = run.stop - run.start
        scores_BHIJ = scores_NIJ.view(self.q_BLHK.shape[0], -1, size, num_keys)
        if self.docs.is_packed:
            scores_BHIJ += _shared_bias(self.docs, self.wide)[:, :, run, :num_keys]
        elif size > 1:
            # Only the block's own keys can lie after one of its queries.
            scores_BHIJ[..., num_keys - size :] += self.docs.derive(
                ("causal", size, self.wide), lambda: _bias(torch.ones(size, size, dtype=torch.bool).tril_(), self.wide)
            )
        # In place: memory of this size that is not in use a moment before costs more to touch than softmax does.
        return torch.softmax(scores_NIJ, -1, out=scores_NIJ).to(self.dtype)


def _shared_bias(docs: Documents, dtype: torch.dtype) -> Tensor:
    """The bias that hides what `docs` hides, (B, 1, L, S)."""
    return docs.derive(("bias", dtype), lambda: _bias(docs.mask(), dtype))


def _bias(is_seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key is seen and -inf where not."""
    return torch.zeros(is_seen.shape, dtype=dtype, device=is_seen.device).masked_fill_(~is_seen, float("-inf"))


def attend_plain(q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, docs: Documents) -> Tensor:
    """The reference of `attend`: scores, mask, softmax and sum written out."""
    num_groups = q_BLHK.shape[2] // k_BSGK.shape[2]
    k_BSHK, v_BSHK = (x.repeat_interleave(num_groups, 2) for x in (k_BSGK, v_BSGK))
    scores_BHLS = torch.einsum("blhk,bshk->bhls", q_BLHK, k_BSHK) * q_BLHK.shape[-1] ** -0.5
    weights_BHLS = scores_BHLS.masked_fill(~docs.mask(), float("-inf")).softmax(-1)
    return torch.einsum("bhls,bshk->blhk", weights_BHLS, v_BSHK)
