"""BASE routing (Lewis et al., 2021): tokens are assigned to experts so that all have the same load.

Legend: T tokens, D width, E experts, K experts a token.
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor

from surefoot.blocks.base import LearnedRouter, RouterConfig, Routing, Tokens
from surefoot.ops.assign import assign
from surefoot.ops.autograd import decided
from surefoot.ops.balance import count


class BASEConfig(RouterConfig):
    """In training the balanced assignment of the largest total logit over the tokens of a forward pass; weights are sigmoids.

    It looks ahead: who gets an expert depends on later tokens and on what else lies in the micro-batch, so another cut of the
    batch is another function. Without gradients each token takes the k experts of its largest logits, which is causal and
    not what was trained. The paper has one expert a token; with more, a token's are all different.
    """

    tolerance: float = Field(
        default=1e-2,
        gt=0,
        le=1,
        description="how much less a choice may be worth than in the best assignment, of the range of logits",
    )

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `RouterConfig.examples`."""
        return {"": cls()}

    def build(self, *, width: int, num_experts: int, top_k: int) -> BASE:
        """The router itself."""
        return BASE(self, width, num_experts, top_k)


class BASE(LearnedRouter):
    """See `BASEConfig`."""

    looks_ahead: ClassVar[bool] = True

    def __init__(self, config: BASEConfig, width: int, num_experts: int, top_k: int) -> None:
        super().__init__(width, num_experts, top_k)
        self.config = config

    def forward(self, x_TD: Tensor, length: int, tokens: Tokens | None = None) -> Routing:  # noqa: ARG002 - all compete
        """See `Router.forward`."""
        logits_TE = self.logits(x_TD)
        # On meta nobody knows the logits; a dry run needs the shapes alone.
        is_greedy = logits_TE.is_meta or not torch.is_grad_enabled()
        experts_TK = decided(
            lambda: (
                logits_TE.detach().topk(self.top_k).indices
                if is_greedy
                else assign(logits_TE.detach(), self.top_k, self.config.tolerance)
            )
        )
        loads_E = count(experts_TK.view(1, -1), self.num_experts)[0]
        return Routing(experts_TK, logits_TE.gather(1, experts_TK).sigmoid(), loads_E, logits_TE.new_zeros(()))
