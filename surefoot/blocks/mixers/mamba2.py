"""Mamba-2 (Dao and Gu, 2024): a state space whose decay is one number a head and position.

Legend: B batch, L length, D width, H heads, G groups of heads that share B and C, P head size, N state size, K taps.
"""

from __future__ import annotations

from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from surefoot.blocks.base import Initial, Mixer, MixerConfig, Shared
from surefoot.blocks.norm import GroupNorm
from surefoot.blocks.start import StartOfDecay, StartOfStep
from surefoot.config import FieldError
from surefoot.ops.conv import causal_conv
from surefoot.ops.documents import Documents
from surefoot.ops.runs import OneRun, Runs
from surefoot.ops.ssd import ssd


class Mamba2Config(MixerConfig):
    """x, B and C go through a short convolution; dt = softplus(x Wdt + bias) is how far a position moves the state."""

    num_heads: int = Field(gt=0)
    head_size: int = Field(default=64, gt=0)
    state_size: int = Field(default=128, gt=0)
    num_groups: int = Field(default=1, gt=0, description="sets of B and C; each serves num_heads / num_groups heads")
    conv_size: int = Field(default=4, ge=1, description="positions that the convolution sees, its own included")
    conv_bias: bool = True
    norm_groups: int | None = Field(
        default=None, gt=0, description="parts of the heads' outputs that are normed apart; one a head where not given"
    )
    norm_eps: float = Field(default=1e-6, gt=0)
    block: int = Field(default=64, gt=0, description="positions at once; changes speed and rounding only")
    dt_min: float = Field(default=1e-3, gt=0, description="dt starts between dt_min and dt_max")
    dt_max: float = Field(default=1e-1, gt=0)
    dt_limit: tuple[float, float] | None = Field(default=None, description="dt is kept within these; null: anywhere")

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `MixerConfig.examples`."""
        return {
            "": cls(num_heads=4, head_size=8, state_size=6, block=8),
            "groups": cls(
                num_heads=4, head_size=8, state_size=6, num_groups=2, norm_groups=2, conv_bias=False, block=8
            ),
            "limit": cls(num_heads=4, head_size=8, state_size=6, dt_limit=(0.01, 0.5), block=8),
        }

    @model_validator(mode="after")
    def _groups_divide(self) -> Self:
        for name in ("num_groups", "norm_groups"):
            value = getattr(self, name)
            if value is not None and self.num_heads % value:
                raise FieldError(name, value, f"must divide num_heads {self.num_heads}")
        if self.dt_max < self.dt_min:
            raise FieldError("dt_max", self.dt_max, f"must be at least dt_min {self.dt_min}")
        return self

    def build(self, *, width: int, output_scale: float) -> Mamba2:
        """The mixer itself."""
        return Mamba2(self, width, output_scale)


class Mamba2State:
    """The convolution's past and the state of each head."""

    def __init__(self, tail_BKC: Tensor, state_BHPN: Tensor) -> None:
        self.tail_BKC, self.state_BHPN, self.length = tail_BKC, state_BHPN, 0

    def advance(self, tail_BKC: Tensor, state_BHPN: Tensor, num_positions: int) -> None:
        """After `num_positions` more."""
        self.tail_BKC.copy_(tail_BKC)
        self.state_BHPN.copy_(state_BHPN)
        self.length += num_positions


class Mamba2(Mixer):
    """See `Mamba2Config`. `runs` may be swapped where the sequence is cut."""

    def __init__(self, config: Mamba2Config, width: int, output_scale: float) -> None:
        super().__init__()
        self.config = config
        heads, per_group = config.num_heads * config.head_size, config.num_groups * config.state_size
        groups = "kv_heads" if config.num_groups > 1 else "state"  # one group serves the heads of all ranks
        norm_groups = config.norm_groups or config.num_heads
        self.units = {"heads": config.head_size, "kv_heads": config.state_size}
        self.runs: Runs = OneRun()
        self.least_run = config.conv_size - 1
        fan_in, taps = Initial(std=width**-0.5), Initial(std=config.conv_size**-0.5)
        self.w_z = self.add_weight("w_z", (heads, width), ("heads", "embed"), fan_in)
        self.w_x = self.add_weight("w_x", (heads, width), ("heads", "embed"), fan_in)
        self.w_b = self.add_weight("w_b", (per_group, width), (groups, "embed"), fan_in)
        self.w_c = self.add_weight("w_c", (per_group, width), (groups, "embed"), fan_in)
        self.w_dt = self.add_weight("w_dt", (config.num_heads, width), ("per_head", "embed"), fan_in)
        for name, size, axis in (("x", heads, "heads"), ("b", per_group, groups), ("c", per_group, groups)):
            self.add_weight(f"conv_{name}", (size, config.conv_size), (axis, "taps"), taps)
            if config.conv_bias:
                self.add_weight(f"conv_bias_{name}", (size,), (axis,), Initial())
        self.log_a = self.add_weight("log_a", (config.num_heads,), ("per_head",), StartOfDecay())
        self.dt_bias = self.add_weight(
            "dt_bias", (config.num_heads,), ("per_head",), StartOfStep(low=config.dt_min, high=config.dt_max)
        )
        self.skip = self.add_weight("skip", (config.num_heads,), ("per_head",), Initial(mean=1.0))
        self.norm = GroupNorm(heads, heads // norm_groups, config.norm_eps)
        self.w_out = self.add_weight(
            "w_out", (width, heads), ("embed", "heads"), Initial(std=output_scale * heads**-0.5)
        )

    def forward(
        self,
        x_BLD: Tensor,
        docs: Documents,
        state: Mamba2State | None = None,
        shared: Shared | None = None,  # noqa: ARG002 - reads and leaves nothing
    ) -> Tensor:
        """(B, L, D) to (B, L, D)."""
        config, length = self.config, x_BLD.shape[1]
        weights = ("w_z", "w_x", "w_b", "w_c", "w_dt")
        sizes = [getattr(self, name).shape[0] for name in weights]  # under tensor parallelism, of this rank
        z, xbc, dt = self.linear(x_BLD, *weights).split((sizes[0], sum(sizes[1:4]), sizes[4]), -1)
        taps, bias = self._taps()
        xbc, tail_BKC = causal_conv(xbc, taps, bias, docs, self.runs, None if state is None else state.tail_BKC)
        dtype = torch.promote_types(x_BLD.dtype, torch.float32)
        x, b, c = F.silu(xbc).to(dtype).split(sizes[1:4], -1)
        x_BLHP = x.unflatten(-1, (-1, config.head_size))
        b_BLGN, c_BLGN = (tensor.unflatten(-1, (-1, config.state_size)) for tensor in (b, c))
        dt_BLH = F.softplus(dt.to(dtype) + self.dt_bias.to(dtype))
        if config.dt_limit is not None:
            dt_BLH = dt_BLH.clamp(*config.dt_limit)
        y_BLHP, last_BHPN = ssd(
            x_BLHP * dt_BLH[..., None],
            dt_BLH * -self.log_a.to(dtype).exp(),
            b_BLGN,
            c_BLGN,
            docs.positions == 0,
            None if state is None else state.state_BHPN,
            block=config.block,
            runs=self.runs,
        )
        y_BLHP = y_BLHP + self.skip.to(dtype)[:, None] * x_BLHP
        if state is not None:
            state.advance(tail_BKC, last_BHPN, length)
        gated = y_BLHP.flatten(2) * F.silu(z.to(dtype))
        return self.linear(self.norm(gated).to(x_BLD.dtype), "w_out")

    def _taps(self) -> tuple[Tensor, Tensor | None]:
        taps = torch.cat([getattr(self, f"conv_{name}") for name in "xbc"])
        if not self.config.conv_bias:
            return taps, None
        return taps, torch.cat([getattr(self, f"conv_bias_{name}") for name in "xbc"])

    def new_state(self, batch: int, length: int, dtype: torch.dtype) -> Mamba2State:  # noqa: ARG002 - of one size
        """Zeros; the state is kept in at least fp32."""
        config, device = self.config, self.w_x.device
        channels = config.num_heads * config.head_size + 2 * config.num_groups * config.state_size
        tail = torch.zeros((batch, config.conv_size - 1, channels), dtype=dtype, device=device)
        shape = (batch, config.num_heads, config.head_size, config.state_size)
        return Mamba2State(tail, torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=device))

    def flops(self, length: int, *, causal: bool) -> float:
        """Forward FLOPs a token: projections, and by blocks of c positions 2 c (G N + H P) + 4 H P N; half of the scores of a
        block are masked."""
        config = self.config
        block = min(config.block, length)
        filled = -(-length // block) * block / length
        seen = (block + 1) / 2 if causal else block
        heads = config.num_heads * config.head_size
        return self._projections() + filled * (
            2.0 * seen * (config.num_groups * config.state_size + heads) + 4.0 * heads * config.state_size
        )

    def decode_flops(self, length: int) -> float:  # noqa: ARG002 - the state has one size
        """One position: what it adds to the state and what it reads."""
        return self._projections() + 4.0 * self.config.num_heads * self.config.head_size * self.config.state_size

    def _projections(self) -> float:
        matrices: list[nn.Parameter] = [self.w_z, self.w_x, self.w_b, self.w_c, self.w_dt, self.w_out]
        return 2.0 * sum(weight.numel() for weight in matrices)

    def state_bytes(self, length: int, dtype: torch.dtype) -> int:  # noqa: ARG002 - of one size
        """4 H P N (in fp32) + (K - 1)(H P + 2 G N) numbers of the dtype."""
        config = self.config
        heads = config.num_heads * config.head_size
        tail = (config.conv_size - 1) * (heads + 2 * config.num_groups * config.state_size) * dtype.itemsize
        return tail + heads * config.state_size * torch.promote_types(dtype, torch.float32).itemsize

    def decode_bytes(self, length: int, dtype: torch.dtype) -> int:
        """All of the state is read and written."""
        return 2 * self.state_bytes(length, dtype)
