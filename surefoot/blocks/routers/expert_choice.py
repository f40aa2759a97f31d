"""Expert-choice routing (Zhou et al., 2022): experts choose tokens, so that all have the same load.

Legend: T tokens, D width, E experts, K experts a token, C tokens an expert.
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor

from surefoot.blocks.base import LearnedRouter, RouterConfig, Routing, Tokens
from surefoot.ops.autograd import decided
from surefoot.ops.balance import count


class ExpertChoiceConfig(RouterConfig):
    """In training each expert takes the T·K/E tokens of a forward pass that score it highest; a token may get none or all.

    It looks ahead: whether a token is taken depends on later ones. A causal model trained so learns from a leak, and another
    micro-batch or layout is another function. Without gradients each token takes the K experts that it scores
    highest, which is causal and not what was trained.
    """

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `RouterConfig.examples`."""
        return {"": cls()}

    def build(self, *, width: int, num_experts: int, top_k: int) -> ExpertChoice:
        """The router itself."""
        return ExpertChoice(width, num_experts, top_k)


class ExpertChoice(LearnedRouter):
    """See `ExpertChoiceConfig`."""

    looks_ahead: ClassVar[bool] = True

    def __init__(self, width: int, num_experts: int, top_k: int) -> None:
        super().__init__(width, num_experts, top_k)

    def forward(self, x_TD: Tensor, length: int, tokens: Tokens | None = None) -> Routing:  # noqa: ARG002 - all compete
        """See `Router.forward`."""
        scores_TE = self.logits(x_TD).softmax(1)
        nothing = scores_TE.new_zeros(())
        if not torch.is_grad_enabled():
            weights_TK, experts_TK = scores_TE.topk(self.top_k)
            return Routing(experts_TK, weights_TK, count(experts_TK.view(1, -1), self.num_experts)[0], nothing)
        num_taken = max(1, len(x_TD) * self.top_k // self.num_experts)
        tokens_CE = decided(lambda: scores_TE.detach().topk(num_taken, 0).indices)
        is_taken_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(0, tokens_CE, True)
        numbers_E = torch.arange(self.num_experts, device=x_TD.device)
        experts_TE = torch.where(is_taken_TE, numbers_E, self.num_experts)
        loads_E = torch.full_like(numbers_E, num_taken)
        return Routing(experts_TE, scores_TE * is_taken_TE, loads_E, nothing, is_partial=True)
