"""`Plan`: how many ranks along each axis, and what is kept where. Legality is checked before any process group exists."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from surefoot.config import Config, FieldError
from surefoot.dist.mesh import Grid
from surefoot.parallel.context import Kind


class Plan(Config):
    """A layout over `replicate` x `shard` x `context` x `tensor` ranks. Any legal plan trains the same model as one process.

    `replicate` and `shard` cut the batch; `context` cuts each sequence; `tensor` cuts each layer's heads, feed-forward width
    and vocabulary, and the sequence between them.
    """

    replicate: int = Field(
        default=1, ge=1, description="copies of everything that `shard` cuts: DDP, or HSDP with shard"
    )
    shard: int = Field(default=1, ge=1, description="ranks that share the copy of what `zero` names")
    zero: Literal[1, 2, 3] = Field(
        default=3,
        description="what is cut over `shard` ranks (ZeRO, Rajbhandari et al., 2020): 1 optimizer state, 2 also gradients, "
        "3 also weights",
    )
    reshard: int | None = Field(
        default=None, ge=2, description="ranks over which weights stay cut between forward and backward; null: all"
    )
    context: int = Field(
        default=1,
        ge=1,
        description="context-parallel ranks: each holds two chunks of every sequence, an early and a late one",
    )
    context_kind: Kind = Field(
        default="gather",
        description="how attention finds the keys of other context ranks: gather all of them (Dubey et al., 2024); ulysses "
        "exchanges sequence for heads (Jacobs et al., 2023); ring sends them round, one rank's at a time (Liu et al., 2023)",
    )
    tensor: int = Field(default=1, ge=1, description="tensor and sequence parallel ranks (Korthikanti et al., 2022)")

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        if self.reshard is not None and (self.zero != 3 or self.shard == 1):
            raise FieldError("reshard", self.reshard, "has an effect only with zero = 3 and shard above 1; drop it")
        if self.reshard is not None and self.shard % self.reshard:
            raise FieldError("reshard", self.reshard, f"must divide shard {self.shard}")
        if self.reshard is not None and self.num_ranks != self.shard:
            # FSDP2 makes the groups for it itself, and gives those of different shard groups the same name.
            raise FieldError(
                "reshard", self.reshard, "works only where `shard` is all there is; drop it or the other axes"
            )
        return self

    @property
    def grid(self) -> Grid:
        """The grid of ranks."""
        return Grid({"replicate": self.replicate, "shard": self.shard, "context": self.context, "tensor": self.tensor})

    @property
    def num_ranks(self) -> int:
        """Number of ranks in all."""
        return self.grid.num_ranks

    @property
    def num_data_ranks(self) -> int:
        """Parts into which a batch is cut."""
        return self.replicate * self.shard

    @property
    def is_fully_sharded(self) -> bool:
        """Whether FSDP2 holds the weights."""
        return self.shard > 1 and self.zero > 1

    def build(self) -> Self:
        """The plan itself: `parallel.apply` carries it out."""
        return self

    def describe(self) -> str:
        """The plan in a few words."""
        parts = [
            f"{name} {getattr(self, name)}"
            for name in ("replicate", "shard", "context", "tensor")
            if getattr(self, name) > 1
        ]
        if self.context > 1:
            parts.append(f"{self.context_kind} attention")
        if self.shard > 1:
            parts.append(f"ZeRO-{self.zero}" + (f" (reshard {self.reshard})" if self.reshard else ""))
        said = ", ".join(parts) or "one process"
        if self.context == 1 and self.context_kind != "gather":
            said += f" (context_kind {self.context_kind} has no effect with context 1)"
        return said
