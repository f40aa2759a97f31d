"""Short causal convolution along the sequence, a filter a channel, that starts anew with each document.

Legend: B batch, L length, C channels, K taps, R runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.ops.documents import Documents
from surefoot.ops.runs import Runs, before_runs


def causal_conv(
    x_BLC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    docs: Documents,
    runs: Runs,
    tail_BKC: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y[t] = Σ_k weight[:, K-1-k] x[t-k] over the K - 1 positions before t in its own document, and the tail for what follows.

    `tail_BKC` (B, K-1, C) holds the positions before the first; zeros where there are none. Returns (B, L, C) in x's dtype,
    added up in at least fp32, and the last K - 1 positions.
    """
    length, past = x_BLC.shape[1], weight_CK.shape[1] - 1
    dtype = torch.promote_types(x_BLC.dtype, torch.float32)
    if length < runs.num_runs * past and runs.num_runs > 1:
        raise ValueError(f"runs of {length // runs.num_runs} positions are shorter than a convolution's past of {past}")
    if runs.num_runs == 1:
        tail_BKC = (
            x_BLC.new_zeros((x_BLC.shape[0], past, x_BLC.shape[2])) if tail_BKC is None else tail_BKC.to(x_BLC.dtype)
        )
        before_BRKC = tail_BKC[:, None]
    else:
        before_BRKC = before_runs(x_BLC, past, runs, tail_BKC)
    whole_BRMC = torch.cat((before_BRKC, x_BLC.unflatten(1, (runs.num_runs, -1))), 2)
    run = length // runs.num_runs
    taps_KC = weight_CK.to(dtype).t()
    y_BLC = x_BLC.to(dtype) * taps_KC[past]
    for shift in range(1, past + 1):
        shifted_BLC = whole_BRMC[:, :, past - shift : past - shift + run].flatten(1, 2)
        is_own = (docs.positions >= shift)[..., None]
        y_BLC = y_BLC + torch.where(is_own, shifted_BLC.to(dtype) * taps_KC[past - shift], 0)
    if bias_C is not None:
        y_BLC = y_BLC + bias_C.to(dtype)
    return y_BLC.to(x_BLC.dtype), whole_BRMC[:, -1, whole_BRMC.shape[2] - past :]
