"""The Perceiver resampler (Alayrac et al., 2022): any number of features to a few learned latents' worth.

Legend: N images, S features, Z latents, W their width, H heads, K head size.
"""

from __future__ import annotations

from typing import Literal, Self, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from surefoot.blocks.base import Block, Initial
from surefoot.blocks.ffn.mlp import MLPConfig
from surefoot.blocks.images import ImagePart, ImagePartConfig
from surefoot.blocks.norm import LayerNorm
from surefoot.ops.cross_attention import attend_all


class ResamplerConfig(ImagePartConfig):
    """Latents that read features and themselves `depth` times, each followed by a network of ReLU, four times as wide."""

    num_latents: int = Field(gt=0)
    depth: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    head_size: int = Field(gt=0)
    qk_norm: Literal["none", "head"] = Field(
        default="none", description="layer norm of queries and keys, each head alone"
    )

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `ImagePartConfig.examples`."""
        return {norm: cls(num_latents=3, depth=2, num_heads=2, head_size=4, qk_norm=norm) for norm in ("none", "head")}

    def build(self, *, width: int) -> Resampler:
        """Of features of `width`, to latents of the same."""
        return Resampler(self, width)


class Resampler(ImagePart, Block):
    """See `ResamplerConfig`."""

    def __init__(self, config: ResamplerConfig, width: int) -> None:
        super().__init__()
        self.latents = self.add_weight("latents", (config.num_latents, width), ("latents", "embed"), Initial(std=1.0))
        self.layers = nn.ModuleList(ResamplerLayer(config, width) for _ in range(config.depth))
        self.norm = LayerNorm(width, 1e-5)

    def forward(self, x_NSW: Tensor) -> Tensor:
        """(N, S, W) to (N, Z, W)."""
        z_NZW = self.latents.to(x_NSW.dtype).expand(x_NSW.shape[0], -1, -1)
        for layer in self.layers:
            z_NZW = layer(z_NZW, x_NSW)
        normed_NZW: Tensor = self.norm(z_NZW)
        return normed_NZW

    def flops(self, num_features: int) -> float:
        """Forward FLOPs for so many features of an image."""
        layers = cast(list[ResamplerLayer], list(self.layers))
        return sum(layer.flops(num_features, self.latents.shape[0]) for layer in layers)


class ResamplerLayer(Block):
    """z + read(z, x), then z + network(norm(z))."""

    def __init__(self, config: ResamplerConfig, width: int) -> None:
        super().__init__()
        size, self.head_size = config.num_heads * config.head_size, config.head_size
        self.units = {"heads": config.head_size}
        for name in "qkv":
            self.add_weight(f"w{name}", (size, width), ("heads", "embed"), Initial(std=width**-0.5))
        self.add_weight("wo", (width, size), ("embed", "heads"), Initial(std=(2 * config.depth * size) ** -0.5))
        self.norm_features, self.norm_latents = LayerNorm(width, 1e-5), LayerNorm(width, 1e-5)
        is_normed = config.qk_norm == "head"
        self.norm_q, self.norm_k = (LayerNorm(config.head_size, 1e-5, "head") if is_normed else None for _ in "qk")
        self.norm_network = LayerNorm(width, 1e-5)
        network = MLPConfig(hidden=4 * width, activation="relu")
        self.network = network.build(width=width, output_scale=(2 * config.depth) ** -0.5)

    def forward(self, z_NZW: Tensor, x_NSW: Tensor) -> Tensor:
        """Latents (N, Z, W) and features (N, S, W) to latents."""
        own_NZW = self.norm_latents(z_NZW)
        read = torch.cat((self.norm_features(x_NSW), own_NZW), 1)
        q_NZHK = self.linear(own_NZW, "wq").unflatten(-1, (-1, self.head_size))
        k_NSHK, v_NSHK = self.linear(read, "wk", "wv").unflatten(-1, (-1, self.head_size)).chunk(2, 2)
        if self.norm_q is not None and self.norm_k is not None:
            q_NZHK, k_NSHK = self.norm_q(q_NZHK), self.norm_k(k_NSHK)
        z_NZW = z_NZW + self.linear(attend_all(q_NZHK, k_NSHK, v_NSHK).flatten(2), "wo")
        y_NZW: Tensor = z_NZW + self.network(self.norm_network(z_NZW))
        return y_NZW

    def flops(self, num_features: int, num_latents: int) -> float:
        """Forward FLOPs for so many features and latents of an image."""
        (size, width), num_read = self.get_parameter("wq").shape, num_features + num_latents
        ends = num_latents * (4.0 * size * width + self.network.flops())
        return ends + 4.0 * num_read * size * width + 4.0 * num_latents * num_read * size
