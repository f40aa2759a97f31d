"""Mixture of experts: a SwiGLU network in parts, of which each token meets a few. No token is dropped unless room is limited.

Legend: B batch, L length, T = B·L tokens, D width, F hidden width of an expert, E experts, K experts a token,
N = T·K choices, R rows: as many, less the choices of no expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from surefoot.blocks.base import (
    EXAMPLE_EXPERTS,
    TOKENS,
    Dispatch,
    Experts,
    FeedForwardConfig,
    Initial,
    Routed,
    RouterConfig,
    Routing,
    Shared,
    Tokens,
)
from surefoot.blocks.routers.topk import TopKConfig
from surefoot.config import FieldError
from surefoot.ops.balance import count
from surefoot.ops.documents import Documents
from surefoot.ops.rows import copy_rows, sum_rows
from surefoot.ops.runs import OneRun, Runs
from surefoot.ops.swiglu import swiglu


class MoEConfig(FeedForwardConfig):
    """`top_k` of `num_experts` SwiGLU networks a token, chosen by a router, and a shared one that all tokens meet."""

    num_experts: int = Field(gt=0)
    top_k: int = Field(gt=0, description="experts a token")
    hidden: int = Field(gt=0, description="width between the projections of an expert")
    shared_hidden: int = Field(default=0, ge=0, description="that of the shared experts together; 0: there are none")
    shared_weight: Literal["one", "sigmoid"] = Field(
        default="one", description="what the shared network counts: 1, or a learned share a token (Qwen2-MoE, 2024)"
    )
    capacity_factor: float | None = Field(
        default=None,
        gt=0,
        description="in training an expert has room for this times an even share of each document's choices; what comes later "
        "in the document is dropped (Lepikhin et al., 2021, whose groups are here documents); null: nothing is",
    )
    router: RouterConfig = TopKConfig()

    @model_validator(mode="after")
    def _enough_experts(self) -> Self:
        if self.top_k > self.num_experts:
            raise FieldError("top_k", self.top_k, f"must be at most num_experts {self.num_experts}")
        self.router.check_top_k(self.top_k)
        self.router.check_experts(self.num_experts, self.top_k)
        if self.shared_weight != "one" and not self.shared_hidden:
            raise FieldError("shared_weight", self.shared_weight, "needs shared experts; set shared_hidden")
        return self

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `MixerConfig.examples`."""
        return {
            "fine-grained": cls(num_experts=EXAMPLE_EXPERTS, top_k=2, hidden=12),
            "shared expert": cls(num_experts=EXAMPLE_EXPERTS, top_k=2, hidden=12, shared_hidden=16),
            "weighted shared expert": cls(
                num_experts=EXAMPLE_EXPERTS, top_k=2, hidden=12, shared_hidden=16, shared_weight="sigmoid"
            ),
            "limited room": cls(num_experts=EXAMPLE_EXPERTS, top_k=2, hidden=12, capacity_factor=0.75),
        }

    def build(self, *, width: int, output_scale: float) -> MoE:
        """The network itself."""
        return MoE(self, width, output_scale)


class Local:
    """All experts are here: tokens are sorted by expert, those of one expert in their own order."""

    def send(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """See `Dispatch.send`."""
        top_k = routing.experts_TK.shape[1]
        order_N = routing.experts_TK.flatten().argsort(stable=True)
        rows_N = torch.empty_like(order_N)
        rows_N[order_N] = torch.arange(len(order_N), device=order_N.device)
        # Choices of no expert sort last: they make no row.
        num_rows = int(routing.loads_E.sum()) if routing.is_partial and not order_N.is_meta else len(order_N)
        rows_TK = rows_N.clamp(max=num_rows).view(-1, top_k)
        x_RD = copy_rows(x_TD, order_N[:num_rows] // top_k, rows_TK)
        return x_RD, routing.loads_E, lambda y_RD: sum_rows(y_RD, rows_TK, routing.weights_TK)


class SwiGLUExperts(Experts):
    """The networks themselves."""

    def __init__(self, config: MoEConfig, width: int, output_scale: float) -> None:
        super().__init__()
        self.hidden = config.hidden
        self.used = {"experts": config.top_k / config.num_experts}
        fan_in, shape = Initial(std=width**-0.5), (config.num_experts, config.hidden, width)
        self.w_gate = self.add_weight("w_gate", shape, ("experts", "ffn", "embed"), fan_in)
        self.w_up = self.add_weight("w_up", shape, ("experts", "ffn", "embed"), fan_in)
        self.w_down = self.add_weight(
            "w_down",
            (config.num_experts, width, config.hidden),
            ("experts", "embed", "ffn"),
            Initial(std=output_scale * config.hidden**-0.5),
        )

    def forward(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        """See `Experts.forward`."""
        h_RF = swiglu(self.grouped_linear(x_RD, counts_E, "w_gate"), self.grouped_linear(x_RD, counts_E, "w_up"))
        return self.grouped_linear(h_RF, counts_E, "w_down")

    @property
    def share(self) -> float:
        """See `Experts.share`."""
        return self.w_gate.shape[1] / self.hidden


class MoE(Routed):
    """See `MoEConfig`."""

    def __init__(self, config: MoEConfig, width: int, output_scale: float) -> None:
        super().__init__()
        self.config = config
        self.router = config.router.build(width=width, num_experts=config.num_experts, top_k=config.top_k)
        self.dispatch: Dispatch = Local()
        self.runs: Runs = OneRun()
        self.experts: Experts = SwiGLUExperts(config, width, output_scale)
        fan_in = Initial(std=width**-0.5)
        if config.shared_hidden:
            shared = (config.shared_hidden, width)
            self.shared_gate = self.add_weight("shared_gate", shared, ("ffn", "embed"), fan_in)
            self.shared_up = self.add_weight("shared_up", shared, ("ffn", "embed"), fan_in)
            self.shared_down = self.add_weight(
                "shared_down", shared[::-1], ("embed", "ffn"), Initial(std=output_scale * config.shared_hidden**-0.5)
            )
        if config.shared_weight == "sigmoid":
            self.shared_share = self.add_weight("shared_share", (1, width), ("routes", "embed"), fan_in)

    def forward(self, x_BLD: Tensor, docs: Documents | None = None, shared: Shared | None = None) -> Tensor:
        """See `Routed.forward`; the router keeps its auxiliary losses until they are taken."""
        x_TD = x_BLD.flatten(0, 1)
        batch, length = x_BLD.shape[:2]
        docs = Documents(None, length, device=x_BLD.device) if docs is None else docs
        tokens = None
        if self.router.reads_tokens and shared is not None and TOKENS in shared:
            places_T = docs.positions.expand(batch, length).flatten()
            tokens = Tokens(shared[TOKENS].flatten(), places_T)
        routing: Routing = self.router(x_TD, length, tokens)
        carried = routing
        if self.config.capacity_factor is not None and torch.is_grad_enabled():
            carried = self._within_room(routing, docs, batch, self.config.capacity_factor)
        # The weights say how much of each expert is here: under tensor parallelism every rank routes all its tokens, and
        # gradients are summed over the ranks.
        dropped = None if carried is routing else (routing.loads_E - carried.loads_E).sum()
        self.router.keep(routing, self.experts.share, dropped)
        x_RD, counts_E, back = self.dispatch.send(x_TD, carried)
        y_BLD = back(self.experts(x_RD, counts_E)).view_as(x_BLD)
        if not self.config.shared_hidden:
            return y_BLD
        shared_BLF = swiglu(self.linear(x_BLD, "shared_gate"), self.linear(x_BLD, "shared_up"))
        shared_BLD = self.linear(shared_BLF, "shared_down")
        if self.config.shared_weight == "sigmoid":
            shared_BLD = shared_BLD * self.linear(x_BLD, "shared_share").sigmoid()
        return y_BLD + shared_BLD

    def _within_room(self, routing: Routing, docs: Documents, batch: int, factor: float) -> Routing:
        """Without the choices for which an expert has no room left in their document: those of its later tokens."""
        num_experts, whole = self.config.num_experts, docs.whole or docs
        sizes_T, numbers_T = whole.derive(("in documents", batch), lambda: _in_documents(whole, batch))
        room_T = (factor * self.config.top_k / num_experts * sizes_T).ceil().long()
        by_run = routing.experts_TK.view(batch, self.runs.num_runs, -1, routing.experts_TK.shape[1])
        in_order = self.runs.spread(by_run)
        experts_TK = in_order.flatten(0, 2)
        # By document, then expert, in the order of tokens: how many of their kind came before.
        kinds_N = (numbers_T[:, None] * (num_experts + 1) + experts_TK).flatten()
        order_N = kinds_N.argsort(stable=True)
        sorted_N = kinds_N[order_N]
        before_N = torch.empty_like(order_N)
        before_N[order_N] = torch.arange(len(order_N), device=order_N.device) - torch.searchsorted(sorted_N, sorted_N)
        has_room_TK = before_N.view_as(experts_TK) < room_T[:, None]
        has_room_TK = self.runs.pick(has_room_TK.view_as(in_order)).reshape_as(routing.experts_TK)
        is_in_TK = has_room_TK & (routing.experts_TK < num_experts)
        kept_TK = torch.where(is_in_TK, routing.experts_TK, num_experts)
        loads_E = count(kept_TK.view(1, -1), num_experts + 1)[0, :-1]
        weights_TK = torch.where(is_in_TK, routing.weights_TK, 0)
        return routing._replace(experts_TK=kept_TK, weights_TK=weights_TK, loads_E=loads_E, is_partial=True)

    def flops(self) -> float:
        """Forward FLOPs a token: the router, and the experts that it meets, if nothing is dropped."""
        experts = sum(weight.numel() for weight in self.experts.parameters()) * self.experts.used["experts"]
        shared: int = sum(getattr(self, name).numel() for name in self.axes)
        return self.router.flops() + 2.0 * (experts + shared)


def _in_documents(docs: Documents, batch: int) -> tuple[Tensor, Tensor]:
    """For each token how many its document has in its row, and a number that its document alone has; (T,) each."""
    whole = docs.positions.expand(batch, docs.length)
    numbers_T = ((whole == 0) | (torch.arange(docs.length, device=whole.device) == 0)).flatten().cumsum(0) - 1
    return torch.bincount(numbers_T)[numbers_T], numbers_T
