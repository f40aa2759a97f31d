"""ReLU routing (ReMoE; Wang et al., 2024): a token has as many experts as have a positive gate.

Legend: B sequences (or 1, of all together), T tokens, D width, E experts, N = E + 1 counts.
"""

from __future__ import annotations

from typing import Self

import torch
from pydantic import Field
from torch import Tensor

from surefoot.blocks.base import Counts, LearnedRouter, RouterConfig, Routing, Tokens
from surefoot.ops.autograd import decided
from surefoot.ops.balance import Scope, pooled


class ReLUConfig(RouterConfig):
    """Weights are relu(Wx); an expert of weight 0 is not met. No choice is discrete, so all of it has a gradient.

    A loss on the weights keeps them few: the sum of each, times how often its expert is chosen as a share of even loads.
    After each optimizer step its coefficient is multiplied by `growth` where the whole step's tokens had more than
    top_k experts in the mean, and divided by it where they had fewer. (In the paper all layers share one coefficient; here
    each has its own, so that each comes to its own top_k.) Early steps cost as many experts as start positive: half.
    """

    start: float = Field(default=1e-8, gt=0, description="of the coefficient")
    growth: float = Field(default=1.2, gt=1, description="what a step multiplies or divides it by")
    scope: Scope = Field(
        default="sequence",
        description="tokens over which it is counted how often experts are chosen: each sequence, all of a forward pass on one "
        "rank (another loss for another micro-batch or layout), or a whole step, which takes one more pass to count",
    )

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `RouterConfig.examples`; a heavy loss, so that a wrong one is seen."""
        return {"": cls(start=0.1), "over a step": cls(start=0.1, scope="global_batch")}

    def build(self, *, width: int, num_experts: int, top_k: int) -> ReLU:
        """The router itself."""
        return ReLU(self, width, num_experts, top_k)


class ReLU(LearnedRouter):
    """See `ReLUConfig`. `growths_1` is how often the coefficient was multiplied, less how often it was divided."""

    growths_1: Tensor

    def __init__(self, config: ReLUConfig, width: int, num_experts: int, top_k: int) -> None:
        super().__init__(width, num_experts, top_k, num_noted=1)
        self.config = config
        self.add_state("growths_1", (1,), ("routes",), torch.int64)

    @property
    def whole_step(self) -> bool:
        """See `Router.whole_step`."""
        return self.config.scope == "global_batch"

    def forward(self, x_TD: Tensor, length: int, tokens: Tokens | None = None) -> Routing:  # noqa: ARG002
        """See `Router.forward`; it notes how many tokens there were."""
        logits_TE = self.logits(x_TD)
        is_positive_TE = decided(lambda: logits_TE.detach() > 0)
        weights_TE = torch.where(is_positive_TE, logits_TE, 0)
        experts_TE = torch.where(is_positive_TE, torch.arange(self.num_experts, device=x_TD.device), self.num_experts)
        counts_BE = is_positive_TE.view(-1, length, self.num_experts).sum(1)
        auxiliary = weights_TE.new_zeros(())
        if torch.is_grad_enabled():
            own_BN = torch.cat((counts_BE, torch.full_like(counts_BE[:, :1], length)), 1)
            chosen_BE, tokens_B1 = pooled(own_BN, self.config.scope, self.pool, self.step_counts).split(
                (self.num_experts, 1), 1
            )
            # 1 for an expert that has an even share of top_k choices a token.
            shares_BE = chosen_BE.to(logits_TE.dtype) * (self.num_experts / self.top_k) / tokens_B1
            sums_BE = weights_TE.view(len(chosen_BE), -1, self.num_experts).sum(1)
            coefficient_1 = self.config.start * self.config.growth ** self.growths_1.to(logits_TE.dtype)
            auxiliary = (coefficient_1 * (shares_BE * sums_BE).sum()).sum()
        noted_N = torch.full((1,), len(x_TD), dtype=torch.int64, device=x_TD.device)
        return Routing(experts_TE, weights_TE, counts_BE.sum(0), auxiliary, is_partial=True, noted_N=noted_N)

    @torch.no_grad()
    def balance(self, counts: Counts) -> None:
        """See `Router.balance`."""
        self.growths_1 += (counts.loads_E.sum() - self.top_k * counts.noted_N[0]).sign().long()
