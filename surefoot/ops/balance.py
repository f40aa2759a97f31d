"""How evenly tokens spread over experts, as a loss.

Legend: B sequences (or 1, of all together), T tokens, L tokens of a sequence, E experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Scope = Literal["sequence", "micro_batch", "global_batch"]
"""Over which tokens the shares of a balance loss are taken.

sequence: over each sequence by itself (DeepSeek-AI, 2024). The sum over all sequences is the same however they are cut
into micro-batches or spread over data-parallel ranks.
micro_batch: over all tokens of a forward pass on one rank. Weaker, since sequences may differ, but another loss for every
size of micro-batch and every number of data-parallel ranks.
global_batch: over all tokens of an optimizer step, of all ranks and micro-batches (Qiu et al., 2025): the weakest, which lets
experts specialise, and the same in every layout. Where a step is more than one pass, all passes run forward once more,
first, to count the choices: a third more time.
"""


def count(experts_BN: Tensor, num_experts: int) -> Tensor:
    """How often each expert occurs in each row, (B, E)."""
    counts_BE = torch.zeros((experts_BN.shape[0], num_experts), dtype=torch.int64, device=experts_BN.device)
    return counts_BE.scatter_add_(1, experts_BN, torch.ones_like(experts_BN))


def balance_loss(
    scores_TE: Tensor,
    counts_BE: Tensor,
    scope: Scope,
    pool: Callable[[Tensor], Tensor] = lambda counts: counts,
    step_counts: Tensor | None = None,
) -> Tensor:
    """Σ over tokens of E Σ_e f_e p_e (Fedus et al., 2021): f_e the share of choices that fell on e, p_e its mean score.

    Scores of a token add up to 1. So the loss is 1 a token where all is even and at most E. Counts go through `pool` and
    carry no gradient: where processes hold parts of a sequence, the sum of their losses is that of the whole. In global scope
    they are `step_counts`, those of the whole step, or where there are none those of this pass.
    """
    num_experts = counts_BE.shape[1]
    sums_BE = scores_TE.view(len(counts_BE), -1, num_experts).sum(1)
    counts_BE = pooled(counts_BE, scope, pool, step_counts).to(sums_BE.dtype)
    if scope != "sequence":
        sums_BE = sums_BE.sum(0, keepdim=True)
    shares_BE = counts_BE / counts_BE.sum(1, keepdim=True).clamp_min(1)
    return num_experts * (shares_BE * sums_BE).sum()


def pooled(
    counts_BN: Tensor, scope: Scope, pool: Callable[[Tensor], Tensor], step_counts: Tensor | None = None
) -> Tensor:
    """Counts of the tokens over which a loss is taken: of each sequence (B, N), or of all together (1, N)."""
    if scope == "global_batch" and step_counts is not None:
        return step_counts[None]
    return pool(counts_BN if scope == "sequence" else counts_BN.sum(0, keepdim=True))


def variation_loss(
    sums_BE: Tensor, num_tokens: int, pool: Callable[[Tensor], Tensor] = lambda counts: counts
) -> Tensor:
    """Σ over sequences of their tokens times the squared coefficient of variation of their sums (Shazeer et al., 2017):
    E Σ_e s_e² / (Σ_e s_e)² - 1, which is 0 where all experts have the same.

    Each sequence has `num_tokens` here. Where processes hold parts of it, sums go through `pool`, what the parts return adds
    up to the loss of the whole, and each has its own part of the gradient: one by the whole's sums is one by each part's.
    """
    num_experts = sums_BE.shape[1]
    own_BN = torch.cat((sums_BE.detach(), sums_BE.new_full((len(sums_BE), 1), num_tokens)), 1)
    whole_BE, lengths_B1 = pool(own_BN).split((num_experts, 1), 1)
    total_B1, squares_B1 = whole_BE.sum(1, keepdim=True), whole_BE.square().sum(1, keepdim=True)
    variation_B1 = num_experts * squares_B1 / total_B1.square() - 1
    slope_BE = 2 * num_experts * (whole_BE - squares_B1 / total_B1) / total_B1.square()
    # The first is 0 and has the gradient.
    loss: Tensor = (lengths_B1 * slope_BE * (sums_BE - sums_BE.detach())).sum() + num_tokens * variation_B1.sum()
    return loss
