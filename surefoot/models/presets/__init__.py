"""Sizes as data, and the one function that turns a row into a configuration."""

from __future__ import annotations

from typing import NamedTuple

from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.models.decoder import DecoderConfig


class Size(NamedTuple):
    """One row: layers, width, query heads, key-value heads, feed-forward width."""

    depth: int
    width: int
    num_heads: int
    num_kv_heads: int
    ffn: int


# Head sizes of 64 to 128 and feed-forward widths of 8/3 width rounded up to a multiple of 128.
SIZES: dict[str, Size] = {
    "1m": Size(4, 128, 2, 2, 384),
    "5m": Size(6, 256, 4, 2, 768),
    "30m": Size(8, 512, 8, 4, 1408),
    "110m": Size(12, 768, 12, 4, 2048),
    "410m": Size(24, 1024, 16, 8, 2816),
    "1b": Size(16, 2048, 16, 8, 5632),
    "3b": Size(28, 3072, 24, 8, 8192),
    "8b": Size(32, 4096, 32, 8, 14336),
    "70b": Size(80, 8192, 64, 8, 28672),
    "405b": Size(126, 16384, 128, 8, 53248),
}


def decoder(size: str, *, vocab_size: int, tied: bool = False, rope_theta: float = 10_000.0) -> DecoderConfig:
    """The decoder of a named size; `KeyError` when there is no such row."""
    row = SIZES[size]
    return DecoderConfig(
        vocab_size=vocab_size,
        width=row.width,
        depth=row.depth,
        mixer=AttentionConfig(num_heads=row.num_heads, num_kv_heads=row.num_kv_heads, rope_theta=rope_theta),
        ffn=SwiGLUConfig(hidden=row.ffn),
        tied=tied,
    )
