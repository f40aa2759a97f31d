"""Gated cross-attention (Flamingo; Alayrac et al., 2022): a layer between a language model's own that reads images.

Legend: B batch, L length, D width, S features of all images of a row, W their width, H heads, K head size.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

import torch
from pydantic import Field
from torch import Tensor

from surefoot.blocks.base import Block, Initial
from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.images import ImagePart, ImagePartConfig
from surefoot.blocks.norm import RMSNorm
from surefoot.config import FieldError
from surefoot.ops.cross_attention import attend_all


class CrossAttentionConfig(ImagePartConfig):
    """x + tanh(a) read(norm(x)), then x + tanh(b) network(norm(x)); a and b start at 0, where the layer does nothing."""

    num_heads: int = Field(gt=0)
    hidden: int = Field(gt=0, description="of its gated network")
    qk_norm: Literal["none", "head"] = Field(
        default="none", description="RMS norm of queries and keys, each head alone"
    )
    gate: Literal["one", "vector"] = Field(default="one", description="one number, or one a component")
    norm_eps: float = Field(default=1e-6, gt=0)

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `ImagePartConfig.examples`."""
        return {
            "one gate": cls(num_heads=2, hidden=24),
            "gates, qk-norm": cls(num_heads=2, hidden=24, gate="vector", qk_norm="head"),
        }

    def check_width(self, width: int) -> None:
        """Raise `FieldError` where its heads cannot share the model's width."""
        if width % self.num_heads:
            raise FieldError("num_heads", self.num_heads, f"must divide the width of the language model, {width}")

    def build(self, *, width: int, features: int) -> CrossAttention:
        """In a language model of `width` over features of another."""
        return CrossAttention(self, width, features)


class Memory(NamedTuple):
    """Keys and values that one layer makes of the images, (B, S, H, K) each: made once, read by every token."""

    k_BSHK: Tensor
    v_BSHK: Tensor


class CrossAttention(ImagePart, Block):
    """See `CrossAttentionConfig`."""

    entries = ("remember",)

    def __init__(self, config: CrossAttentionConfig, width: int, features: int) -> None:
        super().__init__()
        self.head_size = width // config.num_heads
        self.units = {"heads": self.head_size}
        self.add_weight("wq", (width, width), ("heads", "embed"), Initial(std=width**-0.5))
        for name in "kv":
            self.add_weight(f"w{name}", (width, features), ("heads", "features"), Initial(std=features**-0.5))
        self.add_weight("wo", (width, width), ("embed", "heads"), Initial(std=width**-0.5))
        size = width if config.gate == "vector" else 1
        axis = "embed" if config.gate == "vector" else "one"
        self.gate_read = self.add_weight("gate_read", (size,), (axis,), Initial())
        self.gate_network = self.add_weight("gate_network", (size,), (axis,), Initial())
        is_normed = config.qk_norm == "head"
        self.norm_q, self.norm_k = (
            RMSNorm(self.head_size, config.norm_eps, "head") if is_normed else None for _ in "qk"
        )
        self.norm_read, self.norm_network = RMSNorm(width, config.norm_eps), RMSNorm(width, config.norm_eps)
        self.network = SwiGLUConfig(hidden=config.hidden).build(width=width, output_scale=1.0)

    def remember(self, x_BSW: Tensor) -> Memory:
        """What tokens will read of features (B, S, W)."""
        k_BSHK, v_BSHK = self.linear(x_BSW, "wk", "wv").unflatten(-1, (-1, self.head_size)).chunk(2, 2)
        if self.norm_k is None:
            return Memory(k_BSHK, v_BSHK)
        # A copy where the memory is held for decoding: keys before their norm would be held beside the values.
        return Memory(self.norm_k(k_BSHK), v_BSHK if torch.is_grad_enabled() else v_BSHK.contiguous())

    def forward(self, x_BLD: Tensor, memory: Memory, seen_BLS: Tensor | None) -> Tensor:
        """(B, L, D) to (B, L, D); tokens that see no feature read 0."""
        q_BLHK = self.linear(self.norm_read(x_BLD), "wq").unflatten(-1, (-1, self.head_size))
        q_BLHK = q_BLHK if self.norm_q is None else self.norm_q(q_BLHK)
        read_BLD = self.linear(attend_all(q_BLHK, *memory, seen_BLS).flatten(2), "wo")
        x_BLD = x_BLD + self.gate_read.tanh().to(x_BLD.dtype) * read_BLD
        y_BLD: Tensor = x_BLD + self.gate_network.tanh().to(x_BLD.dtype) * self.network(self.norm_network(x_BLD))
        return y_BLD

    def flops(self, num_features: int) -> float:
        """Forward FLOPs a token that reads so many features."""
        matrices = self.get_parameter("wq").numel() + self.get_parameter("wo").numel()
        return 2.0 * matrices + 4.0 * num_features * self.get_parameter("wq").shape[0] + self.network.flops()

    def memory_flops(self) -> float:
        """Forward FLOPs of what one feature is remembered by."""
        return 2.0 * (self.get_parameter("wk").numel() + self.get_parameter("wv").numel())

    def memory_bytes(self, num_features: int, dtype: torch.dtype) -> int:
        """Bytes that so many features of one sequence are remembered in."""
        return 2 * num_features * self.get_parameter("wk").shape[0] * dtype.itemsize
