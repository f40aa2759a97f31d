"""Quantile balancing (Su, 2026): sigmoid routing whose biases are the prices of a balanced assignment.

Legend: B sequences, T tokens, D width, E experts, K experts a token, M bins.
"""

from __future__ import annotations

from typing import Self

import torch
from pydantic import Field
from torch import Tensor

from surefoot.blocks.base import Counts, LearnedRouter, RouterConfig, Routing, Tokens
from surefoot.config import FieldError
from surefoot.ops.autograd import decided
from surefoot.ops.balance import count

OCTAVES, PARTS = 12, 4
"""Bins of margins: from 2 down to 2^-11, each octave in so many equal parts, on both sides of one bin around 0."""


class QuantileConfig(RouterConfig):
    """The k experts of the largest sigmoid less price; weights are the chosen sigmoids over their sum.

    The most valuable assignment that gives each token k experts and each expert as many tokens has a price for each
    expert, and for each token the value that its choices must beat. After each optimizer step a price moves to where,
    tokens' values as they were, exactly k/E of the step's tokens would take the expert: a quantile, without a rate to
    choose. It is read from counts in bins, which add up over ranks and micro-batches, to a bin's part of its distance.
    """

    scale: float = Field(default=1.0, gt=0, description="what the weights add up to")
    keep: float = Field(
        default=0.0, ge=0, lt=1, description="share of the way to the quantile that a price stays behind"
    )

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `RouterConfig.examples`."""
        return {"": cls(scale=2.5)}

    def check_top_k(self, top_k: int) -> None:
        """One sigmoid over itself is 1 whatever its logit."""
        if top_k == 1:
            raise FieldError("top_k", top_k, "gives every choice one weight, so the router cannot learn; use 2 or more")

    def build(self, *, width: int, num_experts: int, top_k: int) -> Quantile:
        """The router itself."""
        return Quantile(self, width, num_experts, top_k)


class Quantile(LearnedRouter):
    """See `QuantileConfig`."""

    prices_E: Tensor

    def __init__(self, config: QuantileConfig, width: int, num_experts: int, top_k: int) -> None:
        super().__init__(width, num_experts, top_k, num_noted=num_experts * (2 * OCTAVES * PARTS + 1))
        self.config = config
        self.add_state("prices_E", (num_experts,), ("routes",))

    def forward(self, x_TD: Tensor, length: int, tokens: Tokens | None = None) -> Routing:  # noqa: ARG002
        """See `Router.forward`; it notes in which bin each token's margin for each expert lies."""
        scores_TE = self.logits(x_TD).sigmoid()
        priced_TE = scores_TE.detach() - self.prices_E
        num_ranked = min(self.top_k + 1, self.num_experts)
        ranked_TN = decided(lambda: priced_TE.topk(num_ranked).indices)
        experts_TK = ranked_TN[:, : self.top_k]
        chosen_TK = scores_TE.gather(1, experts_TK)
        weights_TK = self.config.scale * chosen_TK / (chosen_TK.sum(1, keepdim=True) + 1e-20)
        loads_E = count(experts_TK.reshape(1, -1), self.num_experts)[0]
        noted_N = None
        if torch.is_grad_enabled() and self.top_k < self.num_experts:
            # What a token's choices must beat: half way between the last chosen and the first not chosen.
            value_T1 = priced_TE.gather(1, ranked_TN[:, self.top_k - 1 :]).mean(1, keepdim=True)
            bins_ET = _bin(priced_TE - value_T1).T
            noted_N = count(bins_ET, 2 * OCTAVES * PARTS + 1).flatten()
        return Routing(experts_TK, weights_TK, loads_E, scores_TE.new_zeros(()), noted_N=noted_N)

    @torch.no_grad()
    def balance(self, counts: Counts) -> None:
        """See `Router.balance`."""
        histogram_EM = counts.noted_N.view(self.num_experts, -1)
        if not histogram_EM.any():  # every token has every expert
            return
        step_E = (1 - self.config.keep) * quantile(histogram_EM, 1 - self.top_k / self.num_experts)
        # The same for all changes no choice.
        self.prices_E += (step_E - step_E.mean()).to(self.prices_E)


def quantile(histogram_EM: Tensor, share: float) -> Tensor:
    """Where the first `share` of each row's margins end (E), those of one bin taken as even between its edges."""
    edges_M = _edges(histogram_EM.device)
    totals_EM = histogram_EM.cumsum(1)
    wanted_E1 = share * totals_EM[:, -1:]
    bin_E1 = torch.searchsorted(totals_EM, wanted_E1).clamp(max=histogram_EM.shape[1] - 1)
    inside_E1 = histogram_EM.gather(1, bin_E1)
    before_E1 = totals_EM.gather(1, bin_E1) - inside_E1
    part_E1 = ((wanted_E1 - before_E1) / inside_E1.clamp_min(1)).clamp(0, 1)
    low_E1, high_E1 = edges_M[bin_E1], edges_M[bin_E1 + 1]
    return (low_E1 + part_E1 * (high_E1 - low_E1))[:, 0]


def _edges(device: torch.device) -> Tensor:
    """Of the bins, in fp64, rising and symmetric around 0: one more than there are bins."""
    octave, part = torch.arange(OCTAVES, device=device), torch.arange(PARTS, device=device)
    first = 2.0 ** (1.0 - OCTAVES + octave.double())[:, None] * (1 + part.double() / PARTS)
    upper = torch.cat((first.flatten(), torch.full((1,), 2.0, dtype=torch.float64, device=device)))
    return torch.cat((-upper.flip(0), upper))


def _bin(margins_TE: Tensor) -> Tensor:
    inner_M = _edges(margins_TE.device)[1:-1].to(margins_TE.dtype)
    return torch.bucketize(margins_TE, inner_M)
