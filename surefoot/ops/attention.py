"""Causal softmax attention within documents: a plain reference and the fused path of this device.

Legend: B batch, L queries, S keys, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.ops.documents import Documents
from surefoot.ops.matmul import widens_bf16


def attend(q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, docs: Documents) -> Tensor:
    """Attention of each query over the keys `docs` lets it see, scaled by 1/√K; returns (B, L, H, K) in q's dtype."""
    dtype = q_BLHK.dtype
    q_BHLK, k_BGSK, v_BGSK = (x.transpose(1, 2) for x in (q_BLHK, k_BSGK, v_BSGK))
    if dtype is torch.bfloat16 and widens_bf16(q_BLHK.device):
        q_BHLK, k_BGSK, v_BGSK = q_BHLK.float(), k_BGSK.float(), v_BGSK.float()
    is_full_pass = not docs.is_packed and docs.start == 0
    y_BHLK = F.scaled_dot_product_attention(
        q_BHLK,
        k_BGSK,
        v_BGSK,
        attn_mask=None if is_full_pass or (docs.length == 1 and not docs.is_packed) else docs.mask(),
        is_causal=is_full_pass,
        enable_gqa=q_BHLK.shape[1] != k_BGSK.shape[1],
    )
    return y_BHLK.to(dtype).transpose(1, 2)


def attend_plain(q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, docs: Documents) -> Tensor:
    """The reference of `attend`: scores, mask, softmax and sum written out."""
    num_groups = q_BLHK.shape[2] // k_BSGK.shape[2]
    k_BSHK, v_BSHK = (x.repeat_interleave(num_groups, 2) for x in (k_BSGK, v_BSGK))
    scores_BHLS = torch.einsum("blhk,bshk->bhls", q_BLHK, k_BSHK) * q_BLHK.shape[-1] ** -0.5
    weights_BHLS = scores_BHLS.masked_fill(~docs.mask(), float("-inf")).softmax(-1)
    return torch.einsum("bhls,bshk->blhk", weights_BHLS, v_BSHK)
