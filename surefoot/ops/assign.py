"""Balanced assignment: each token to so many experts, each expert as many tokens, of the largest total score.

Legend: T tokens, E experts, K experts a token, A tokens that still want one.
"""

from __future__ import annotations

import torch
from torch import Tensor

SWEEPS = 8
"""Of prices before the auction: they make it short and decide nothing."""


@torch.no_grad()
def assign(scores_TE: Tensor, top_k: int, tolerance: float) -> Tensor:
    """The experts of each token (T, K), all different: every expert has T·K / E tokens, the first T·K mod E one more.

    By auction (Bertsekas, 1992), in fp64: a token that lacks an expert bids for the one that is worth most to it less its
    price, by as much as it is worth more than the next and `tolerance` of the scores' range more; an expert keeps the
    highest bids that it has room for, and the lowest of them is its price. The total is within T·K times that of the best.
    """
    num_tokens, num_experts = scores_TE.shape
    scores_TE = scores_TE.double()
    if top_k == num_experts:
        return torch.arange(num_experts, device=scores_TE.device).repeat(num_tokens, 1)
    low, high = scores_TE.aminmax()
    least = max(tolerance * float(high - low), 1e-9 * (1 + float(scores_TE.abs().max())))
    room_E = torch.full((num_experts,), num_tokens * top_k // num_experts, device=scores_TE.device)
    room_E[: num_tokens * top_k % num_experts] += 1
    prices_E = _sweep(scores_TE, top_k)
    none = float("-inf")
    bids_TE = torch.full_like(scores_TE, none)
    while True:
        lacking_A = ((bids_TE > none).sum(1) < top_k).nonzero().flatten()
        if not len(lacking_A):
            return (bids_TE > none).nonzero()[:, 1].view(num_tokens, top_k)
        worth_AE = (scores_TE[lacking_A] - prices_E).masked_fill(bids_TE[lacking_A] > none, none)
        best_A2, experts_A2 = worth_AE.topk(2)
        rise_A = (best_A2[:, 0] - best_A2[:, 1]).clamp(max=float(high - low)) + least
        experts_A = experts_A2[:, 0]
        bids_TE[lacking_A, experts_A] = prices_E[experts_A] + rise_A
        for expert in experts_A.unique().tolist():
            room, column_T = int(room_E[expert]), bids_TE[:, expert]
            num_bids = int((column_T > none).sum())
            if room == 0:
                column_T.fill_(none)
                prices_E[expert] = float("inf")
            elif num_bids >= room:
                kept, tokens = column_T.topk(room)
                if num_bids > room:
                    column_T.fill_(none)
                    column_T[tokens] = kept
                prices_E[expert] = torch.maximum(prices_E[expert], kept[-1])


def _sweep(scores_TE: Tensor, top_k: int) -> Tensor:
    """Prices at which the experts are wanted about alike: quantiles of what they are worth over what a token has besides."""
    num_tokens, num_experts = scores_TE.shape
    prices_E = torch.zeros_like(scores_TE[0])
    position = max(0, num_tokens - 1 - num_tokens * top_k // num_experts)
    for _ in range(SWEEPS):
        value_T1 = (scores_TE - prices_E).topk(top_k + 1).values[:, top_k - 1 :].mean(1, keepdim=True)
        prices_E = (scores_TE - value_T1).kthvalue(position + 1, 0).values
        prices_E = prices_E - prices_E.mean()
    return prices_E
