"""Sigmoid routing balanced by a bias instead of a loss (Wang et al., 2024; DeepSeek-AI, 2024).

Legend: B sequences, T tokens, D width, E experts, K experts a token; G groups of N experts, of which a token has M.
"""

from __future__ import annotations

from typing import Self

import torch
from pydantic import Field
from torch import Tensor

from surefoot.blocks.base import Counts, LearnedRouter, RouterConfig, Routing, Tokens
from surefoot.config import FieldError
from surefoot.ops.autograd import decided
from surefoot.ops.balance import Scope, balance_loss, count


class SigmoidConfig(RouterConfig):
    """The k experts of the largest sigmoid plus bias; weights are the chosen sigmoids over their sum.

    After each optimizer step the bias of an expert that the whole step chose less often than the mean goes up by
    `bias_rate`, of one chosen more often down. It decides who is chosen, has no gradient and no part in the weights.
    """

    bias_rate: float = Field(default=1e-3, ge=0, description="what a bias moves in a step")
    scale: float = Field(default=1.0, gt=0, description="what the weights add up to (2.5 in DeepSeek-V3)")
    num_groups: int = Field(default=1, gt=0, description="runs of experts next to each other, one a node, say")
    top_groups: int = Field(
        default=1, gt=0, description="groups a token's experts come from: those whose two best add up to most"
    )
    balance_loss: float = Field(default=1e-4, ge=0, description="weight of the loss that is 1 where loads are even")
    scope: Scope = Field(
        default="sequence",
        description="tokens over which that loss asks for balance: each sequence, all of a forward pass on one rank (another "
        "loss for another micro-batch or layout), or a whole step, which takes one more pass to count",
    )
    z_loss: float = Field(default=0.0, ge=0, description="weight of the squared log-partition (Zoph et al., 2022)")

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `RouterConfig.examples`."""
        return {
            "scaled": cls(balance_loss=0.3, scale=2.5, z_loss=0.2),
            "in groups": cls(balance_loss=0.3, num_groups=4, top_groups=2),
            "over a step": cls(balance_loss=0.3, scope="global_batch"),
        }

    def check_top_k(self, top_k: int) -> None:
        """One sigmoid over itself is 1 whatever its logit."""
        if top_k == 1:
            raise FieldError("top_k", top_k, "gives every choice one weight, so the router cannot learn; use 2 or more")

    def check_experts(self, num_experts: int, top_k: int) -> None:
        """Groups are of one size, of two experts or more, and those left hold enough."""
        size, rest = divmod(num_experts, self.num_groups)
        if rest or (self.num_groups > 1 and size < 2):
            raise FieldError(
                "router.num_groups", self.num_groups, f"must give {num_experts} experts groups of 2 or more"
            )
        if self.top_groups > self.num_groups or self.top_groups * size < top_k:
            raise FieldError(
                "router.top_groups",
                self.top_groups,
                f"must be {-(-top_k // size)} to num_groups {self.num_groups}, to hold top_k {top_k} experts",
            )

    def build(self, *, width: int, num_experts: int, top_k: int) -> Sigmoid:
        """The router itself."""
        return Sigmoid(self, width, num_experts, top_k)


class Sigmoid(LearnedRouter):
    """See `SigmoidConfig`. Of equal scores torch.topk picks, which looks at the token's own alone."""

    bias_E: Tensor

    def __init__(self, config: SigmoidConfig, width: int, num_experts: int, top_k: int) -> None:
        super().__init__(width, num_experts, top_k)
        self.config = config
        self.add_state("bias_E", (num_experts,), ("routes",))

    def forward(self, x_TD: Tensor, length: int, tokens: Tokens | None = None) -> Routing:  # noqa: ARG002
        """See `Router.forward`."""
        logits_TE = self.logits(x_TD)
        scores_TE = logits_TE.sigmoid()
        experts_TK = decided(lambda: self._eligible(scores_TE.detach() + self.bias_E).topk(self.top_k).indices)
        chosen_TK = scores_TE.gather(1, experts_TK)
        # The floor is DeepSeek-V3's: all sigmoids of a token may vanish.
        weights_TK = self.config.scale * chosen_TK / (chosen_TK.sum(1, keepdim=True) + 1e-20)
        counts_BE = count(experts_TK.view(-1, length * self.top_k), self.num_experts)
        auxiliary = scores_TE.new_zeros(())
        if torch.is_grad_enabled() and self.config.balance_loss:
            even_TE = scores_TE / (scores_TE.sum(1, keepdim=True) + 1e-20)
            uneven = balance_loss(even_TE, counts_BE, self.config.scope, self.pool, self.step_counts)
            auxiliary = auxiliary + self.config.balance_loss * uneven
        if torch.is_grad_enabled() and self.config.z_loss:
            auxiliary = auxiliary + self.config.z_loss * logits_TE.logsumexp(1).square().sum()
        return Routing(experts_TK, weights_TK, counts_BE.sum(0), auxiliary)

    @property
    def whole_step(self) -> bool:
        """See `Router.whole_step`."""
        return self.config.scope == "global_batch" and self.config.balance_loss > 0

    def _eligible(self, scores_TE: Tensor) -> Tensor:
        """The scores, -inf outside of a token's groups (DeepSeek-AI, 2024): those of the largest sums of their two best."""
        if self.config.top_groups == self.config.num_groups:
            return scores_TE
        scores_TGN = scores_TE.view(len(scores_TE), self.config.num_groups, -1)
        groups_TM = scores_TGN.topk(2).values.sum(2).topk(self.config.top_groups).indices
        is_out_TG = torch.ones_like(scores_TGN[..., 0], dtype=torch.bool).scatter_(1, groups_TM, False)
        return scores_TGN.masked_fill(is_out_TG[..., None], float("-inf")).view_as(scores_TE)

    @torch.no_grad()
    def balance(self, counts: Counts) -> None:
        """See `Router.balance`."""
        loads_E = counts.loads_E.to(self.bias_E)
        self.bias_E += self.config.bias_rate * (loads_E.mean() - loads_E).sign()
