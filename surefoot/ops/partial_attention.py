"""Attention of some queries over some of their keys, in parts that are merged afterwards (Liu et al., 2023).

A part is (y, lse): the output over its keys alone, and the log of the sum of exp(score) over them. Two parts over
different keys merge to the part over both, which is the softmax over all keys once all are in (Milakov and Gimelshein,
2018). The gradient needs the final y and lse only (Dao et al., 2022), so it falls apart into the same pieces.

Parts are in at least fp32 whatever the inputs are.

Of `Scores` only scale and softcap are looked at: what is in reach, `seen` says.

Legend: B batch, I queries, J keys, H query heads, G key-value heads, R = H / G, K head size, V size of a value.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from surefoot.ops.matmul import widens_bf16
from surefoot.ops.scores import PLAIN, Scores

_BLOCK_BYTES = 1 << 24
"""Scores held at once by the plain form."""

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_part(
    q_BHIK: Tensor, k_BGJK: Tensor, v_BGJV: Tensor, seen_B1IJ: Tensor | None = None, scores: Scores = PLAIN
) -> tuple[Tensor, Tensor]:
    """Output (B, H, I, V) and log-sum-exp (B, H, I) over these keys; `seen` hides some of them.

    A query that sees none of them has output 0 and log-sum-exp -inf. fp32 on a CPU, and bf16 where its products are
    widened, run torch's fused kernel where there is no softcap and values are as large as keys; all else the plain form.
    """
    q_BHIK, k_BGJK, v_BGJV = _operands(q_BHIK, k_BGJK, v_BGJV)
    if not _has_kernel(q_BHIK, v_BGJV, scores):
        return attend_part_plain(q_BHIK, k_BGJK, v_BGJV, seen_B1IJ, scores)
    k_BHJK, v_BHJK = (_for_each_query_head(x, q_BHIK) for x in (k_BGJK, v_BGJV))
    scale = scores.factor(q_BHIK.shape[-1])
    y_BHIK, lse_BHI = _FLASH(q_BHIK, k_BHJK, v_BHJK, attn_mask=_bias(seen_B1IJ, q_BHIK), scale=scale)
    if seen_B1IJ is not None:
        # The kernel calls the log-sum-exp of nothing 0.
        lse_BHI = lse_BHI.masked_fill(~seen_B1IJ.any(-1), float("-inf"))
    return y_BHIK, lse_BHI


def attend_part_backward(
    dy_BHIV: Tensor,
    q_BHIK: Tensor,
    k_BGJK: Tensor,
    v_BGJV: Tensor,
    y_BHIV: Tensor,
    lse_BHI: Tensor,
    seen_B1IJ: Tensor | None = None,
    scores: Scores = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys add to the gradients of q, k and v, given the merged `y` and `lse` of all keys."""
    q_BHIK, k_BGJK, v_BGJV = _operands(q_BHIK, k_BGJK, v_BGJV)
    if not _has_kernel(q_BHIK, v_BGJV, scores):
        return attend_part_backward_plain(dy_BHIV, q_BHIK, k_BGJK, v_BGJV, y_BHIV, lse_BHI, seen_B1IJ, scores)
    k_BHJK, v_BHJK = (_for_each_query_head(x, q_BHIK) for x in (k_BGJK, v_BGJV))
    bias, scale = _bias(seen_B1IJ, q_BHIK), scores.factor(q_BHIK.shape[-1])
    dq_BHIK, dk_BHJK, dv_BHJK = _FLASH_BACKWARD(
        dy_BHIV.to(q_BHIK.dtype), q_BHIK, k_BHJK, v_BHJK, y_BHIV, lse_BHI, 0.0, False, attn_mask=bias, scale=scale
    )
    num_groups = k_BGJK.shape[1]
    return dq_BHIK, *(x.unflatten(1, (num_groups, -1)).sum(2) for x in (dk_BHJK, dv_BHJK))


def merge(y_BHIK: Tensor, lse_BHI: Tensor, other_y_BHIK: Tensor, other_lse_BHI: Tensor) -> tuple[Tensor, Tensor]:
    """The part over the keys of two; one that saw nothing, of lse -inf, leaves the other as it is."""
    total_BHI = torch.logaddexp(lse_BHI, other_lse_BHI)
    finite_BHI = total_BHI.clamp_min(torch.finfo(total_BHI.dtype).min)
    shares = ((lse - finite_BHI).exp()[..., None] for lse in (lse_BHI, other_lse_BHI))
    return y_BHIK * next(shares) + other_y_BHIK * next(shares), total_BHI


def attend_part_plain(
    q_BHIK: Tensor, k_BGJK: Tensor, v_BGJV: Tensor, seen_B1IJ: Tensor | None = None, scores: Scores = PLAIN
) -> tuple[Tensor, Tensor]:
    """`attend_part` written out, some queries at a time; for any device and dtype."""
    wide = torch.promote_types(q_BHIK.dtype, torch.float32)
    y_BHIV = q_BHIK.new_empty((*q_BHIK.shape[:3], v_BGJV.shape[-1]), dtype=wide)
    lse_BHI = q_BHIK.new_empty(q_BHIK.shape[:3], dtype=wide)
    for rows in _blocks(q_BHIK, k_BGJK, wide):
        scores_BHIJ, _ = _scores(q_BHIK[:, :, rows], k_BGJK, seen_B1IJ, rows, scores)
        top_BHI1 = scores_BHIJ.amax(-1, keepdim=True)
        top_BHI1 = top_BHI1.masked_fill(top_BHI1 == float("-inf"), 0)
        p_BHIJ = scores_BHIJ.sub_(top_BHI1).exp_()
        total_BHI1 = p_BHIJ.sum(-1, keepdim=True)
        # The top score alone adds 1: less than that is nothing seen.
        y_BHIV[:, :, rows] = _times(p_BHIJ.to(v_BGJV.dtype), v_BGJV).to(wide) / total_BHI1.clamp_min(1)
        lse_BHI[:, :, rows] = (total_BHI1.log() + top_BHI1)[..., 0]
    return y_BHIV, lse_BHI


def attend_part_backward_plain(
    dy_BHIV: Tensor,
    q_BHIK: Tensor,
    k_BGJK: Tensor,
    v_BGJV: Tensor,
    y_BHIV: Tensor,
    lse_BHI: Tensor,
    seen_B1IJ: Tensor | None = None,
    scores: Scores = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_part_backward` written out, some queries at a time; for any device and dtype."""
    wide, dtype = torch.promote_types(q_BHIK.dtype, torch.float32), q_BHIK.dtype
    dq_BHIK = torch.empty_like(q_BHIK, dtype=wide)
    dk_BGJK, dv_BGJV = (torch.zeros_like(x, dtype=wide) for x in (k_BGJK, v_BGJV))
    wide_dy_BHIV, wide_v_BGJV, num_groups = dy_BHIV.to(wide), v_BGJV.to(wide), k_BGJK.shape[1]
    delta_BHI1 = (wide_dy_BHIV * y_BHIV).sum(-1, keepdim=True)
    scale = scores.factor(q_BHIK.shape[-1])
    for rows in _blocks(q_BHIK, k_BGJK, wide):
        scores_BHIJ, slope_BHIJ = _scores(q_BHIK[:, :, rows], k_BGJK, seen_B1IJ, rows, scores)
        p_BHIJ = scores_BHIJ.sub_(lse_BHI[:, :, rows, None]).exp_()
        dv_BGJV += _times_t(p_BHIJ.to(dtype), dy_BHIV[:, :, rows].to(dtype), num_groups)
        dp_BHIJ = _times(wide_dy_BHIV[:, :, rows], wide_v_BGJV.mT)
        ds_BHIJ = dp_BHIJ.sub_(delta_BHI1[:, :, rows]).mul_(p_BHIJ).mul_(scale)
        if slope_BHIJ is not None:
            ds_BHIJ.mul_(slope_BHIJ)
        ds_BHIJ = ds_BHIJ.to(dtype)
        dq_BHIK[:, :, rows] = _times(ds_BHIJ, k_BGJK).to(wide)
        dk_BGJK += _times_t(ds_BHIJ, q_BHIK[:, :, rows], num_groups)
    return dq_BHIK, dk_BGJK, dv_BGJV


def _operands(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What products run on: bf16 widened where this machine multiplies fp32 faster."""
    is_widened = tensors[0].dtype is torch.bfloat16 and widens_bf16(tensors[0].device)
    return tuple(x.float() for x in tensors) if is_widened else tensors


def _has_kernel(q: Tensor, v: Tensor, scores: Scores) -> bool:
    is_known = scores.softcap is None and q.shape[-1] == v.shape[-1]
    return is_known and q.device.type == "cpu" and q.dtype is torch.float32


def _for_each_query_head(x_BGJK: Tensor, q_BHIK: Tensor) -> Tensor:
    num_each = q_BHIK.shape[1] // x_BGJK.shape[1]
    return x_BGJK if num_each == 1 else x_BGJK.repeat_interleave(num_each, 1)


def _bias(seen_B1IJ: Tensor | None, x: Tensor) -> Tensor | None:
    return None if seen_B1IJ is None else x.new_zeros(seen_B1IJ.shape).masked_fill_(~seen_B1IJ, float("-inf"))


def _blocks(q_BHIK: Tensor, k_BGJK: Tensor, wide: torch.dtype) -> Iterator[slice]:
    num_heads, length = q_BHIK.shape[0] * q_BHIK.shape[1], q_BHIK.shape[2]
    size = max(16, _BLOCK_BYTES // max(1, num_heads * k_BGJK.shape[2] * wide.itemsize))
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _scores(
    q_BHIK: Tensor, k_BGJK: Tensor, seen_B1IJ: Tensor | None, rows: slice, scores: Scores
) -> tuple[Tensor, Tensor | None]:
    """Scores, -inf where nothing is seen, and the slope of the softcap."""
    wide, slope_BHIJ = torch.promote_types(q_BHIK.dtype, torch.float32), None
    scores_BHIJ = _times(q_BHIK.to(wide) * scores.factor(q_BHIK.shape[-1]), k_BGJK.to(wide).mT)
    if scores.softcap is not None:
        tanh_BHIJ = scores_BHIJ.div_(scores.softcap).tanh_()
        slope_BHIJ = 1 - tanh_BHIJ.square()
        scores_BHIJ = tanh_BHIJ.mul_(scores.softcap)
    if seen_B1IJ is not None:
        scores_BHIJ.masked_fill_(~seen_B1IJ[:, :, rows], float("-inf"))
    return scores_BHIJ, slope_BHIJ


def _times(left_BHIX: Tensor, right_BGXY: Tensor) -> Tensor:
    """(B, H, I, Y): every query head with its key-value head."""
    stacked_BGTX = left_BHIX.unflatten(1, (right_BGXY.shape[1], -1)).flatten(2, 3)
    product_BHIY: Tensor = (stacked_BGTX @ right_BGXY).view(*left_BHIX.shape[:3], -1)
    return product_BHIY


def _times_t(left_BHIJ: Tensor, right_BHIK: Tensor, num_groups: int) -> Tensor:
    """(B, G, J, K): the transpose of the left, summed over the query heads of a key-value head."""
    left_BGTJ, right_BGTK = (x.unflatten(1, (num_groups, -1)).flatten(2, 3) for x in (left_BHIJ, right_BHIK))
    product_BGJK: Tensor = left_BGTJ.mT @ right_BGTK
    return product_BGJK
