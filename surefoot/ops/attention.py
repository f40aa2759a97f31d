"""Causal softmax attention within documents: a plain reference and the fast path of this device.

Legend: B batch, L queries, S keys, H query heads, G key-value heads, R = H / G query heads a key-value head, K head size,
V size of a value; of one block: N = B·G, I queries (times R), J keys that some of them see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.ops.autograd import apply
from surefoot.ops.documents import EVERYTHING, Documents, Reach
from surefoot.ops.matmul import widens_bf16
from surefoot.ops.scores import PLAIN, Scores

_BLOCK_BYTES = 1 << 24
"""Scores held at once on a CPU: they stay in cache, and memory grows with the length, not with its square."""

_KEPT_BYTES = 1 << 24
"""Probabilities that one call may keep for its backward instead of making them again."""

_LEAST_BLOCKS = 4
"""Blocks of queries even where one would fit: with n of them (n + 1) / 2n of the scores are computed, not all."""


class Attend(Protocol):
    """The signature of `attend`, which parallel forms share."""

    def __call__(
        self,
        q_BLHK: Tensor,
        k_BSGK: Tensor,
        v_BSGV: Tensor,
        docs: Documents,
        scores: Scores = PLAIN,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """(B, L, H, V)."""


def attend(
    q_BLHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    docs: Documents,
    scores: Scores = PLAIN,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention of each query over the keys that `docs` and `scores` let it see; returns (B, L, H, V) in q's dtype.

    A sink is one more score of its head, of no key: it takes weight and gives nothing (gpt-oss; OpenAI, 2025).
    """
    if docs.whole is not None:
        raise ValueError("the keys of a cut sequence are elsewhere: its attention must be swapped for a parallel form")
    # torch's kernels know neither softcap nor sinks.
    if q_BLHK.device.type == "cpu" or scores.softcap is not None or sinks_H is not None:
        y: Tensor = apply(_BlockedAttention, q_BLHK, k_BSGK, v_BSGV, sinks_H, docs, scores)
        return y
    return attend_fused(q_BLHK, k_BSGK, v_BSGV, docs, scores)


def attend_fused(q_BLHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, docs: Documents, scores: Scores = PLAIN) -> Tensor:
    """`attend` by torch's fused kernels, which hide keys by a bias: a window saves no work here."""
    most = scores.reach.most
    reach = EVERYTHING if most is None or k_BSGK.shape[1] <= most else scores.reach
    is_all_seen = not docs.is_packed and reach == EVERYTHING
    is_full_pass = is_all_seen and docs.start == 0
    y_BHLV = F.scaled_dot_product_attention(
        q_BLHK.transpose(1, 2),
        k_BSGK.transpose(1, 2),
        v_BSGV.transpose(1, 2),
        # As a bias that all layers share: of a mask torch would make one a layer, and keep each for backward.
        attn_mask=None
        if is_full_pass or (is_all_seen and docs.length == 1)
        else _shared_bias(docs, q_BLHK.dtype, reach),
        is_causal=is_full_pass,
        scale=scores.factor(q_BLHK.shape[-1]),
        enable_gqa=q_BLHK.shape[2] != k_BSGK.shape[2],
    )
    return y_BHLV.transpose(1, 2)


class _BlockedAttention(torch.autograd.Function):
    """Attention by batched products over blocks of queries and the keys in their reach.

    torch's fused kernel reaches a third of this on CPUs with fast products: 4.8 ms forward and 13.3 ms backward for 64
    heads of 256 x 32 in bf16, against 3 and 4 (two cores with AVX512_BF16). Scores and softmax are in at least fp32, sums
    over blocks too; the products of probabilities, and those of gradients, are in the inputs' dtype.
    """

    is_costly = True

    @staticmethod
    def forward(
        ctx: Any,
        q_BLHK: Tensor,
        k_BSGK: Tensor,
        v_BSGV: Tensor,
        sinks_H: Tensor | None,
        docs: Documents,
        scores: Scores,
    ) -> Tensor:
        work = _Work(q_BLHK, k_BSGK, v_BSGV, sinks_H, docs, scores)
        y_BLHV = q_BLHK.new_empty(*q_BLHK.shape[:3], v_BSGV.shape[-1])
        kept, ctx.docs, ctx.scores = [], docs, scores
        for run, keys in work.blocks():
            p_NIJ = work.weigh(run, keys).p_NIJ
            work.place(y_BLHV, run, torch.bmm(p_NIJ, work.v_NSV[:, keys]))
            if work.keeps:
                kept.append(p_NIJ)
        ctx.save_for_backward(q_BLHK, k_BSGK, v_BSGV, sinks_H, *kept)
        return y_BLHV

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None]:
        q_BLHK, k_BSGK, v_BSGV, sinks_H, *kept = ctx.saved_tensors
        work = _Work(q_BLHK, k_BSGK, v_BSGV, sinks_H, ctx.docs, ctx.scores)
        dq_BLHK = torch.empty_like(q_BLHK)
        dk_NSK, dv_NSV = (torch.zeros_like(x, dtype=work.wide) for x in (work.k_NSK, work.v_NSV))
        dsinks_H = None if sinks_H is None else torch.zeros_like(sinks_H, dtype=work.wide)
        for index, (run, keys) in enumerate(work.blocks()):
            p_NIJ, slope_NIJ, sunk_NI1 = _Weights(kept[index]) if kept else work.weigh(run, keys)
            dy_NIV = work.take(grads[0], run)
            dv_NSV[:, keys] += torch.bmm(p_NIJ.mT, dy_NIV)
            dp_NIJ = torch.bmm(dy_NIV, work.v_NSV[:, keys].mT)
            if dsinks_H is not None and sunk_NI1 is not None:
                along_NI1 = torch.linalg.vecdot(p_NIJ.to(work.wide), dp_NIJ.to(work.wide))[..., None]
                dsinks_H -= work.by_head(sunk_NI1 * along_NI1).sum((0, 2))
            # Holds for rows that sum to less than 1 too: a sink's part has no output to be pulled by.
            ds_NIJ = torch._softmax_backward_data(dp_NIJ, p_NIJ, -1, p_NIJ.dtype)
            if slope_NIJ is not None:
                ds_NIJ = (ds_NIJ * slope_NIJ).to(ds_NIJ.dtype)
            work.place(dq_BLHK, run, torch.bmm(ds_NIJ, work.k_NSK[:, keys]).mul_(work.scale))
            dk_NSK[:, keys] += torch.bmm(ds_NIJ.mT, work.take(q_BLHK, run))
        dk_BSGK, dv_BSGV = (
            x_NSK.unflatten(0, (k_BSGK.shape[0], -1)).transpose(1, 2).to(q_BLHK.dtype)
            for x_NSK in (dk_NSK.mul_(work.scale), dv_NSV)
        )
        dsinks_H = None if dsinks_H is None or sinks_H is None else dsinks_H.to(sinks_H.dtype)
        return dq_BLHK, dk_BSGK, dv_BSGV, dsinks_H, None, None


class _Weights(NamedTuple):
    """Of one block: probabilities in the products' dtype, the slope of the softcap where there is one, what sinks took."""

    p_NIJ: Tensor
    slope_NIJ: Tensor | None = None
    sunk_NI1: Tensor | None = None


class _Work:
    """Operands laid out for batched products, one batch entry a key-value head, and the scores of a block.

    The R query heads of a key-value head lie one after the other along I.
    """

    def __init__(
        self,
        q_BLHK: Tensor,
        k_BSGK: Tensor,
        v_BSGV: Tensor,
        sinks_H: Tensor | None,
        docs: Documents,
        scores: Scores,
    ) -> None:
        is_widened = q_BLHK.dtype is torch.bfloat16 and widens_bf16(q_BLHK.device)
        self.dtype = torch.float32 if is_widened else q_BLHK.dtype
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.docs, self.q_BLHK, self.sinks_H = docs, q_BLHK, sinks_H
        self.softcap, self.reach, self.scale = scores.softcap, scores.reach, scores.factor(q_BLHK.shape[-1])
        self.groups = (k_BSGK.shape[2], q_BLHK.shape[2] // k_BSGK.shape[2])
        self.k_NSK, self.v_NSV = (
            x_BSGK.transpose(1, 2).to(self.dtype, memory_format=torch.contiguous_format).flatten(0, 1)
            for x_BSGK in (k_BSGK, v_BSGV)
        )
        self.wide_k_NSK = self.k_NSK.to(self.wide)
        (batch, self.length, num_heads, _), self.num_keys = q_BLHK.shape, k_BSGK.shape[1]
        most = -(-self.length // _LEAST_BLOCKS)
        widest = self.num_keys
        if self.reach.most is not None and self.reach.window is not None:
            # Blocks as long as the window compute twice what is seen; shorter ones have too little for a product.
            most = min(most, self.reach.window)
            widest = min(widest, self.reach.most + max(16, most))
        fitting = _BLOCK_BYTES // (batch * num_heads * widest * self.wide.itemsize)
        self.size = min(self.length, max(16, min(most, fitting)))
        is_simple = self.softcap is None and sinks_H is None
        self.keeps = is_simple and batch * num_heads * self.length * widest * self.dtype.itemsize <= _KEPT_BYTES

    def blocks(self) -> Iterator[tuple[slice, slice | Tensor]]:
        """Runs of queries, and the keys that some of each see: none of those that all are out of reach of."""
        for start in range(0, self.length, self.size):
            run = slice(start, min(start + self.size, self.length))
            yield run, self._keys(run)

    def _keys(self, run: slice) -> slice | Tensor:
        offset = self.num_keys - self.length
        stop, window = offset + run.stop, self.reach.window
        start = 0 if window is None else max(0, offset + run.start + 1 - window)
        if self.reach.first == 0:
            return slice(start, stop)
        # Where documents start differs between rows: then all keys before are looked at.
        if self.docs.is_packed or start <= self.reach.first:
            return slice(0, stop)
        return torch.tensor([*range(self.reach.first), *range(start, stop)], device=self.q_BLHK.device)

    def take(self, x_BLHK: Tensor, run: slice) -> Tensor:
        """A run of queries (or of their gradients) as an operand, (N, I, K)."""
        x_BGRIK = x_BLHK[:, run].unflatten(2, self.groups).permute(0, 2, 3, 1, 4)
        taken: Tensor = x_BGRIK.to(self.dtype, memory_format=torch.contiguous_format)
        return taken.flatten(2, 3).flatten(0, 1)

    def place(self, x_BLHK: Tensor, run: slice, y_NIK: Tensor) -> None:
        """Put a product back where its queries are."""
        x_BGRIK = x_BLHK[:, run].unflatten(2, self.groups).permute(0, 2, 3, 1, 4)
        x_BGRIK.copy_(y_NIK.view(x_BGRIK.shape))

    def by_head(self, x_NI1: Tensor) -> Tensor:
        """(B, H, queries)."""
        return x_NI1.view(self.q_BLHK.shape[0], self.q_BLHK.shape[2], -1)

    def weigh(self, run: slice, keys: slice | Tensor) -> _Weights:
        """The probabilities of a block and what their gradient needs."""
        q_NIK = self.take(self.q_BLHK, run).to(self.wide) * self.scale
        scores_NIJ, slope_NIJ = torch.bmm(q_NIK, self.wide_k_NSK[:, keys].mT), None
        if self.softcap is not None:
            tanh_NIJ = scores_NIJ.div_(self.softcap).tanh_()
            slope_NIJ = 1 - tanh_NIJ.square()
            scores_NIJ = tanh_NIJ.mul_(self.softcap)
        self._hide(scores_NIJ, run, keys)
        # In place: memory of this size that is not in use a moment before costs more to touch than softmax does.
        if self.sinks_H is None:
            return _Weights(torch.softmax(scores_NIJ, -1, out=scores_NIJ).to(self.dtype), slope_NIJ)
        total_NI1 = scores_NIJ.logsumexp(-1, keepdim=True)
        sinks_GR1 = self.sinks_H.to(self.wide).view(*self.groups, 1)
        size = run.stop - run.start
        sinks_NI1 = sinks_GR1.expand(-1, -1, size).reshape(self.groups[0], -1, 1).repeat(self.q_BLHK.shape[0], 1, 1)
        all_NI1 = torch.logaddexp(total_NI1, sinks_NI1)
        p_NIJ = scores_NIJ.sub_(all_NI1).exp_().to(self.dtype)
        return _Weights(p_NIJ, slope_NIJ, (sinks_NI1 - all_NI1).exp())

    def _hide(self, scores_NIJ: Tensor, run: slice, keys: slice | Tensor) -> None:
        """-inf for what a query may not see."""
        size, num_keys = run.stop - run.start, scores_NIJ.shape[-1]
        scores_BHIJ = scores_NIJ.view(self.q_BLHK.shape[0], -1, size, num_keys)
        if self.reach.window is None:
            if self.docs.is_packed:
                scores_BHIJ += _shared_bias(self.docs, self.wide, self.reach)[:, :, run, keys]
            elif size > 1:
                # Only the block's own keys can lie after one of its queries.
                scores_BHIJ[..., num_keys - size :] += self.docs.derive(
                    ("causal", size, self.wide),
                    lambda: _bias(
                        torch.ones(size, size, dtype=torch.bool, device=scores_NIJ.device).tril_(), self.wide
                    ),
                )
        elif size > 1 or self.docs.is_packed:
            offset = self.num_keys - self.length
            queries = slice(offset + run.start, offset + run.stop)
            # Blocks of one document differ by a shift alone.
            is_shifted = not self.docs.is_packed and self.reach.first == 0
            place = () if is_shifted else (run.start,)
            scores_BHIJ += self.docs.derive(
                ("reach", self.reach, size, num_keys, self.wide, *place),
                lambda: _bias(self.docs.mask_between(queries, keys, self.reach), self.wide),
            )


def _shared_bias(docs: Documents, dtype: torch.dtype, reach: Reach) -> Tensor:
    """The bias that hides what `docs` hides, (B, 1, L, S)."""
    return docs.derive(("bias", dtype, reach), lambda: _bias(docs.mask(reach), dtype))


def _bias(is_seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key is seen and -inf where not."""
    return torch.zeros(is_seen.shape, dtype=dtype, device=is_seen.device).masked_fill_(~is_seen, float("-inf"))


def attend_plain(
    q_BLHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    docs: Documents,
    scores: Scores = PLAIN,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """The reference of `attend`: scores, mask, softmax and sum written out."""
    num_groups = q_BLHK.shape[2] // k_BSGK.shape[2]
    k_BSHK, v_BSHV = (x.repeat_interleave(num_groups, 2) for x in (k_BSGK, v_BSGV))
    scores_BHLS = torch.einsum("blhk,bshk->bhls", q_BLHK, k_BSHK) * scores.factor(q_BLHK.shape[-1])
    if scores.softcap is not None:
        scores_BHLS = scores.softcap * torch.tanh(scores_BHLS / scores.softcap)
    scores_BHLS = scores_BHLS.masked_fill(~docs.mask(scores.reach), float("-inf"))
    if sinks_H is not None:
        column_BHL1 = sinks_H.to(q_BLHK.dtype)[:, None, None].expand(*scores_BHLS.shape[:3], 1)
        scores_BHLS = torch.cat((scores_BHLS, column_BHL1), -1)
    weights_BHLS = scores_BHLS.softmax(-1)[..., : k_BSGK.shape[1]]
    return torch.einsum("bhls,bshv->blhv", weights_BHLS, v_BSHV)
