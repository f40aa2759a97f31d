"""A vision transformer (Dosovitskiy et al., 2021) as CLIP has it (Radford et al., 2021).

Legend: N images, C channels, Y X height and width, P patches, S = P + 1 positions (the class token first), D width,
H heads, K head size.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from surefoot.blocks.base import Block, Initial
from surefoot.blocks.images import EXAMPLE_IMAGE, ImagePart, ImagePartConfig
from surefoot.blocks.norm import LayerNorm
from surefoot.config import FieldError
from surefoot.ops.activations import ACTIVATIONS
from surefoot.ops.cross_attention import attend_all


class VisionConfig(ImagePartConfig):
    """Patches and a class token, learned positions, a norm, `depth` pre-norm layers with biases; square images of one size."""

    image_size: int = Field(gt=0, description="height and width in pixels")
    patch_size: int = Field(gt=0)
    num_channels: int = Field(default=3, gt=0)
    width: int = Field(gt=0)
    depth: int = Field(gt=0, description="number of layers")
    num_heads: int = Field(gt=0)
    hidden: int = Field(gt=0, description="width between the projections of each network")
    activation: Literal["quick_gelu", "gelu", "gelu_tanh"] = Field(default="quick_gelu")
    norm_eps: float = Field(default=1e-5, gt=0)

    @model_validator(mode="after")
    def _sizes_divide(self) -> Self:
        if self.image_size % self.patch_size:
            raise FieldError("patch_size", self.patch_size, f"must divide image_size {self.image_size}")
        if self.width % self.num_heads:
            raise FieldError("num_heads", self.num_heads, f"must divide width {self.width}")
        return self

    @property
    def num_patches(self) -> int:
        """Of one image."""
        return (self.image_size // self.patch_size) ** 2

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `ImagePartConfig.examples`."""
        example = partial(cls, image_size=EXAMPLE_IMAGE, patch_size=2, width=12, depth=2, num_heads=2, hidden=20)
        return {"": example(), "gelu, one channel": example(activation="gelu", num_channels=1)}

    def build(self) -> Vision:
        """The encoder, its weights unfilled."""
        return Vision(self)


class Patches(Block):
    """Pixels to positions: each patch by one linear map, a class token before them, and where each lies."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        size = config.num_channels * config.patch_size**2
        std = Initial(std=config.width**-0.5)
        self.w_patch = self.add_weight("w_patch", (config.width, size), ("embed", "pixels"), Initial(std=size**-0.5))
        self.class_token = self.add_weight("class_token", (config.width,), ("embed",), std)
        self.places = self.add_weight("places", (config.num_patches + 1, config.width), ("places", "embed"), std)

    def forward(self, images_NCYX: Tensor) -> Tensor:
        """(N, S, D) in the images' dtype; `ValueError` for images of another size."""
        config, size = self.config, self.config.patch_size
        wanted = (config.num_channels, config.image_size, config.image_size)
        if tuple(images_NCYX.shape[1:]) != wanted:
            raise ValueError(f"images are {tuple(images_NCYX.shape[1:])} and must be {wanted}")
        parts = images_NCYX.unfold(2, size, size).unfold(3, size, size)  # (N, C, rows, columns, size, size)
        x_NPD = self.linear(parts.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2), "w_patch")
        token_N1D = self.class_token.to(x_NPD.dtype).expand(x_NPD.shape[0], 1, -1)
        x_NSD: Tensor = torch.cat((token_N1D, x_NPD), 1) + self.places.to(x_NPD.dtype)
        return x_NSD

    def flops(self) -> float:
        """Forward FLOPs an image."""
        return 2.0 * self.config.num_patches * self.w_patch.numel()


class Look(Block):
    """Attention of all positions over all, with biases."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width, self.head_size = config.width, config.width // config.num_heads
        self.units = {"heads": self.head_size}
        for name in "qkv":
            self.add_weight(f"w{name}", (width, width), ("heads", "embed"), Initial(std=width**-0.5))
            self.add_weight(f"b{name}", (width,), ("heads",), Initial())
        output = Initial(std=(2 * config.depth * width) ** -0.5)
        self.add_weight("wo", (width, width), ("embed", "heads"), output)
        self.add_weight("bo", (width,), ("embed",), Initial())

    def forward(self, x_NSD: Tensor) -> Tensor:
        """(N, S, D) to (N, S, D)."""
        bias = torch.cat([getattr(self, f"b{name}") for name in "qkv"])
        x_NSHK = (self.linear(x_NSD, "wq", "wk", "wv") + bias.to(x_NSD.dtype)).unflatten(-1, (-1, self.head_size))
        y_NSHK = attend_all(*x_NSHK.chunk(3, 2))
        bo: Tensor = self.get_parameter("bo")
        return self.linear(y_NSHK.flatten(2), "wo") + bo.to(x_NSD.dtype)

    def flops(self, num_positions: int) -> float:
        """Forward FLOPs a position."""
        matrices = sum(weight.numel() for weight in self.parameters() if weight.dim() == 2)
        return 2.0 * matrices + 4.0 * num_positions * self.get_parameter("wq").shape[0]


class Network(Block):
    """Two projections with biases."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        width, hidden = config.width, config.hidden
        self.w_up = self.add_weight("w_up", (hidden, width), ("ffn", "embed"), Initial(std=width**-0.5))
        self.b_up = self.add_weight("b_up", (hidden,), ("ffn",), Initial())
        output = Initial(std=(2 * config.depth * hidden) ** -0.5)
        self.w_down = self.add_weight("w_down", (width, hidden), ("embed", "ffn"), output)
        self.b_down = self.add_weight("b_down", (width,), ("embed",), Initial())

    def forward(self, x_NSD: Tensor) -> Tensor:
        """(N, S, D) to (N, S, D)."""
        h_NSF = self.activation(self.linear(x_NSD, "w_up") + self.b_up.to(x_NSD.dtype))
        return self.linear(h_NSF, "w_down") + self.b_down.to(x_NSD.dtype)

    def flops(self) -> float:
        """Forward FLOPs a position."""
        return 2.0 * (self.w_up.numel() + self.w_down.numel())


class VisionLayer(nn.Module):
    """x + look(norm(x)), then x + network(norm(x))."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm_look = LayerNorm(config.width, config.norm_eps)
        self.look = Look(config)
        self.norm_network = LayerNorm(config.width, config.norm_eps)
        self.network = Network(config)

    def forward(self, x_NSD: Tensor) -> Tensor:
        """(N, S, D) to (N, S, D)."""
        x_NSD = x_NSD + self.look(self.norm_look(x_NSD))
        y_NSD: Tensor = x_NSD + self.network(self.norm_network(x_NSD))
        return y_NSD

    def flops(self, num_positions: int) -> float:
        """Forward FLOPs a position."""
        return self.look.flops(num_positions) + self.network.flops()


class Vision(ImagePart):
    """See `VisionConfig`. Published encoders have a norm for the class token after the last layer (`norm_class`): no language
    model reads it, so it gets no gradient, and is held for the files' sake."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patches = Patches(config)
        self.norm = LayerNorm(config.width, config.norm_eps)
        self.layers = nn.ModuleList(VisionLayer(config) for _ in range(config.depth))
        self.norm_class = LayerNorm(config.width, config.norm_eps)

    def forward(self, images_NCYX: Tensor, num_layers: int) -> Tensor:
        """What the first `num_layers` layers make of images, (N, S, D) in the images' dtype."""
        x_NSD: Tensor = self.norm(self.patches(images_NCYX))
        for layer in self._first(num_layers):
            x_NSD = layer(x_NSD)
        return x_NSD

    def flops(self, num_layers: int) -> float:
        """Forward FLOPs an image through so many layers."""
        size = self.config.num_patches + 1
        return self.patches.flops() + size * sum(layer.flops(size) for layer in self._first(num_layers))

    def _first(self, num_layers: int) -> list[VisionLayer]:
        return cast(list[VisionLayer], list(self.layers))[:num_layers]
