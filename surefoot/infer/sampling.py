"""Choosing the next token from logits. Legend: B batch, V vocabulary."""

from __future__ import annotations

from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from surefoot.config import Config, FieldError


class SamplingConfig(Config):
    """Greedy at temperature 0; otherwise drawn, from the top k and the top p when given."""

    temperature: float = Field(default=0.0, ge=0)
    top_k: int | None = Field(default=None, gt=0, description="only the k likeliest")
    top_p: float | None = Field(
        default=None, gt=0, le=1, description="smallest set holding this share (Holtzman et al., 2020)"
    )
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _greedy_draws_nothing(self) -> Self:
        for name, value in (("top_k", self.top_k), ("top_p", self.top_p)):
            if value is not None and self.temperature == 0:
                raise FieldError(name, value, "has no effect at temperature 0; give a temperature above 0")
        return self

    def build(self) -> Sampler:
        """A sampler with a generator of its own."""
        return Sampler(self)


class Sampler:
    """Draws token ids; the same seed draws the same ids on every device."""

    def __init__(self, config: SamplingConfig) -> None:
        self.config = config
        self._generator = torch.Generator().manual_seed(config.seed)

    def __call__(self, logits_BV: Tensor) -> Tensor:
        """Logits (B, V) to ids (B)."""
        config = self.config
        logits_BV = logits_BV.detach().to("cpu", torch.float64)
        if config.temperature == 0:
            return logits_BV.argmax(-1)
        sorted_BV, order_BV = (logits_BV / config.temperature).sort(dim=-1, descending=True, stable=True)
        probabilities_BV = sorted_BV.softmax(-1)
        drop_BV = torch.zeros_like(probabilities_BV, dtype=torch.bool)
        if config.top_k is not None:
            drop_BV[:, config.top_k :] = True
        if config.top_p is not None:  # the likeliest stays whatever p is
            drop_BV |= (probabilities_BV.cumsum(-1) - probabilities_BV) >= config.top_p
        kept_BV = probabilities_BV.masked_fill(drop_BV, 0.0)
        choice_B1 = torch.multinomial(kept_BV, 1, generator=self._generator)
        return order_BV.gather(-1, choice_B1)[:, 0]
