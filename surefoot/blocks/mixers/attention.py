"""Softmax attention with grouped key-value heads.

Legend: B batch, L length (queries), S keys, D width, H query heads, G key-value heads, K head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from surefoot.blocks.base import Initial, Mixer, MixerConfig, Shared
from surefoot.blocks.norm import RMSNorm
from surefoot.config import FieldError
from surefoot.ops.attention import attend
from surefoot.ops.documents import Documents
from surefoot.ops.rope import rope_tables, rotate


class AttentionConfig(MixerConfig):
    """Causal attention with rotary positions (Su et al., 2021) and grouped key-value heads (Ainslie et al., 2023)."""

    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0, description="each serves num_heads / num_kv_heads query heads")
    head_size: int | None = Field(default=None, gt=0, multiple_of=2, description="width / num_heads where not given")
    rope_theta: float = Field(default=10_000.0, gt=1, description="longest wavelength is 2 pi times this")
    qk_norm: bool = Field(default=True, description="RMS norm of each query and key head (Henry et al., 2020)")
    norm_eps: float = Field(default=1e-6, gt=0)

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise FieldError("num_kv_heads", self.num_kv_heads, f"must divide num_heads {self.num_heads}")
        return self

    def check_width(self, width: int) -> None:
        """Without a head size of its own, the width must give an even one."""
        size, rest = divmod(width, self.num_heads)
        if self.head_size is None and (rest or size % 2):
            unit = 2 * self.num_heads
            nearest = max(unit, round(width / unit) * unit)
            raise FieldError(
                "width", width, f"must give an even head size over {self.num_heads} heads; nearest is {nearest}"
            )

    def build(self, *, width: int, output_scale: float) -> Attention:
        """The mixer itself."""
        return Attention(self, width, output_scale)


class KVState:
    """Keys and values of the positions seen so far, in buffers with room for more."""

    def __init__(self, k_BSGK: Tensor, v_BSGK: Tensor) -> None:
        self.k_BSGK, self.v_BSGK, self.length = k_BSGK, v_BSGK, 0

    def extend(self, k_BLGK: Tensor, v_BLGK: Tensor) -> tuple[Tensor, Tensor]:
        """Append L positions and return all seen so far. `ValueError` when the room is used up."""
        end = self.length + k_BLGK.shape[1]
        if end > self.k_BSGK.shape[1]:
            raise ValueError(f"the state has room for {self.k_BSGK.shape[1]} positions and would hold {end}")
        self.k_BSGK[:, self.length : end] = k_BLGK
        self.v_BSGK[:, self.length : end] = v_BLGK
        self.length = end
        return self.k_BSGK[:, :end], self.v_BSGK[:, :end]


class Attention(Mixer):
    """Grouped-query attention; see `AttentionConfig`. `attend` may be swapped for a parallel form."""

    def __init__(self, config: AttentionConfig, width: int, output_scale: float) -> None:
        super().__init__()
        self.config = config
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_size = config.head_size or width // config.num_heads
        q_size, kv_size = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        self.units = {"heads": self.head_size, "kv_heads": self.head_size}
        fan_in = Initial(std=width**-0.5)
        self.wq = self.add_weight("wq", (q_size, width), ("heads", "embed"), fan_in)
        self.wk = self.add_weight("wk", (kv_size, width), ("kv_heads", "embed"), fan_in)
        self.wv = self.add_weight("wv", (kv_size, width), ("kv_heads", "embed"), fan_in)
        self.wo = self.add_weight("wo", (width, q_size), ("embed", "heads"), Initial(std=output_scale * q_size**-0.5))
        self.norm_q = RMSNorm(self.head_size, config.norm_eps, "head") if config.qk_norm else None
        self.norm_k = RMSNorm(self.head_size, config.norm_eps, "head") if config.qk_norm else None
        self.attend: Callable[[Tensor, Tensor, Tensor, Documents], Tensor] = attend

    def forward(
        self,
        x_BLD: Tensor,
        docs: Documents,
        state: KVState | None = None,
        shared: Shared | None = None,  # noqa: ARG002 - keeps its keys to itself
    ) -> Tensor:
        """(B, L, D) to (B, L, D); with a state, queries also see the positions it holds."""
        batch, length, _ = x_BLD.shape
        heads = self.linear(x_BLD, "wq", "wk", "wv").view(batch, length, -1, self.head_size)
        # The weights say how many heads there are: under tensor parallelism they hold this rank's.
        num_heads, num_kv_heads = (weight.shape[0] // self.head_size for weight in (self.wq, self.wk))
        tables = self._tables(docs, x_BLD)
        if self.norm_q is None or self.norm_k is None:
            qk_BLHK, v_BLGK = heads.split((num_heads + num_kv_heads, num_kv_heads), 2)
            q_BLHK, k_BLGK = rotate(qk_BLHK, tables).split((num_heads, num_kv_heads), 2)
        else:
            q_BLHK, k_BLGK, v_BLGK = heads.split((num_heads, num_kv_heads, num_kv_heads), 2)
            q_BLHK, k_BLGK = rotate(self.norm_q(q_BLHK), tables), rotate(self.norm_k(k_BLGK), tables)
        k_BSGK, v_BSGK = (k_BLGK, v_BLGK) if state is None else state.extend(k_BLGK, v_BLGK)
        y_BLHK = self.attend(q_BLHK, k_BSGK, v_BSGK, docs)
        return self.linear(y_BLHK.reshape(batch, length, -1), "wo")

    def _tables(self, docs: Documents, x_BLD: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(x_BLD.dtype, torch.float32)
        return docs.derive(
            ("rope", self.head_size, self.config.rope_theta, dtype),
            lambda: rope_tables(docs.positions, self.head_size, self.config.rope_theta, dtype),
        )

    def new_state(self, batch: int, length: int, dtype: torch.dtype) -> KVState:
        """Empty key and value buffers with room for `length` positions."""
        shape = (batch, length, self.num_kv_heads, self.head_size)
        device = self.wk.device
        return KVState(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))

    def flops(self, length: int, *, causal: bool) -> float:
        """Forward FLOPs a token: projections, and scores and sums over `length` keys ((length + 1) / 2 when causal)."""
        projections = 2.0 * (self.wq.numel() + self.wk.numel() + self.wv.numel() + self.wo.numel())
        keys = (length + 1) / 2 if causal else length
        return projections + 4.0 * self.num_heads * self.head_size * keys

    def state_bytes(self, length: int, dtype: torch.dtype) -> int:
        """Two buffers of `length` positions."""
        return 2 * length * self.num_kv_heads * self.head_size * dtype.itemsize
