"""Language models in whose text features of images stand (LLaVA; Liu et al., 2023).

Legend: B batch, L length, D width, N images a row, C channels, Y X height and width, P features an image, W their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor

from surefoot.blocks.base import MixerState
from surefoot.blocks.fusion.projector import ProjectorConfig
from surefoot.config import FieldError
from surefoot.models.multimodal import Multimodal, MultimodalConfig, Seeing
from surefoot.ops.documents import Documents
from surefoot.ops.loss import IGNORED


class LateFusionConfig(MultimodalConfig):
    """LLaVA (Liu et al., 2023): features of an image, projected, stand where the text has its image tokens."""

    projector: ProjectorConfig
    image_token: int = Field(ge=0, description="the id at whose places features stand, as many as an image has")
    feature_layer: int = Field(
        default=-2, description="which state is read: 0 before the encoder's first layer, -1 after its last"
    )
    class_token: Literal["dropped", "kept"] = "dropped"

    @model_validator(mode="after")
    def _is_in_range(self) -> Self:
        depth = self.vision.depth
        if not -depth - 1 <= self.feature_layer <= depth:
            raise FieldError("feature_layer", self.feature_layer, f"must be from {-depth - 1} to {depth}")
        if self.image_token >= self.text.vocab_size:
            raise FieldError("image_token", self.image_token, f"must be below vocab_size {self.text.vocab_size}")
        return self

    @property
    def num_features(self) -> int:
        """Image tokens that one image needs."""
        return self.vision.num_patches + (self.class_token == "kept")

    @property
    def num_read(self) -> int:
        """See `MultimodalConfig.num_read`."""
        return self.feature_layer + (self.vision.depth + 1 if self.feature_layer < 0 else 0)

    def build(self) -> LateFusion:
        """See `MultimodalConfig.build`."""
        return LateFusion(self)


class SeenImages:
    """How many image tokens each row of a text has had, as far as it was read over states."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.length, self.tokens_B = 0, torch.zeros(batch, dtype=torch.long, device=device)


class LateFusion(Multimodal):
    """See `LateFusionConfig`."""

    def __init__(self, config: LateFusionConfig) -> None:
        super().__init__(config)
        self.config = config
        self.projector = config.projector.build(features=config.vision.width, width=config.text.width)

    def seeing(
        self, images_BNCYX: Tensor, seen_BLN: Tensor | None = None, *, dtype: torch.dtype | None = None
    ) -> SeeingInPlace:
        """See `Multimodal.seeing`. Text before an image cannot see it and all after it does, so `seen_BLN` must be None."""
        if seen_BLN is not None:
            raise ValueError(_IN_PLACE)
        return SeeingInPlace(self, self.features(images_BNCYX, dtype))

    def features(self, images_BNCYX: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """See `Multimodal.features`: those of all images of a row, projected, (B, N·P, D)."""
        features_NSW = self.vision(self._images(images_BNCYX, dtype), self.num_read)
        features_NPD = self.projector(features_NSW[:, 1:] if self.config.class_token == "dropped" else features_NSW)
        found_BFD: Tensor = features_NPD.unflatten(0, images_BNCYX.shape[:2]).flatten(1, 2)
        return found_BFD

    def features_shape(self, batch: int, num_images: int) -> tuple[int, ...]:
        """See `Multimodal.features_shape`."""
        return batch, num_images * self.config.num_features, self.config.text.width

    def placed(self, x_BLD: Tensor, features: Tensor, looks: Tensor | None) -> Tensor:
        """See `Multimodal.placed`."""
        if looks is None:
            raise ValueError(_IN_PLACE)
        looks_BL1 = self.own_run(looks)[..., None]
        places_BLD = looks_BL1.clamp_min(0).expand(-1, -1, x_BLD.shape[-1])
        return torch.where(looks_BL1 >= 0, features.gather(1, places_BLD).to(x_BLD.dtype), x_BLD)

    def looks_of(self, tokens_BL: Tensor, images_BNCYX: Tensor, seen_BLN: Tensor | None = None) -> Tensor:
        """See `Multimodal.looks_of`: the number of the feature that stands in a token's place (B, L), -1 for text.

        `ValueError` where a text has another number of image tokens than its images have features.
        """
        if seen_BLN is not None:
            raise ValueError(_IN_PLACE)
        num = images_BNCYX.shape[1] * self.config.num_features
        return _counted(tokens_BL == self.config.image_token, num)[0]

    def flops(self, length: int, num_images: int) -> float:
        """See `Multimodal.flops`."""
        an_image = self.vision.flops(self.num_read) + self.config.num_features * self.projector.flops()
        return self._text_flops(length) + num_images * an_image

    def held_bytes(self, num_images: int, dtype: torch.dtype) -> int:
        """See `Multimodal.held_bytes`: their features, as wide as the language model."""
        return num_images * self.config.num_features * self.config.text.width * dtype.itemsize

    def textual(self, targets_BL: Tensor) -> Tensor:
        """See `Multimodal.textual`."""
        return targets_BL.masked_fill(targets_BL == self.config.image_token, IGNORED)


class SeeingInPlace(Seeing):
    """Features (B, N·P, D) take the places of image tokens in order, row by row.

    `ValueError` where a text has another number of image tokens; read over states, where it has more so far.
    """

    def __init__(self, model: LateFusion, features_BFD: Tensor) -> None:
        super().__init__(model)
        self.image_token, self.features_BFD = model.config.image_token, features_BFD

    def looks(
        self, tokens_BL: Tensor, docs: Documents, states: Sequence[MixerState | None] | None = None
    ) -> Tensor | None:
        """See `Seeing.looks`."""
        is_image_BL, num = tokens_BL == self.image_token, self.features_BFD.shape[1]
        if states is None:
            return _counted(is_image_BL, num)[0]
        seen = cast(SeenImages, states[-1])
        looks_BL, seen.tokens_B = _counted(is_image_BL, num, seen.tokens_B)
        seen.length += docs.length
        return looks_BL

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
        if looks is None or looks.shape != tokens_BL.shape:
            raise ValueError(_IN_PLACE)
        x_BLD = self.embedding(tokens_BL, dtype or self.embedding.weight.dtype)
        return self.model.text.read(self.model.placed(x_BLD, self.features_BFD, looks), tokens_BL, docs, states)

    def new_states(self, batch: int, length: int, dtype: torch.dtype) -> list[MixerState | None]:
        """Those of the decoder, and behind them one of how many image tokens there were."""
        return [*super().new_states(batch, length, dtype), SeenImages(batch, self.features_BFD.device)]


_IN_PLACE = "images stand in the text here, which says who sees them: leave seen_BLN out"


def _counted(is_image_BL: Tensor, num: int, before_B: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The number of each image token among those of its row, -1 for text, and how many there have been with these.

    `before_B` were before; where it is None the text is whole. `ValueError` where there are more than `num`, or in all fewer.
    """
    index_BL = is_image_BL.cumsum(1) - 1
    if before_B is not None:
        index_BL = index_BL + before_B[:, None]
    found_B = index_BL[:, -1] + 1
    if bool((found_B > num).any()) or (before_B is None and bool((found_B != num).any())):
        raise ValueError(f"texts have {found_B.tolist()} image tokens, and their images {num} features each")
    return torch.where(is_image_BL, index_BL, -1), found_B
