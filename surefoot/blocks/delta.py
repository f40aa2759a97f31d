"""What mixers by the delta rule share: heads that correct a map from keys to values (`ops.delta`).

Legend: B batch, L length, D width, H value heads, G key heads, K key size, V value size, E decays a head (1 or K), T taps,
C channels of q, k and v.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from surefoot.blocks.base import Initial, Mixer, MixerConfig, Shared
from surefoot.blocks.norm import RMSNorm
from surefoot.blocks.start import StartOfDecay
from surefoot.config import FieldError
from surefoot.ops.conv import causal_conv
from surefoot.ops.delta import delta, delta_flops
from surefoot.ops.documents import Documents
from surefoot.ops.runs import OneRun, Runs

NORM_EPS = 1e-6
"""Inside the root that brings queries and keys to length 1: without it a key of zeros would have no gradient."""


class DeltaConfig(MixerConfig):
    """q, k and v go through a short convolution; a position stores beta (v - what k finds) under k."""

    num_heads: int = Field(gt=0, description="value heads")
    key_size: int = Field(default=128, gt=0)
    value_size: int = Field(default=128, gt=0)
    conv_size: int = Field(default=4, ge=1, description="positions that the convolution sees, its own included")
    norm_eps: float = Field(default=1e-6, gt=0)
    block: int = Field(default=64, gt=0, description="positions at once, a power of two; speed and rounding only")

    @model_validator(mode="after")
    def _block_fits(self) -> Self:
        check_block(self.block)
        return self


class DeltaState:
    """The convolution's past and the map from keys to values of each head."""

    def __init__(self, tail_BTC: Tensor, state_BHKV: Tensor) -> None:
        self.tail_BTC, self.state_BHKV, self.length = tail_BTC, state_BHKV, 0

    def advance(self, tail_BTC: Tensor, state_BHKV: Tensor, num_positions: int) -> None:
        """After `num_positions` more."""
        self.tail_BTC.copy_(tail_BTC)
        self.state_BHKV.copy_(state_BHKV)
        self.length += num_positions


class DeltaMixer(Mixer):
    """Everything but decay and gate. `runs` may be swapped where the sequence is cut."""

    max_strength = 1.0
    """What beta goes up to."""

    def __init__(self, config: DeltaConfig, num_key_heads: int, width: int, output_scale: float) -> None:
        super().__init__()
        self._config, self.num_key_heads = config, num_key_heads
        keys, values = num_key_heads * config.key_size, config.num_heads * config.value_size
        self.units = {"heads": config.value_size, "kv_heads": config.key_size}
        self.runs: Runs = OneRun()
        self.least_run = config.conv_size - 1
        fan_in, taps = Initial(std=width**-0.5), Initial(std=config.conv_size**-0.5)
        self.w_q = self.add_weight("w_q", (keys, width), ("kv_heads", "embed"), fan_in)
        self.w_k = self.add_weight("w_k", (keys, width), ("kv_heads", "embed"), fan_in)
        self.w_v = self.add_weight("w_v", (values, width), ("heads", "embed"), fan_in)
        self.w_beta = self.add_weight("w_beta", (config.num_heads, width), ("per_head", "embed"), fan_in)
        self.conv_q = self.add_weight("conv_q", (keys, config.conv_size), ("kv_heads", "taps"), taps)
        self.conv_k = self.add_weight("conv_k", (keys, config.conv_size), ("kv_heads", "taps"), taps)
        self.conv_v = self.add_weight("conv_v", (values, config.conv_size), ("heads", "taps"), taps)
        self.log_a = self.add_weight("log_a", (config.num_heads,), ("per_head",), StartOfDecay())
        self.norm = RMSNorm(config.value_size, config.norm_eps, "head")
        self.w_out = self.add_weight(
            "w_out", (width, values), ("embed", "heads"), Initial(std=output_scale * values**-0.5)
        )

    @abstractmethod
    def log_decay(self, x_BLD: Tensor) -> Tensor:
        """(B, L, D) to (B, L, H, E) in at least fp32, none above 0."""

    @abstractmethod
    def gate(self, x_BLD: Tensor) -> Tensor:
        """(B, L, D) to what the normed outputs are multiplied by, (B, L, H V), in at least fp32."""

    def forward(
        self,
        x_BLD: Tensor,
        docs: Documents,
        state: DeltaState | None = None,
        shared: Shared | None = None,  # noqa: ARG002 - reads and leaves nothing
    ) -> Tensor:
        """(B, L, D) to (B, L, D)."""
        config = self._config
        weights = ("w_q", "w_k", "w_v", "w_beta")
        sizes = [getattr(self, name).shape[0] for name in weights]  # under tensor parallelism, of this rank
        qkv, beta = self.linear(x_BLD, *weights).split((sum(sizes[:3]), sizes[3]), -1)
        taps = torch.cat((self.conv_q, self.conv_k, self.conv_v))
        tail = None if state is None else state.tail_BTC
        qkv, tail_BTC = causal_conv(qkv, taps, None, docs, self.runs, tail)
        dtype = torch.promote_types(x_BLD.dtype, torch.float32)
        q, k, v = F.silu(qkv).to(dtype).split(sizes[:3], -1)
        per_key = config.num_heads // self.num_key_heads
        q_BLHK, k_BLHK = (unit(x.unflatten(-1, (-1, config.key_size))).repeat_interleave(per_key, 2) for x in (q, k))
        beta_BLH1 = self.max_strength * beta.to(dtype).sigmoid()[..., None]
        y_BLHV, last = delta(
            q_BLHK * config.key_size**-0.5,
            -beta_BLH1 * k_BLHK,
            k_BLHK,
            beta_BLH1 * v.unflatten(-1, (-1, config.value_size)),
            self.log_decay(x_BLD),
            docs.positions == 0,
            None if state is None else state.state_BHKV,
            block=config.block,
            runs=self.runs,
        )
        if state is not None:
            state.advance(tail_BTC, last(), x_BLD.shape[1])
        # Normed first and gated then, the other way round than Mamba-2.
        gated = self.norm(y_BLHV).flatten(2) * self.gate(x_BLD)
        return self.linear(gated.to(x_BLD.dtype), "w_out")

    def new_state(self, batch: int, length: int, dtype: torch.dtype) -> DeltaState:  # noqa: ARG002 - of one size
        """Zeros; the state is kept in at least fp32."""
        config, device = self._config, self.w_q.device
        channels = 2 * self.num_key_heads * config.key_size + config.num_heads * config.value_size
        tail = torch.zeros((batch, config.conv_size - 1, channels), dtype=dtype, device=device)
        shape = (batch, config.num_heads, config.key_size, config.value_size)
        return DeltaState(tail, torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=device))

    def flops(self, length: int, *, causal: bool) -> float:
        """Forward FLOPs a token: projections, and `delta_flops` of every head."""
        config = self._config
        head = delta_flops(length, config.block, config.key_size, config.value_size, causal=causal, has_added=False)
        return self._projections() + config.num_heads * head

    def decode_flops(self, length: int) -> float:  # noqa: ARG002 - the state has one size
        """One position: what its key finds, what it stores and what its query reads."""
        config = self._config
        return self._projections() + 6.0 * config.num_heads * config.key_size * config.value_size

    def _projections(self) -> float:
        matrices = [name for name, axes in self.axes.items() if len(axes) == 2 and "taps" not in axes]
        sizes: list[int] = [getattr(self, name).numel() for name in matrices]
        return 2.0 * sum(sizes)

    def state_bytes(self, length: int, dtype: torch.dtype) -> int:  # noqa: ARG002 - of one size
        """4 H K V (in fp32) + (T - 1)(2 G K + H V) numbers of the dtype."""
        config = self._config
        channels = 2 * self.num_key_heads * config.key_size + config.num_heads * config.value_size
        held = config.num_heads * config.key_size * config.value_size
        wide = torch.promote_types(dtype, torch.float32)
        return (config.conv_size - 1) * channels * dtype.itemsize + held * wide.itemsize

    def decode_bytes(self, length: int, dtype: torch.dtype) -> int:
        """All of the state is read and written."""
        return 2 * self.state_bytes(length, dtype)


def unit(x: Tensor) -> Tensor:
    """Vectors brought to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def check_block(block: int) -> None:
    """`FieldError` where blocks of so many positions cannot be halved down to one."""
    if block & (block - 1):
        raise FieldError("block", block, f"must be a power of two; the next is {1 << (block - 1).bit_length()}")
