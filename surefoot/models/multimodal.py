"""Language models that read images: a decoder, a vision encoder, and what joins them.

Legend: B batch, L length, D width, N images a row, C channels, Y X height and width, P features an image, W their width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from surefoot.blocks.base import MixerState
from surefoot.blocks.embedding import Embedding
from surefoot.blocks.encoders.vision import VisionConfig
from surefoot.blocks.fusion.cross_attention import CrossAttention, CrossAttentionConfig
from surefoot.blocks.fusion.projector import ProjectorConfig
from surefoot.blocks.fusion.resampler import ResamplerConfig
from surefoot.config import Config, FieldError
from surefoot.models.decoder import DecoderConfig
from surefoot.ops.documents import Documents
from surefoot.ops.loss import IGNORED, LossSums

Between = Callable[[int, Tensor], Tensor]


class MultimodalConfig(Config):
    """A decoder of text and an encoder of images. Trained by nothing yet: a run has a `DecoderConfig`."""

    text: DecoderConfig
    vision: VisionConfig

    @model_validator(mode="after")
    def _has_no_routers(self) -> Self:
        for layer in range(self.text.depth):
            if getattr(self.text.ffn_of(layer), "router", None) is not None:
                raise FieldError(
                    "text.ffn", "MoE", "has auxiliary losses, which no loss over images adds yet; use a dense one"
                )
        return self

    @abstractmethod
    def build(self) -> Multimodal:
        """The model, its weights unfilled."""


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

    def build(self) -> LateFusion:
        """See `MultimodalConfig.build`."""
        return LateFusion(self)


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

    def build(self) -> CrossFusion:
        """See `MultimodalConfig.build`."""
        return CrossFusion(self)


ModelConfig = DecoderConfig | MultimodalConfig


class SeenImages:
    """How many image tokens each row of a text has had, as far as it was read over states."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.length, self.tokens_B = 0, torch.zeros(batch, dtype=torch.long, device=device)


class Multimodal(nn.Module):
    """What both kinds share. All rows of a batch have as many images; run other batches row by row."""

    def __init__(self, config: MultimodalConfig) -> None:
        super().__init__()
        self.text = config.text.build()
        self.vision = config.vision.build()

    def forward(
        self,
        tokens_BL: Tensor,
        docs: Documents,
        images_BNCYX: Tensor,
        seen_BLN: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Token ids (B, L) and images (B, N, C, Y, X) to final hidden states (B, L, D)."""
        return self.seeing(images_BNCYX, seen_BLN, dtype=dtype)(tokens_BL, docs, dtype=dtype)

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
        seen_BLN: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, LossSums]:
        """As `Decoder.loss`, of the targets that are text."""
        hidden_BLD = self(tokens_BL, docs, images_BNCYX, seen_BLN, dtype=dtype)
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

    @abstractmethod
    def __call__(
        self,
        tokens_BL: Tensor,
        docs: Documents,
        states: Sequence[MixerState | None] | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See `Decoder.forward`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder.logits`."""
        return self.model.text.logits(hidden)

    def new_states(self, batch: int, length: int, dtype: torch.dtype) -> list[MixerState | None]:
        """See `Decoder.new_states`."""
        return self.model.text.new_states(batch, length, dtype)


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
            raise ValueError("images stand in the text here, which says who sees them: leave seen_BLN out")
        features_NSW = self.vision(self._images(images_BNCYX, dtype), self._num_layers)
        features_NPD = self.projector(features_NSW[:, 1:] if self.config.class_token == "dropped" else features_NSW)
        return SeeingInPlace(self, features_NPD.unflatten(0, images_BNCYX.shape[:2]).flatten(1, 2))

    @property
    def _num_layers(self) -> int:
        """Of the encoder, those that features pass."""
        layer = self.config.feature_layer
        return layer + (self.config.vision.depth + 1 if layer < 0 else 0)

    def flops(self, length: int, num_images: int) -> float:
        """See `Multimodal.flops`."""
        an_image = self.vision.flops(self._num_layers) + self.config.num_features * self.projector.flops()
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

    def __call__(
        self,
        tokens_BL: Tensor,
        docs: Documents,
        states: Sequence[MixerState | None] | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See `Decoder.forward`."""
        x_BLD = self.embedding(tokens_BL, dtype or self.embedding.weight.dtype)
        is_image_BL = tokens_BL == self.image_token
        index_BL = is_image_BL.cumsum(1) - 1
        if states is not None:
            seen = cast(SeenImages, states[-1])
            index_BL = index_BL + seen.tokens_B[:, None]
            seen.tokens_B, seen.length = index_BL[:, -1] + 1, seen.length + docs.length
        num, found_B = self.features_BFD.shape[1], index_BL[:, -1] + 1
        if bool((found_B > num).any()) or (states is None and bool((found_B != num).any())):
            raise ValueError(f"texts have {found_B.tolist()} image tokens, and their images {num} features each")
        places_BLD = index_BL.clamp(0, num - 1)[..., None].expand(-1, -1, x_BLD.shape[-1])
        features_BLD = self.features_BFD.gather(1, places_BLD).to(x_BLD.dtype)
        return self.model.text.read(torch.where(is_image_BL[..., None], features_BLD, x_BLD), tokens_BL, docs, states)

    def new_states(self, batch: int, length: int, dtype: torch.dtype) -> list[MixerState | None]:
        """Those of the decoder, and behind them one of how many image tokens there were."""
        return [*super().new_states(batch, length, dtype), SeenImages(batch, self.features_BFD.device)]


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
        rows, num = images_BNCYX.shape[:2]
        if seen_BLN is not None and (seen_BLN.dim() != 3 or (seen_BLN.shape[0], seen_BLN.shape[2]) != (rows, num)):
            raise ValueError(f"seen_BLN is {tuple(seen_BLN.shape)} and must be ({rows}, positions, {num})")
        features_NPW = self.vision(self._images(images_BNCYX, dtype), self.config.vision.depth)
        if self.resampler is not None:
            features_NPW = self.resampler(features_NPW)
        return SeeingAcross(self, features_NPW.unflatten(0, (rows, num)), seen_BLN)

    @property
    def num_features(self) -> int:
        """Of one image, as cross-attention meets them."""
        positions = self.config.vision.num_patches + 1
        return positions if self.config.resampler is None else self.config.resampler.num_latents

    def flops(self, length: int, num_images: int) -> float:
        """See `Multimodal.flops`."""
        an_image = self.vision.flops(self.config.vision.depth)
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

    def __init__(self, model: CrossFusion, features_BNPW: Tensor, seen_BLN: Tensor | None) -> None:
        super().__init__(model)
        self.every, self.num_features = model.config.every, features_BNPW.shape[2]
        self.layers = model._cross()
        self.seen_BLN = None if seen_BLN is None else seen_BLN.bool()
        self.memories = [layer.remember(features_BNPW.flatten(1, 2)) for layer in self.layers]

    def __call__(
        self,
        tokens_BL: Tensor,
        docs: Documents,
        states: Sequence[MixerState | None] | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See `Decoder.forward`."""
        seen_BLS = None
        if self.seen_BLN is not None:
            positions_L = torch.arange(docs.start, docs.start + docs.length, device=self.seen_BLN.device)
            seen_BLN = self.seen_BLN[:, positions_L.clamp_max(self.seen_BLN.shape[1] - 1)]
            seen_BLS = seen_BLN.repeat_interleave(self.num_features, 2)

        def between(index: int, x_BLD: Tensor) -> Tensor:
            number, rest = divmod(index, self.every)
            if rest:
                return x_BLD
            y_BLD: Tensor = self.layers[number](x_BLD, self.memories[number], seen_BLS)
            return y_BLD

        x_BLD = self.embedding(tokens_BL, dtype or self.embedding.weight.dtype)
        return self.model.text.read(x_BLD, tokens_BL, docs, states, between)
