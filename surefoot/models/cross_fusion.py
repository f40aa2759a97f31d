"""Language models with layers between their own that read images (Flamingo; Alayrac et al., 2022).

Legend: B batch, L length, D width, N images a row, C channels, Y X height and width, P features an image, W their width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from surefoot.blocks.base import MixerState
from surefoot.blocks.fusion.cross_attention import CrossAttention, CrossAttentionConfig, Memory
from surefoot.blocks.fusion.resampler import ResamplerConfig
from surefoot.config import FieldError
from surefoot.models.multimodal import Between, Multimodal, MultimodalConfig, Seeing
from surefoot.ops.documents import Documents


class CrossFusionConfig(MultimodalConfig):
    """Flamingo (Alayrac et al., 2022): before every `every`-th layer, from the first on, one more reads the images."""

    cross: CrossAttentionConfig
    every: int = Field(default=1, gt=0, description="must divide the depth of the decoder")
    resampler: ResamplerConfig | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self.cross.check_width(self.text.width)
        if self.text.depth % self.every:
            raise FieldError("every", self.every, f"must divide the depth of the decoder, {self.text.depth}")
        if self.text.connection.num_streams != 1:
            raise FieldError("text.connection", type(self.text.connection).__name__, "must have one stream")
        return self

    @property
    def num_read(self) -> int:
        """See `MultimodalConfig.num_read`."""
        return self.vision.depth

    def build(self) -> CrossFusion:
        """See `MultimodalConfig.build`."""
        return CrossFusion(self)


class CrossFusion(Multimodal):
    """See `CrossFusionConfig`."""

    def __init__(self, config: CrossFusionConfig) -> None:
        super().__init__(config)
        self.config = config
        features, width = config.vision.width, config.text.width
        self.resampler = None if config.resampler is None else config.resampler.build(width=features)
        num = config.text.depth // config.every
        self.cross = nn.ModuleList(config.cross.build(width=width, features=features) for _ in range(num))

    def seeing(
        self, images_BNCYX: Tensor, seen_BLN: Tensor | None = None, *, dtype: torch.dtype | None = None
    ) -> SeeingAcross:
        """See `Multimodal.seeing`. `seen_BLN` says which images each token sees (all where it is None).

        Positions from L on see what the last one given does.
        """
        _check_seen(seen_BLN, *images_BNCYX.shape[:2])
        return SeeingAcross(self, self.features(images_BNCYX, dtype), seen_BLN)

    def features(self, images_BNCYX: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """See `Multimodal.features`: (B, N, P, W)."""
        features_NPW = self.vision(self._images(images_BNCYX, dtype), self.num_read)
        if self.resampler is not None:
            features_NPW = self.resampler(features_NPW)
        found_BNPW: Tensor = features_NPW.unflatten(0, images_BNCYX.shape[:2])
        return found_BNPW

    def features_shape(self, batch: int, num_images: int) -> tuple[int, ...]:
        """See `Multimodal.features_shape`."""
        return batch, num_images, self.num_features, self.config.vision.width

    def between(self, features: Tensor, looks: Tensor | None) -> Between:
        """See `Multimodal.between`: before every so many layers a cross-attention."""
        return self.across(lambda number: self._cross_at(number).remember(features.flatten(1, 2)), looks)

    def across(self, memory: Callable[[int], Memory], looks: Tensor | None) -> Between:
        """The same where it is known what each cross-attention remembers."""
        seen_BLS = None if looks is None else self.own_run(looks.bool()).repeat_interleave(self.num_features, 2)

        def between(index: int, x_BLD: Tensor) -> Tensor:
            number, rest = divmod(index, self.config.every)
            if rest:
                return x_BLD
            y_BLD: Tensor = self._cross_at(number)(x_BLD, memory(number), seen_BLS)
            return y_BLD

        return between

    def reading_layers(self) -> list[int]:
        """See `Multimodal.reading_layers`."""
        return list(range(0, self.config.text.depth, self.config.every))

    def _cross_at(self, number: int) -> CrossAttention:
        # By name, as some of them may be elsewhere.
        return cast(CrossAttention, self.cross.get_submodule(str(number)))

    def looks_of(self, tokens_BL: Tensor, images_BNCYX: Tensor, seen_BLN: Tensor | None = None) -> Tensor | None:
        """See `Multimodal.looks_of`: `seen_BLN`."""
        rows, num = images_BNCYX.shape[:2]
        _check_seen(seen_BLN, rows, num, tokens_BL.shape[1])
        return seen_BLN

    @property
    def num_features(self) -> int:
        """Of one image, as cross-attention meets them."""
        positions = self.config.vision.num_patches + 1
        return positions if self.config.resampler is None else self.config.resampler.num_latents

    def flops(self, length: int, num_images: int) -> float:
        """See `Multimodal.flops`."""
        an_image = self.vision.flops(self.num_read)
        if self.resampler is not None:
            an_image += self.resampler.flops(self.config.vision.num_patches + 1)
        found = self._text_flops(length) + num_images * an_image
        seen = num_images * self.num_features
        return found + sum(layer.memory_flops() * seen + layer.flops(seen) * length for layer in self._cross())

    def held_bytes(self, num_images: int, dtype: torch.dtype) -> int:
        """See `Multimodal.held_bytes`: keys and values of each cross-attention."""
        return sum(layer.memory_bytes(num_images * self.num_features, dtype) for layer in self._cross())

    def _cross(self) -> list[CrossAttention]:
        return cast(list[CrossAttention], list(self.cross))


class SeeingAcross(Seeing):
    """Keys and values that each cross-attention makes of features (B, N, P, W) are held, and read by all tokens."""

    model: CrossFusion

    def __init__(self, model: CrossFusion, features_BNPW: Tensor, seen_BLN: Tensor | None) -> None:
        super().__init__(model)
        self.rows, self.num_images = features_BNPW.shape[:2]
        self.seen_BLN = None if seen_BLN is None else seen_BLN.bool()
        self.memories = [layer.remember(features_BNPW.flatten(1, 2)) for layer in model._cross()]

    def looks(
        self,
        tokens_BL: Tensor,  # noqa: ARG002
        docs: Documents,
        states: Sequence[MixerState | None] | None = None,  # noqa: ARG002
    ) -> Tensor | None:
        """See `Seeing.looks`."""
        if self.seen_BLN is None:
            return None
        positions_L = torch.arange(docs.start, docs.start + docs.length, device=self.seen_BLN.device)
        return self.seen_BLN[:, positions_L.clamp_max(self.seen_BLN.shape[1] - 1)]

    def read(
        self,
        tokens_BL: Tensor,
        docs: Documents,
        looks: Tensor | None,
        states: Sequence[MixerState | None] | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See `Seeing.read`."""
        _check_seen(looks, self.rows, self.num_images, tokens_BL.shape[1])
        x_BLD = self.embedding(tokens_BL, dtype or self.embedding.weight.dtype)
        between = self.model.across(self.memories.__getitem__, looks)
        return self.model.text.read(x_BLD, tokens_BL, docs, states, between)


def _check_seen(seen_BLN: Tensor | None, rows: int, num: int, length: int | None = None) -> None:
    """`ValueError` unless it is of so many rows and images, and of so many positions where that is known."""
    if seen_BLN is None:
        return
    wanted = (rows, seen_BLN.shape[1] if length is None and seen_BLN.dim() > 1 else length, num)
    if tuple(seen_BLN.shape) != wanted:
        raise ValueError(f"seen_BLN is {tuple(seen_BLN.shape)} and must be ({rows}, {length or 'positions'}, {num})")
