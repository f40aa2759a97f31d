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


ModelConfig = DecoderConfig | MultimodalConfig


class SeenImages:
    """How many image tokens each row of a text has had, as far as it was read over states."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.length, self.tokens_B = 0, torch.zeros(batch, dtype=torch.long, device=device)


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

    def stacks(self) -> dict[str, list[nn.Module]]:
        """The layers that passes go through, by the name of the list that they are in."""
        return {"text.layers": list(self.text.layers), "vision.layers": list(self.vision.layers)[: self.num_read]}

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
        features_NSW = self.vision(self._images(images_BNCYX, dtype), self.num_read)
        features_NPD = self.projector(features_NSW[:, 1:] if self.config.class_token == "dropped" else features_NSW)
        return SeeingInPlace(self, features_NPD.unflatten(0, images_BNCYX.shape[:2]).flatten(1, 2))

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
        looks_BL1 = self.model.own_run(looks)[..., None]
        places_BLD = looks_BL1.clamp_min(0).expand(-1, -1, x_BLD.shape[-1])
        features_BLD = self.features_BFD.gather(1, places_BLD).to(x_BLD.dtype)
        return self.model.text.read(torch.where(looks_BL1 >= 0, features_BLD, x_BLD), tokens_BL, docs, states)

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
        features_NPW = self.vision(self._images(images_BNCYX, dtype), self.num_read)
        if self.resampler is not None:
            features_NPW = self.resampler(features_NPW)
        return SeeingAcross(self, features_NPW.unflatten(0, images_BNCYX.shape[:2]), seen_BLN)

    def looks_of(self, tokens_BL: Tensor, images_BNCYX: Tensor, seen_BLN: Tensor | None = None) -> Tensor | None:
        """See `Multimodal.looks_of`: `seen_BLN`."""
        rows, num = images_BNCYX.shape[:2]
        _check_seen(seen_BLN, rows, num, tokens_BL.shape[1])
        return seen_BLN

    def stacks(self) -> dict[str, list[nn.Module]]:
        """See `Multimodal.stacks`."""
        return super().stacks() | {"cross": list(self.cross)}

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

    def __init__(self, model: CrossFusion, features_BNPW: Tensor, seen_BLN: Tensor | None) -> None:
        super().__init__(model)
        self.every, (self.rows, self.num_images, self.num_features) = model.config.every, features_BNPW.shape[:3]
        self.layers = model._cross()
        self.seen_BLN = None if seen_BLN is None else seen_BLN.bool()
        self.memories = [layer.remember(features_BNPW.flatten(1, 2)) for layer in self.layers]

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
        seen_BLS = None
        if looks is not None:
            _check_seen(looks, self.rows, self.num_images, tokens_BL.shape[1])
            seen_BLS = self.model.own_run(looks.bool()).repeat_interleave(self.num_features, 2)

        def between(index: int, x_BLD: Tensor) -> Tensor:
            number, rest = divmod(index, self.every)
            if rest:
                return x_BLD
            y_BLD: Tensor = self.layers[number](x_BLD, self.memories[number], seen_BLS)
            return y_BLD

        x_BLD = self.embedding(tokens_BL, dtype or self.embedding.weight.dtype)
        return self.model.text.read(x_BLD, tokens_BL, docs, states, between)


def _check_seen(seen_BLN: Tensor | None, rows: int, num: int, length: int | None = None) -> None:
    """`ValueError` unless it is of so many rows and images, and of so many positions where that is known."""
    if seen_BLN is None:
        return
    wanted = (rows, seen_BLN.shape[1] if length is None and seen_BLN.dim() > 1 else length, num)
    if tuple(seen_BLN.shape) != wanted:
        raise ValueError(f"seen_BLN is {tuple(seen_BLN.shape)} and must be ({rows}, {length or 'positions'}, {num})")
