"""Softmax top-k routing (Shazeer et al., 2017; Fedus et al., 2021).

Legend: B sequences, T tokens, D width, E experts, K experts a token.
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from surefoot.blocks.base import LearnedRouter, RouterConfig, Routing, Tokens
from surefoot.config import FieldError
from surefoot.ops.autograd import decided
from surefoot.ops.balance import Scope, balance_loss, count


class TopKConfig(RouterConfig):
    """The k experts of the largest logits, weighted by a softmax."""

    softmax_over: Literal["chosen", "all"] = Field(
        default="chosen",
        description="weights add up to 1 over the chosen experts (Mixtral, Qwen3) or over all (DeepSeek-V2, OLMoE)",
    )
    balance_loss: float = Field(default=0.01, ge=0, description="weight of the loss that is 1 where loads are even")
    scope: Scope = Field(
        default="sequence",
        description="tokens over which balance is asked for: each sequence, all of a forward pass on one rank (another loss "
        "for another micro-batch or layout), or a whole step, which takes one more pass to count",
    )
    z_loss: float = Field(default=1e-3, ge=0, description="weight of the squared log-partition (Zoph et al., 2022)")

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `RouterConfig.examples`; heavy losses, so that a wrong one is seen."""
        return {
            "over chosen": cls(balance_loss=0.3, z_loss=0.2),
            "over all": cls(softmax_over="all", balance_loss=0.3, z_loss=0.2),
            "over a step": cls(balance_loss=0.3, scope="global_batch"),
        }

    def check_top_k(self, top_k: int) -> None:
        """A softmax over one choice is 1 whatever its logit."""
        if top_k == 1 and self.softmax_over == "chosen":
            raise FieldError(
                "top_k", top_k, "gives every choice weight 1, so the router cannot learn; use softmax_over=all"
            )

    def build(self, *, width: int, num_experts: int, top_k: int) -> TopK:
        """The router itself."""
        return TopK(self, width, num_experts, top_k)


class TopK(LearnedRouter):
    """See `TopKConfig`. Of equal logits torch.topk picks, which looks at the token's own alone."""

    def __init__(self, config: TopKConfig, width: int, num_experts: int, top_k: int) -> None:
        super().__init__(width, num_experts, top_k)
        self.config = config

    def forward(self, x_TD: Tensor, length: int, tokens: Tokens | None = None) -> Routing:  # noqa: ARG002
        """See `Router.forward`."""
        logits_TE = self.logits(x_TD)
        experts_TK = decided(lambda: logits_TE.detach().topk(self.top_k).indices)
        top_TK = logits_TE.gather(1, experts_TK)
        log_total_T1 = logits_TE.logsumexp(1, keepdim=True)
        chosen = self.config.softmax_over == "chosen"
        weights_TK = top_TK.softmax(1) if chosen else (top_TK - log_total_T1).exp()
        counts_BE = count(experts_TK.view(-1, length * self.top_k), self.num_experts)
        auxiliary = logits_TE.new_zeros(())
        if torch.is_grad_enabled():
            if self.config.balance_loss:
                scores_TE = (logits_TE - log_total_T1).exp()
                uneven = balance_loss(scores_TE, counts_BE, self.config.scope, self.pool, self.step_counts)
                auxiliary = auxiliary + self.config.balance_loss * uneven
            if self.config.z_loss:
                auxiliary = auxiliary + self.config.z_loss * log_total_T1.square().sum()
        return Routing(experts_TK, weights_TK, counts_BE.sum(0), auxiliary)

    @property
    def whole_step(self) -> bool:
        """See `Router.whole_step`."""
        return self.config.scope == "global_batch" and self.config.balance_loss > 0
