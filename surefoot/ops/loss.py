"""Cross-entropy straight from hidden states, a block of rows at a time, so that the logits never exist as a whole.

Legend: T tokens, D width, V vocabulary, C rows of one chunk, W rows of
the vocabulary at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surefoot.ops.autograd import apply, gradient_dtype, is_kept
from surefoot.ops.matmul import mm, widens_bf16
from surefoot.ops.native import calls

IGNORED = -100
"""The target of a position at which nothing is to be predicted."""

_CHUNK_BYTES, _BLOCK_BYTES = 1 << 25, 1 << 22
"""Logits held at once in fp32 (compiled passes hold them in bf16 alone), and of a product that is added to the weight gradient.
Small chunks lose: each reads and writes the whole weight gradient again."""


class LossSums(NamedTuple):
    """Sums over the valid tokens: `nll` in nats, `z` of the squared log-partition (both scalars; divide by tokens once)."""

    nll: Tensor
    z: Tensor


@dataclass(frozen=True)
class VocabularyPart:
    """The rows of the vocabulary that this process holds, where others hold the rest.

    `max_` and `sum_` combine a tensor over all of them in place and return it; `num_rows` is the largest part's.
    """

    start: int
    num_rows: int
    max_: Callable[[Tensor], Tensor]
    sum_: Callable[[Tensor], Tensor]


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward computes the gradients too while a chunk's logits are at hand; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        z_weight: float,
        part: VocabularyPart | None,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        narrow_VD = weight_VD.to(x_TD.dtype)
        is_training = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_x_TD = torch.empty_like(x_TD) if is_training else None
        grad_VD = torch.zeros_like(weight_VD, dtype=gradient_dtype(weight_VD)) if is_training else None
        nll, z = (torch.zeros((), dtype=wide, device=x_TD.device) for _ in range(2))
        num_rows = weight_VD.shape[0] if part is None else part.num_rows
        rows = max(64, _CHUNK_BYTES // (num_rows * wide.itemsize))
        # Made once: allocators leave holes of the sizes of large tensors that come and go in turn.
        wide_CV = x_TD.new_empty((min(rows, len(x_TD)), weight_VD.shape[0]), dtype=wide)
        as_x_CV = wide_CV if x_TD.dtype is wide else torch.empty_like(wide_CV, dtype=x_TD.dtype)
        width = weight_VD.shape[1]
        product_WD = weight_VD.new_empty((max(64, _BLOCK_BYTES // (4 * width)), width), dtype=gradient_dtype(weight_VD))
        is_exact = x_TD.dtype is wide or widens_bf16(x_TD.device)
        for start in range(0, x_TD.shape[0], rows):
            x_CD, targets_C = x_TD[start : start + rows], targets_T[start : start + rows]
            logits_CV, narrow_CV = wide_CV[: len(x_CD)], as_x_CV[: len(x_CD)]
            found = None
            if is_exact:
                mm(x_CD, narrow_VD.t(), wide, out=logits_CV)
            else:
                mm(x_CD, narrow_VD.t(), x_TD.dtype, out=narrow_CV)
                if part is None and softcap is None:
                    found = calls.cross_entropy(narrow_CV, targets_C, z_weight, writes=is_training)
            if found is not None:
                nll += found[0].sum()
                z += found[1].square().sum()
            else:
                if not is_exact:
                    logits_CV.copy_(narrow_CV)
                chunk_nll, chunk_z, grad_CV = _by_passes(
                    logits_CV, targets_C, z_weight, part, softcap, is_training=is_training
                )
                nll += chunk_nll
                z += chunk_z
                if grad_CV is not None:
                    narrow_CV = grad_CV if narrow_CV.dtype is wide else narrow_CV.copy_(grad_CV)
            if grad_x_TD is not None and grad_VD is not None:
                grad_x_TD[start : start + rows] = mm(narrow_CV, narrow_VD, x_TD.dtype)
                _add_product(grad_VD, narrow_CV, x_CD, product_WD)
        if is_training:
            ctx.save_for_backward(grad_x_TD, grad_VD)
        ctx.mark_non_differentiable(nll, z)
        return nll + z_weight * z, nll, z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        # Schedules that part backward in two come here twice; all others have no second copy of the weight's gradient.
        kept = is_kept()
        grad_x_TD, grad_VD = (_scaled(grad, grads[0].to(grad.dtype), in_place=not kept) for grad in ctx.saved_tensors)
        return grad_x_TD, grad_VD, None, None, None, None


def _scaled(grad: Tensor, factor: Tensor, *, in_place: bool) -> Tensor:
    """In place it is a tensor of its own nevertheless: only such a one becomes a weight's `.grad` without being copied."""
    return grad.mul_(factor).detach() if in_place else grad * factor


def _by_passes(
    logits_CV: Tensor,
    targets_C: Tensor,
    z_weight: float,
    part: VocabularyPart | None,
    softcap: float | None,
    *,
    is_training: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The two sums of a chunk and, in training, the gradient in the logits' place, in their dtype."""
    valid_C = (targets_C != IGNORED).to(logits_CV.dtype)
    slope_CV = None
    if softcap is not None:
        logits_CV = logits_CV.div_(softcap).tanh_()
        slope_CV = 1 - logits_CV.square() if is_training else None
        logits_CV = logits_CV.mul_(softcap)
    weights_CV, total_C1, top_C1, picked_C, safe_C1, here_C = _shares(logits_CV, targets_C, valid_C, part)
    log_total_C = (total_C1.log() + top_C1)[:, 0]
    nll, z = ((log_total_C - picked_C) * valid_C).sum(), (log_total_C.square() * valid_C).sum()
    if not is_training:
        return nll, z, None
    # d(nll + z_weight z)/dlogits = p (1 + 2 z_weight log Z) - onehot, zero where nothing is predicted
    scale_C = valid_C * (1 + 2 * z_weight * log_total_C)
    grad_CV = weights_CV.mul_(scale_C[:, None] / total_C1).scatter_add_(1, safe_C1, -here_C[:, None])
    return nll, z, grad_CV if slope_CV is None else grad_CV.mul_(slope_CV)


def _shares(
    logits_CV: Tensor, targets_C: Tensor, valid_C: Tensor, part: VocabularyPart | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """exp(logits - top) in the logits' place, its sum (C, 1), top (C, 1), the targets' logits (C,), the targets as
    indexes (C, 1), and 1 where the target is valid and among this part's rows (C,)."""
    top_C1 = logits_CV.amax(1, keepdim=True)
    if part is None:
        safe_C1 = targets_C.clamp_min(0)[:, None]
        picked_C = logits_CV.gather(1, safe_C1)[:, 0]
        weights_CV = logits_CV.sub_(top_C1).exp_()
        return weights_CV, weights_CV.sum(1, keepdim=True), top_C1, picked_C, safe_C1, valid_C
    own_C = targets_C - part.start
    is_here_C = (own_C >= 0) & (own_C < logits_CV.shape[1])
    safe_C1 = own_C.clamp(0, logits_CV.shape[1] - 1)[:, None]
    picked_C = torch.where(is_here_C, logits_CV.gather(1, safe_C1)[:, 0], 0)
    weights_CV = logits_CV.sub_(part.max_(top_C1)).exp_()
    total_C1, picked_C1 = part.sum_(torch.stack((weights_CV.sum(1), picked_C)))[..., None]
    return weights_CV, total_C1, top_C1, picked_C1[:, 0], safe_C1, valid_C * is_here_C


def _add_product(to_VD: Tensor, left_CV: Tensor, right_CD: Tensor, product_WD: Tensor) -> None:
    """Add leftᵀ right, some rows at a time, which `product_WD` has room for."""
    for rows_VD, part_CV in zip(to_VD.split(len(product_WD)), left_CV.split(len(product_WD), 1), strict=True):
        rows_VD.add_(mm(part_CV.t(), right_CD, to_VD.dtype, out=product_WD[: len(rows_VD)]))


def working_bytes(num_tokens: int, num_rows: int, width: int, dtype: torch.dtype) -> int:
    """The most that `linear_cross_entropy` takes for so many tokens in `dtype` with so many rows of the head: a chunk's logits in
    both numbers, a block of products, the weight in `dtype`, the hidden states' gradient and the weight's in fp32."""
    wide = torch.promote_types(dtype, torch.float32).itemsize
    logits = min(num_tokens, max(64, _CHUNK_BYTES // (num_rows * wide))) * num_rows
    weight, hidden = num_rows * width, num_tokens * width
    return logits * (wide + dtype.itemsize) + _BLOCK_BYTES + weight * (dtype.itemsize + wide) + hidden * dtype.itemsize


def linear_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    z_weight: float = 0.0,
    part: VocabularyPart | None = None,
    *,
    softcap: float | None = None,
) -> tuple[Tensor, LossSums]:
    """Σ nll + z_weight Σ (log Z)² over the valid targets, differentiable, and the two sums for the record.

    With a `softcap` c the logits are c tanh(x W / c). The z term keeps the logits from drifting (PaLM, Chowdhery et al.,
    2022). Softmax runs in at least fp32. With a `part` the weight holds some rows of the vocabulary only, the sums are over
    all of it, and x's gradient is this part's share.
    """
    objective, nll, z = apply(_LinearCrossEntropy, x_TD, weight_VD, targets_T, z_weight, part, softcap)
    return objective, LossSums(nll, z)


def linear_cross_entropy_plain(
    x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, z_weight: float = 0.0, softcap: float | None = None
) -> tuple[Tensor, LossSums]:
    """The reference of `linear_cross_entropy`: whole logits, by autograd."""
    logits_TV = x_TD @ weight_VD.to(x_TD.dtype).t()
    if softcap is not None:
        logits_TV = softcap * torch.tanh(logits_TV / softcap)
    log_total_T = logits_TV.to(torch.promote_types(x_TD.dtype, torch.float32)).logsumexp(-1)
    valid_T = targets_T != IGNORED
    picked_T = logits_TV.gather(1, targets_T.clamp_min(0)[:, None])[:, 0]
    nll, z = (log_total_T - picked_T)[valid_T].sum(), log_total_T.square()[valid_T].sum()
    return nll + z_weight * z, LossSums(nll.detach(), z.detach())
