"""Language models that read images: a decoder, a vision encoder, and what joins them.

Legend: B batch, L length, D width, N images a row, C channels, Y X height and width, P features an image, W their width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from surefoot.blocks.base import MixerState
from surefoot.blocks.embedding import Embedding
from surefoot.blocks.encoders.vision import VisionConfig
from surefoot.config import Config, FieldError
from surefoot.models.decoder import DecoderConfig
from surefoot.ops.documents import Documents
from surefoot.ops.loss import LossSums

Between = Callable[[int, Tensor], Tensor]


class MultimodalConfig(Config):
    """A decoder of text and an encoder of images. `parallel` lays one out; no run reads images from its data yet."""

    text: DecoderConfig
    vision: VisionConfig

    @model_validator(mode="after")
    def _loss_is_of_the_next_token_alone(self) -> Self:
        if self.text.ahead_weight:
            raise FieldError(
                "text.ahead_weight",
                self.text.ahead_weight,
                "predicts a token more, which no loss over images adds; use 0",
            )
        for layer in range(self.text.depth):
            if getattr(self.text.ffn_of(layer), "router", None) is not None:
                raise FieldError(
                    "text.ffn", "MoE", "has auxiliary losses, which no loss over images adds yet; use a dense one"
                )
        return self

    @property
    @abstractmethod
    def num_read(self) -> int:
        """Layers of the encoder that features pass."""

    @abstractmethod
    def build(self) -> Multimodal:
        """The model, its weights unfilled."""


ModelConfig = DecoderConfig | MultimodalConfig


def everything(x: Tensor) -> Tensor:
    """All of it: this process holds all tokens of a text between layers."""
    return x


class Multimodal(nn.Module):
    """What both kinds share. All rows of a batch have as many images; run other batches row by row.

    What nothing reads of the encoder (`unread`) gets no gradient. `own_run` turns what there is a token (B, L, …) into that
    of the tokens which the embedding returns; it may be swapped for a parallel form.
    """

    def __init__(self, config: MultimodalConfig) -> None:
        super().__init__()
        self.text = config.text.build()
        self.vision = config.vision.build()
        self.num_read = config.num_read
        self.own_run: Callable[[Tensor], Tensor] = everything
        for part in self.unread():
            part.requires_grad_(False)

    def unread(self) -> list[nn.Module]:
        """Parts of the encoder that no pass goes through."""
        return [*list(self.vision.layers)[self.num_read :], self.vision.norm_class]

    def stacks(self) -> dict[str, dict[str, nn.Module]]:
        """The layers that passes go through, as far as they are here, by the name of their list and their own there."""
        here = [name for name in ("text.layers", "vision.layers", "cross") if name.partition(".")[0] in self._modules]
        found = {name: dict(self.get_submodule(name).named_children()) for name in here}
        if "vision.layers" in found:
            found["vision.layers"] = dict(list(found["vision.layers"].items())[: self.num_read])
        return found

    def forward(
        self,
        tokens_BL: Tensor,
        docs: Documents,
        images_BNCYX: Tensor,
        looks: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Token ids (B, L) and images (B, N, C, Y, X) to final hidden states (B, L, D).

        `looks` is what `looks_of` finds of the whole text, of these tokens of it; where it is None they are the whole text.
        """
        looks = self.looks_of(tokens_BL, images_BNCYX) if looks is None else looks
        return self.seeing(images_BNCYX, dtype=dtype).read(tokens_BL, docs, looks, dtype=dtype)

    @abstractmethod
    def looks_of(self, tokens_BL: Tensor, images_BNCYX: Tensor, seen_BLN: Tensor | None = None) -> Tensor | None:
        """Where each token of a whole text looks, (B, L, …); None where all look at all.

        It depends on tokens that may lie elsewhere once the text is cut, so it is found before and cut as the tokens are.
        """

    @abstractmethod
    def features(self, images_BNCYX: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """What the language model reads of images, (B, …), in `dtype` (the weights' own by default)."""

    @abstractmethod
    def features_shape(self, batch: int, num_images: int) -> tuple[int, ...]:
        """Of `features`."""

    def placed(self, x_BLD: Tensor, features: Tensor, looks: Tensor | None) -> Tensor:  # noqa: ARG002
        """Embeddings of tokens, as the embedding returns them, with features in their places, if that is where they belong."""
        return x_BLD

    def between(self, features: Tensor, looks: Tensor | None) -> Between | None:  # noqa: ARG002
        """What is between layers, for `Decoder.read`."""
        return None

    def reading_layers(self) -> list[int]:
        """Layers of the language model before which something reads features."""
        return []

    @abstractmethod
    def seeing(
        self, images_BNCYX: Tensor, seen_BLN: Tensor | None = None, *, dtype: torch.dtype | None = None
    ) -> Seeing:
        """The language model that has these images before it, encoded once, in `dtype` (the weights' own by default)."""

    def loss(
        self,
        tokens_BL: Tensor,
        targets_BL: Tensor,
        docs: Documents,
        images_BNCYX: Tensor,
        looks: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, LossSums]:
        """As `Decoder.loss`, of the targets that are text; `looks` as in `forward`."""
        hidden_BLD = self(tokens_BL, docs, images_BNCYX, looks, dtype=dtype)
        return self.text.head.loss(hidden_BLD, self.textual(targets_BL))

    def textual(self, targets_BL: Tensor) -> Tensor:
        """Targets without those that stand for images."""
        return targets_BL

    @abstractmethod
    def flops(self, length: int, num_images: int) -> float:
        """Forward FLOPs of a row: `length` tokens that all see `num_images` images, scores that a mask hides counted too."""

    @abstractmethod
    def held_bytes(self, num_images: int, dtype: torch.dtype) -> int:
        """Bytes that `seeing` keeps of one row's images."""

    def _text_flops(self, length: int) -> float:
        layers = sum(layer.flops(length, causal=False) for layer in self.text._layers())
        return length * (layers + self.text.head.flops())

    def _images(self, images_BNCYX: Tensor, dtype: torch.dtype | None) -> Tensor:
        if images_BNCYX.dim() != 5 or images_BNCYX.shape[1] < 1:
            raise ValueError(
                f"images are {tuple(images_BNCYX.shape)} and must be (rows, images a row, channels, height, width)"
            )
        return images_BNCYX.flatten(0, 1).to(dtype or self.text.embedding.weight.dtype)


class Seeing:
    """A language model with images before it: what generates text calls it as it calls a `Decoder`."""

    def __init__(self, model: Multimodal) -> None:
        self.model = model

    @property
    def embedding(self) -> Embedding:
        """That of the language model."""
        return self.model.text.embedding

    def __call__(
        self,
        tokens_BL: Tensor,
        docs: Documents,
        states: Sequence[MixerState | None] | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See `Decoder.forward`."""
        return self.read(tokens_BL, docs, self.looks(tokens_BL, docs, states), states, dtype=dtype)

    @abstractmethod
    def looks(
        self, tokens_BL: Tensor, docs: Documents, states: Sequence[MixerState | None] | None = None
    ) -> Tensor | None:
        """As `Multimodal.looks_of`, of a whole text, or of the next tokens where it is read over states."""

    @abstractmethod
    def read(
        self,
        tokens_BL: Tensor,
        docs: Documents,
        looks: Tensor | None,
        states: Sequence[MixerState | None] | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The same as a call, where it is known where the tokens look."""

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder.logits`."""
        return self.model.text.logits(hidden)

    def new_states(self, batch: int, length: int, dtype: torch.dtype) -> list[MixerState | None]:
        """See `Decoder.new_states`."""
        return self.model.text.new_states(batch, length, dtype)
