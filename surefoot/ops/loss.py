"""Cross-entropy straight from hidden states, a block of rows at a time, so that the logits never exist as a whole.

Legend: T tokens, D width, V vocabulary, C rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surefoot.ops.autograd import apply, gradient_dtype
from surefoot.ops.matmul import mm

IGNORED = -100
"""The target of a position at which nothing is to be predicted."""

_CHUNK_BYTES = 1 << 25
"""Logits held at once. Small chunks lose: each reads and writes the whole weight gradient again."""


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
        for start in range(0, x_TD.shape[0], rows):
            x_CD, targets_C = x_TD[start : start + rows], targets_T[start : start + rows]
            valid_C = (targets_C != IGNORED).to(wide)
            logits_CV = mm(x_CD, narrow_VD.t(), wide)
            slope_CV = None
            if softcap is not None:
                logits_CV = logits_CV.div_(softcap).tanh_()
                slope_CV = 1 - logits_CV.square() if is_training else None
                logits_CV = logits_CV.mul_(softcap)
            top_C1 = logits_CV.amax(1, keepdim=True)
            if part is None:
                safe_C1, here_C = targets_C.clamp_min(0)[:, None], valid_C
                picked_C = logits_CV.gather(1, safe_C1)[:, 0]
                weights_CV = logits_CV.sub_(top_C1).exp_()
                total_C1 = weights_CV.sum(1, keepdim=True)
            else:
                own_C = targets_C - part.start
                is_here_C = (own_C >= 0) & (own_C < weight_VD.shape[0])
                safe_C1, here_C = own_C.clamp(0, weight_VD.shape[0] - 1)[:, None], valid_C * is_here_C
                picked_C = torch.where(is_here_C, logits_CV.gather(1, safe_C1)[:, 0], 0)
                weights_CV = logits_CV.sub_(part.max_(top_C1)).exp_()
                total_C1, picked_C1 = part.sum_(torch.stack((weights_CV.sum(1), picked_C)))[..., None]
                picked_C = picked_C1[:, 0]
            log_total_C = (total_C1.log() + top_C1)[:, 0]
            nll += ((log_total_C - picked_C) * valid_C).sum()
            z += (log_total_C.square() * valid_C).sum()
            if grad_x_TD is None or grad_VD is None:
                continue
            # d(nll + z_weight z)/dlogits = p (1 + 2 z_weight log Z) - onehot, zero where nothing is predicted
            scale_C = valid_C * (1 + 2 * z_weight * log_total_C)
            grad_CV = weights_CV.mul_(scale_C[:, None] / total_C1).scatter_add_(1, safe_C1, -here_C[:, None])
            if slope_CV is not None:
                grad_CV *= slope_CV
            narrow_CV = grad_CV.to(x_TD.dtype)
            grad_x_TD[start : start + rows] = mm(narrow_CV, narrow_VD, x_TD.dtype)
            grad_VD += mm(narrow_CV.t(), x_CD, grad_VD.dtype)
        if is_training:
            ctx.save_for_backward(grad_x_TD, grad_VD)
        ctx.mark_non_differentiable(nll, z)
        return nll + z_weight * z, nll, z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        grad_x_TD, grad_VD = ctx.saved_tensors
        return grad_x_TD * grads[0].to(grad_x_TD.dtype), grad_VD * grads[0].to(grad_VD.dtype), None, None, None, None


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
