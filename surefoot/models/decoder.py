"""A decoder-only language model. Legend: B batch, L length, T = B·L tokens, D width, V vocabulary."""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from surefoot.blocks.base import FeedForwardConfig, MixerConfig, MixerState
from surefoot.blocks.embedding import Embedding
from surefoot.blocks.head import Head
from surefoot.blocks.norm import RMSNorm
from surefoot.config import Config, FieldError
from surefoot.models.routing import take_auxiliary
from surefoot.ops.documents import Documents
from surefoot.ops.loss import LossSums


class DecoderConfig(Config):
    """Embedding, `depth` pre-norm layers of a mixer and a feed-forward network, a final norm, a head."""

    vocab_size: int = Field(gt=0, description="at least the tokenizer's; more is padding that no text uses")
    width: int = Field(gt=0)
    depth: int = Field(gt=0, description="number of layers")
    mixer: MixerConfig
    ffn: FeedForwardConfig
    other_ffn: FeedForwardConfig | None = Field(default=None, description="of the layers that ffn_pattern gives an o")
    ffn_pattern: str = Field(
        default="f",
        pattern=r"^[fo]+$",
        description="which feed-forward network each layer has, f: ffn, o: other_ffn; repeated up to depth, as in "
        "of (every second) or offffff (the first of seven)",
    )
    norm_eps: float = Field(default=1e-6, gt=0)
    tied: bool = Field(default=False, description="whether the head shares the embedding's weight")
    z_loss: float = Field(
        default=1e-4, ge=0, description="weight of the squared log-partition (Chowdhery et al., 2022)"
    )
    residual_init: Literal["scaled", "zero"] = Field(
        default="scaled",
        description="how projections into the residual stream start: 1/sqrt(2 depth fan-in) (Radford et al., 2019) or 0",
    )

    @model_validator(mode="after")
    def _mixer_fits(self) -> Self:
        self.mixer.check_width(self.width)
        return self

    @model_validator(mode="after")
    def _pattern_fits(self) -> Self:
        length = len(self.ffn_pattern)
        if self.depth % length:
            raise FieldError(
                "ffn_pattern", self.ffn_pattern, f"has {length} letters, which must divide depth {self.depth}"
            )
        if ("o" in self.ffn_pattern) != (self.other_ffn is not None):
            remedy = "needs other_ffn" if self.other_ffn is None else "has no o, so other_ffn would be nowhere"
            raise FieldError("ffn_pattern", self.ffn_pattern, f"{remedy}; give both or neither")
        return self

    def ffn_of(self, layer: int) -> FeedForwardConfig:
        """The feed-forward network of a layer, counted from 0."""
        letter = self.ffn_pattern[layer % len(self.ffn_pattern)]
        return self.other_ffn if letter == "o" and self.other_ffn is not None else self.ffn

    def build(self) -> Decoder:
        """The model, its weights unfilled (`initialise` fills them); use under `torch.device("meta")` to count."""
        return Decoder(self)


class Layer(nn.Module):
    """x + mixer(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        output_scale = 0.0 if config.residual_init == "zero" else (2 * config.depth) ** -0.5
        self.norm_mixer = RMSNorm(config.width, config.norm_eps)
        self.mixer = config.mixer.build(width=config.width, output_scale=output_scale)
        self.norm_ffn = RMSNorm(config.width, config.norm_eps)
        self.ffn = config.ffn_of(index).build(width=config.width, output_scale=output_scale)

    def forward(self, x_BLD: Tensor, docs: Documents, state: MixerState | None = None) -> Tensor:
        """(B, L, D) to (B, L, D)."""
        x_BLD = x_BLD + self.mixer(self.norm_mixer(x_BLD), docs, state)
        y_BLD: Tensor = x_BLD + self.ffn(self.norm_ffn(x_BLD))
        return y_BLD


class Decoder(nn.Module):
    """A decoder-only language model; see `DecoderConfig`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.width, std=1.0 if not config.tied else config.width**-0.5)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.depth))
        self.norm = RMSNorm(config.width, config.norm_eps)
        tied = self.embedding.weight if config.tied else None
        self.head = Head(config.vocab_size, config.width, config.z_loss, tied)

    def forward(
        self,
        tokens_BL: Tensor,
        docs: Documents,
        states: list[MixerState] | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Token ids (B, L) to final hidden states (B, L, D), computed in `dtype` (the weights' own by default)."""
        x_BLD: Tensor = self.embedding(tokens_BL, dtype or self.embedding.weight.dtype)
        for index, layer in enumerate(self.layers):
            x_BLD = layer(x_BLD, docs, states[index] if states is not None else None)
        hidden: Tensor = self.norm(x_BLD)
        return hidden

    def loss(
        self, tokens_BL: Tensor, targets_BL: Tensor, docs: Documents, *, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, LossSums]:
        """The objective summed over valid targets (differentiable), and its parts; divide by the step's tokens once.

        Routers add their auxiliary losses, summed over all tokens, to the objective; `models.routing` says what they were.
        """
        objective, sums = self.head.loss(self(tokens_BL, docs, dtype=dtype), targets_BL)
        auxiliary = take_auxiliary(self)
        return (objective if auxiliary is None else objective + auxiliary), sums

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., D) to logits (..., V)."""
        scores: Tensor = self.head(hidden)
        return scores

    def new_states(self, batch: int, length: int, dtype: torch.dtype) -> list[MixerState]:
        """One empty state a layer, with room for `length` positions."""
        return [layer.mixer.new_state(batch, length, dtype) for layer in self._layers()]

    def _layers(self) -> list[Any]:
        return list(self.layers)
