"""How evenly tokens spread over experts, as a loss.

Legend: B sequences, T tokens, L tokens of a sequence, E experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Scope = Literal["sequence", "micro_batch"]
"""Over which tokens the shares of a balance loss are taken.

sequence: over each sequence by itself (DeepSeek-AI, 2024). The sum over all sequences is the same however they are cut
into micro-batches or spread over data-parallel ranks.
micro_batch: over all tokens of a forward pass on one rank. Weaker, since sequences may differ, but another loss for every
size of micro-batch and every number of data-parallel ranks.
"""


def count(experts_BN: Tensor, num_experts: int) -> Tensor:
    """How often each expert occurs in each row, (B, E)."""
    counts_BE = torch.zeros((experts_BN.shape[0], num_experts), dtype=torch.int64, device=experts_BN.device)
    return counts_BE.scatter_add_(1, experts_BN, torch.ones_like(experts_BN))


def balance_loss(
    scores_TE: Tensor, counts_BE: Tensor, scope: Scope, pool: Callable[[Tensor], Tensor] = lambda counts: counts
) -> Tensor:
    """Σ over tokens of E Σ_e f_e p_e (Fedus et al., 2021): f_e the share of choices that fell on e, p_e its mean score.

    Scores of a token add up to 1. So the loss is 1 a token where all is even and at most E. Counts go through `pool` and
    carry no gradient: where processes hold parts of a sequence, the sum of their losses is that of the whole.
    """
    num_experts = counts_BE.shape[1]
    sums_BE = scores_TE.view(len(counts_BE), -1, num_experts).sum(1)
    if scope == "micro_batch":
        counts_BE, sums_BE = counts_BE.sum(0, keepdim=True), sums_BE.sum(0, keepdim=True)
    counts_BE = pool(counts_BE).to(sums_BE.dtype)
    shares_BE = counts_BE / counts_BE.sum(1, keepdim=True).clamp_min(1)
    return num_experts * (shares_BE * sums_BE).sum()
