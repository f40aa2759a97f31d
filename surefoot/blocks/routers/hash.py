"""Hash routing (Roller et al., 2021): a token's experts follow from its id alone.

Legend: T tokens, D width, E experts, K experts a token.
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor

from surefoot.blocks.base import Router, RouterConfig, Routing, Tokens
from surefoot.ops.balance import count
from surefoot.ops.keyed import keyed


class HashConfig(RouterConfig):
    """The k experts whose hashes of the token's id are largest (Thaler and Ravishankar, 1998), of equal weight.

    Each layer hashes otherwise. Nothing is learned, and loads are as even as words are frequent: the expert of a frequent
    word has more.
    """

    seed: int = Field(default=0, ge=0, description="of the hash")

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `RouterConfig.examples`."""
        return {"": cls()}

    def build(self, *, width: int, num_experts: int, top_k: int) -> Hash:  # noqa: ARG002 - it has no weights
        """The router itself."""
        return Hash(self, num_experts, top_k)


class Hash(Router):
    """See `HashConfig`."""

    reads_tokens: ClassVar[bool] = True

    def __init__(self, config: HashConfig, num_experts: int, top_k: int) -> None:
        super().__init__(num_experts, top_k)
        self.config = config

    def forward(self, x_TD: Tensor, length: int, tokens: Tokens | None = None) -> Routing:  # noqa: ARG002
        """See `Router.forward`."""
        if tokens is None:
            raise ValueError("hash routing needs the ids of the tokens")
        numbers_E = torch.arange(self.num_experts, device=x_TD.device)
        hashes_TE = keyed(self.config.seed, self.layer, tokens.ids_T[:, None], numbers_E, device=x_TD.device)
        experts_TK = hashes_TE.topk(self.top_k).indices
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        weights_TK = torch.full(experts_TK.shape, 1 / self.top_k, dtype=wide, device=x_TD.device)
        loads_E = count(experts_TK.view(1, -1), self.num_experts)[0]
        return Routing(experts_TK, weights_TK, loads_E, weights_TK.new_zeros(()))

    def flops(self) -> float:
        """Forward FLOPs a token: no product."""
        return 0.0
