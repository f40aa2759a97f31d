"""Softmax attention without an order: each query over all keys, or over those that it is told it sees.

Legend: B batch, L queries, S keys, H heads, K head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def attend_all(q_BLHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, seen_BLS: Tensor | None = None) -> Tensor:
    """Attention at scale 1/√K, (B, L, H, K) in q's dtype; a query that sees no key gets 0, not the mean of all values."""
    blind_BL = mask_BHLS = None
    if seen_BLS is not None:
        blind_BL = ~seen_BLS.any(-1)
        # A softmax over nothing has no value: such a query may see all, and what it finds is dropped.
        mask_BHLS = (seen_BLS | blind_BL[..., None])[:, None]
    y_BHLK = F.scaled_dot_product_attention(
        q_BLHK.transpose(1, 2), k_BSHK.transpose(1, 2), v_BSHK.transpose(1, 2), attn_mask=mask_BHLS
    )
    y_BLHK = y_BHLK.transpose(1, 2)
    return y_BLHK if blind_BL is None else y_BLHK.masked_fill(blind_BL[..., None, None], 0.0)


def attend_all_plain(q_BLHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, seen_BLS: Tensor | None = None) -> Tensor:
    """The reference of `attend_all`: exponentials, their sums and what they weigh written out."""
    scores_BHLS = torch.einsum("blhk,bshk->bhls", q_BLHK, k_BSHK) * q_BLHK.shape[-1] ** -0.5
    weights_BHLS = (scores_BHLS - scores_BHLS.amax(-1, keepdim=True)).exp()
    if seen_BLS is not None:
        weights_BHLS = weights_BHLS * seen_BLS[:, None].to(weights_BHLS.dtype)
    total_BHL1 = weights_BHLS.sum(-1, keepdim=True)
    weights_BHLS = weights_BHLS / torch.where(total_BHL1 == 0, torch.ones_like(total_BHL1), total_BHL1)
    return torch.einsum("bhls,bshk->blhk", weights_BHLS, v_BSHK)
