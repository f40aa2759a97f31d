"""Sinkhorn routing (Clark et al., 2022): balanced by an entropic transport plan instead of a loss.

Legend: T tokens, D width, E experts, K experts a token.
"""

from __future__ import annotations

import math
from typing import ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor

from surefoot.blocks.base import LearnedRouter, RouterConfig, Routing, Tokens
from surefoot.ops.autograd import decided
from surefoot.ops.balance import count


class SinkhornConfig(RouterConfig):
    """In training the k experts of the largest entries of the balanced plan; weights are the sigmoids of the plain logits.

    It looks ahead: the plan is over all tokens of a forward pass, so later tokens and what else lies in the micro-batch
    have a part in the choice. Without gradients the k largest logits choose.
    """

    iterations: int = Field(default=16, gt=0, description="of normalising experts, then tokens")

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `RouterConfig.examples`."""
        return {"": cls()}

    def build(self, *, width: int, num_experts: int, top_k: int) -> Sinkhorn:
        """The router itself."""
        return Sinkhorn(self, width, num_experts, top_k)


class Sinkhorn(LearnedRouter):
    """See `SinkhornConfig`."""

    looks_ahead: ClassVar[bool] = True

    def __init__(self, config: SinkhornConfig, width: int, num_experts: int, top_k: int) -> None:
        super().__init__(width, num_experts, top_k)
        self.config = config

    def forward(self, x_TD: Tensor, length: int, tokens: Tokens | None = None) -> Routing:  # noqa: ARG002 - all compete
        """See `Router.forward`."""
        logits_TE = self.logits(x_TD)
        choose_TE = log_plan(logits_TE.detach(), self.config.iterations) if torch.is_grad_enabled() else logits_TE
        experts_TK = decided(lambda: choose_TE.topk(self.top_k).indices)
        loads_E = count(experts_TK.view(1, -1), self.num_experts)[0]
        return Routing(experts_TK, logits_TE.gather(1, experts_TK).sigmoid(), loads_E, logits_TE.new_zeros(()))


def log_plan(logits_TE: Tensor, iterations: int) -> Tensor:
    """Logarithm of exp(logits) scaled by rows and columns until rows add up to 1 / T and columns almost to 1 / E.

    In fp64 and in logarithms, so that no logit overflows.
    """
    num_tokens, num_experts = logits_TE.shape
    plan_TE = logits_TE.double()
    for _ in range(iterations):
        plan_TE = plan_TE - plan_TE.logsumexp(0, keepdim=True) - math.log(num_experts)
        plan_TE = plan_TE - plan_TE.logsumexp(1, keepdim=True) - math.log(num_tokens)
    return plan_TE
