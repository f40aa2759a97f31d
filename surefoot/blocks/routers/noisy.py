"""Noisy top-k routing (Shazeer et al., 2017).

Legend: B sequences, T tokens, D width, E experts, K experts a token.
"""

from __future__ import annotations

import math
from typing import ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from surefoot.blocks.base import Counts, Initial, LearnedRouter, RouterConfig, Routing, Tokens
from surefoot.config import FieldError
from surefoot.ops.autograd import decided
from surefoot.ops.balance import count, variation_loss
from surefoot.ops.keyed import keyed, normal


class NoisyConfig(RouterConfig):
    """In training the k experts of the largest noisy logits, weighted by a softmax over them; else of the plain logits.

    The noise is normal, of a learned deviation for each token and expert, softplus(Vx). It is a function of the seed, the layer,
    the step, the token's id and its place in its document, so that every layout and every pass over a token draws the same.
    Both losses are squared coefficients of variation over the experts, of each sequence by itself: of their weights'
    sums, and of the sums of the probabilities that they would be chosen if their own noise were drawn again.
    """

    importance_loss: float = Field(default=0.01, ge=0, description="weight of the loss on sums of weights")
    load_loss: float = Field(default=0.01, ge=0, description="weight of the loss on sums of probabilities")
    seed: int = Field(default=0, ge=0, description="of the noise")

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `RouterConfig.examples`; heavy losses, so that a wrong one is seen."""
        return {"": cls(importance_loss=0.3, load_loss=0.2)}

    def check_top_k(self, top_k: int) -> None:
        """A softmax over one choice is 1 whatever its logit."""
        if top_k == 1:
            raise FieldError("top_k", top_k, "gives every choice weight 1, so the router cannot learn; use 2 or more")

    def build(self, *, width: int, num_experts: int, top_k: int) -> Noisy:
        """The router itself."""
        return Noisy(self, width, num_experts, top_k)


class Noisy(LearnedRouter):
    """See `NoisyConfig`. `steps_1` are the optimizer steps so far."""

    reads_tokens: ClassVar[bool] = True
    steps_1: Tensor

    def __init__(self, config: NoisyConfig, width: int, num_experts: int, top_k: int) -> None:
        super().__init__(width, num_experts, top_k)
        self.config = config
        shape, axes = (num_experts, width), ("routes", "embed")
        self.noise = self.add_weight("noise", shape, axes, Initial())
        self.add_state("steps_1", (1,), ("routes",), torch.int64)

    def forward(self, x_TD: Tensor, length: int, tokens: Tokens | None = None) -> Routing:
        """See `Router.forward`."""
        logits_TE = self.logits(x_TD)
        if not torch.is_grad_enabled():
            top_TK, experts_TK = logits_TE.topk(self.top_k)
            loads_E = count(experts_TK.view(1, -1), self.num_experts)[0]
            return Routing(experts_TK, top_TK.softmax(1), loads_E, logits_TE.new_zeros(()))
        deviations_TE = F.softplus(F.linear(x_TD.to(logits_TE.dtype), self.noise.to(logits_TE.dtype)))
        noisy_TE = logits_TE + self._noise(tokens, x_TD.device).to(logits_TE.dtype) * deviations_TE
        # One more than is chosen: what each of the chosen must beat.
        num_ranked = min(self.top_k + 1, self.num_experts)
        ranked_TN = decided(lambda: noisy_TE.detach().topk(num_ranked).indices)
        experts_TK = ranked_TN[:, : self.top_k]
        weights_TK = noisy_TE.gather(1, experts_TK).softmax(1)
        auxiliary = logits_TE.new_zeros(())
        if self.config.importance_loss:
            weights_TE = torch.zeros_like(logits_TE).scatter(1, experts_TK, weights_TK)
            auxiliary = auxiliary + self.config.importance_loss * self._uneven(weights_TE, length)
        if self.config.load_loss and self.top_k < self.num_experts:
            last_T1, next_T1 = noisy_TE.gather(1, ranked_TN[:, self.top_k - 1 :]).split(1, 1)
            is_chosen_TE = torch.zeros_like(logits_TE, dtype=torch.bool).scatter_(1, experts_TK, True)
            margins_TE = logits_TE - torch.where(is_chosen_TE, next_T1, last_T1)
            chances_TE = (1 + torch.erf(margins_TE / deviations_TE / math.sqrt(2))) / 2
            auxiliary = auxiliary + self.config.load_loss * self._uneven(chances_TE, length)
        loads_E = count(experts_TK.reshape(1, -1), self.num_experts)[0]
        return Routing(experts_TK, weights_TK, loads_E, auxiliary)

    def _noise(self, tokens: Tokens | None, device: torch.device) -> Tensor:
        if tokens is None:
            raise ValueError("noise needs the ids of the tokens")
        numbers_E = torch.arange(self.num_experts, device=device)
        ids_T1, places_T1 = tokens.ids_T[:, None], tokens.places_T[:, None]
        key = (self.config.seed, self.layer, self.steps_1, ids_T1, places_T1, numbers_E)
        return normal(keyed(*key, device=device))

    def _uneven(self, shares_TE: Tensor, length: int) -> Tensor:
        sums_BE = shares_TE.view(-1, length, self.num_experts).sum(1)
        return variation_loss(sums_BE, length, self.pool)

    @torch.no_grad()
    def balance(self, counts: Counts) -> None:  # noqa: ARG002
        """See `Router.balance`: the next step draws other noise."""
        self.steps_1 += 1

    def flops(self) -> float:
        """Forward FLOPs a token, those of the noise included, which training alone has."""
        return 2.0 * (self.weight.numel() + self.noise.numel())
