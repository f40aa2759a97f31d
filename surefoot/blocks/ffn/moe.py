"""Mixture of experts: a SwiGLU network in parts, of which each token meets a few. No token is dropped.

Legend: B batch, L length, T = B·L tokens, D width, F hidden width of an expert, E experts, K experts a token,
R = T·K rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from surefoot.blocks.base import Dispatch, FeedForwardConfig, Initial, Routed, RouterConfig, Routing
from surefoot.blocks.routers.topk import TopKConfig
from surefoot.config import FieldError
from surefoot.ops.rows import copy_rows, sum_rows
from surefoot.ops.swiglu import swiglu


class MoEConfig(FeedForwardConfig):
    """`top_k` of `num_experts` SwiGLU networks a token, chosen by a router, and a shared one that all tokens meet."""

    num_experts: int = Field(gt=0)
    top_k: int = Field(gt=0, description="experts a token")
    hidden: int = Field(gt=0, description="width between the projections of an expert")
    shared_hidden: int = Field(default=0, ge=0, description="that of the shared experts together; 0: there are none")
    router: RouterConfig = TopKConfig()

    @model_validator(mode="after")
    def _enough_experts(self) -> Self:
        if self.top_k > self.num_experts:
            raise FieldError("top_k", self.top_k, f"must be at most num_experts {self.num_experts}")
        self.router.check_top_k(self.top_k)
        return self

    def build(self, *, width: int, output_scale: float) -> MoE:
        """The network itself."""
        return MoE(self, width, output_scale)


class Local:
    """All experts are here: tokens are sorted by expert, those of one expert in their own order."""

    def send(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """See `Dispatch.send`."""
        top_k = routing.experts_TK.shape[1]
        order_R = routing.experts_TK.flatten().argsort(stable=True)
        rows_R = torch.empty_like(order_R)
        rows_R[order_R] = torch.arange(len(order_R), device=order_R.device)
        rows_TK = rows_R.view(-1, top_k)
        x_RD = copy_rows(x_TD, order_R // top_k, rows_TK)
        return x_RD, routing.loads_E, lambda y_RD: sum_rows(y_RD, rows_TK, routing.weights_TK)


class MoE(Routed):
    """See `MoEConfig`."""

    def __init__(self, config: MoEConfig, width: int, output_scale: float) -> None:
        super().__init__()
        self.config = config
        self.used = {"experts": config.top_k / config.num_experts}
        self.router = config.router.build(width=width, num_experts=config.num_experts, top_k=config.top_k)
        self.dispatch: Dispatch = Local()
        fan_in, experts = Initial(std=width**-0.5), (config.num_experts, config.hidden, width)
        self.w_gate = self.add_weight("w_gate", experts, ("experts", "ffn", "embed"), fan_in)
        self.w_up = self.add_weight("w_up", experts, ("experts", "ffn", "embed"), fan_in)
        self.w_down = self.add_weight(
            "w_down",
            (config.num_experts, width, config.hidden),
            ("experts", "embed", "ffn"),
            Initial(std=output_scale * config.hidden**-0.5),
        )
        if config.shared_hidden:
            shared = (config.shared_hidden, width)
            self.shared_gate = self.add_weight("shared_gate", shared, ("ffn", "embed"), fan_in)
            self.shared_up = self.add_weight("shared_up", shared, ("ffn", "embed"), fan_in)
            self.shared_down = self.add_weight(
                "shared_down", shared[::-1], ("embed", "ffn"), Initial(std=output_scale * config.shared_hidden**-0.5)
            )

    def forward(self, x_BLD: Tensor) -> Tensor:
        """(B, L, D) to (B, L, D); the router keeps its auxiliary losses until they are taken."""
        x_TD = x_BLD.flatten(0, 1)
        routing: Routing = self.router(x_TD, x_BLD.shape[1])
        # The weights say how much of each expert is here: under tensor parallelism every rank routes all its tokens, and
        # gradients are summed over the ranks.
        self.router.keep(routing, self.w_gate.shape[1] / self.config.hidden)
        x_RD, counts_E, back = self.dispatch.send(x_TD, routing)
        h_RF = swiglu(self.grouped_linear(x_RD, counts_E, "w_gate"), self.grouped_linear(x_RD, counts_E, "w_up"))
        y_BLD = back(self.grouped_linear(h_RF, counts_E, "w_down")).view_as(x_BLD)
        if not self.config.shared_hidden:
            return y_BLD
        shared_BLF = swiglu(self.linear(x_BLD, "shared_gate"), self.linear(x_BLD, "shared_up"))
        return y_BLD + self.linear(shared_BLF, "shared_down")

    def flops(self) -> float:
        """Forward FLOPs a token: the router, and the experts that it meets."""
        flops = self.router.flops()
        for name, axes in self.axes.items():
            size: int = getattr(self, name).numel()
            flops += 2.0 * size * (self.used["experts"] if "experts" in axes else 1.0)
        return flops
