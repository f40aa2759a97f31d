"""RWKV-7's time mixing (Peng et al., 2025): what a head forgets, corrects and stores are three vectors of their own.

Legend: B batch, L length, D width, H heads, K head size, N rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from surefoot.blocks.base import Initial, Mixer, MixerConfig, Shared
from surefoot.blocks.delta import check_block
from surefoot.config import FieldError
from surefoot.ops.conv import causal_conv
from surefoot.ops.delta import delta, delta_flops
from surefoot.ops.documents import Documents
from surefoot.ops.runs import OneRun, Runs

FIRST_VALUES = "rwkv7.values"
"""Where in `shared` the first such layer leaves its values."""

_STREAMS = ("r", "w", "k", "v", "a", "g")


class RWKV7Config(MixerConfig):
    """S = S (diag(w) - κ (a κ)ᵀ) + v k̃ᵀ, y = S r, from six mixtures of each position with the one before it."""

    num_heads: int = Field(gt=0)
    head_size: int = Field(default=64, gt=0)
    rank: int = Field(default=64, gt=0, description="width of the narrow layers of w, a and v")
    gate_rank: int = Field(default=128, gt=0, description="width of the narrow layer of the gate")
    values: Literal["own", "mixed"] = Field(
        default="own",
        description="own: what later layers may mix with, as the first layer; mixed: with those of an earlier layer",
    )
    block: int = Field(
        default=16,
        gt=0,
        description="positions at once, a power of two; memory grows with it, for a block holds block² head_size numbers a head",
    )

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `MixerConfig.examples`."""
        return {
            "own": cls(num_heads=4, head_size=8, rank=5, gate_rank=6, block=8),
            "mixed": cls(num_heads=4, head_size=8, rank=5, gate_rank=6, values="mixed", block=8),
        }

    @property
    def leaves_shared(self) -> str | None:
        """Its own values."""
        return FIRST_VALUES if self.values == "own" else None

    @property
    def needs_shared(self) -> str | None:
        """Those of the last layer before it that has its own."""
        return FIRST_VALUES if self.values == "mixed" else None

    def check_writer(self, writer: MixerConfig) -> None:
        """Heads must be those of the values."""
        if not isinstance(writer, RWKV7Config):
            raise FieldError("values", self.values, f"was left by {type(writer).__name__} under {FIRST_VALUES!r}")
        for name in ("num_heads", "head_size"):
            own, theirs = getattr(self, name), getattr(writer, name)
            if own != theirs:
                raise FieldError(name, own, f"must be {theirs} as in the layer that leaves its values")

    @property
    def example_writer(self) -> MixerConfig | None:
        """See `MixerConfig.example_writer`."""
        return self.model_copy(update={"values": "own"}) if self.values == "mixed" else None

    @model_validator(mode="after")
    def _block_fits(self) -> Self:
        check_block(self.block)
        return self

    def build(self, *, width: int, output_scale: float) -> RWKV7:
        """The mixer itself."""
        return RWKV7(self, width, output_scale)


class RWKV7State:
    """The position before and the map from keys to values of each head."""

    def __init__(self, tail_B1D: Tensor, state_BHKK: Tensor) -> None:
        self.tail_B1D, self.state_BHKK, self.length = tail_B1D, state_BHKK, 0

    def advance(self, tail_B1D: Tensor, state_BHKK: Tensor, num_positions: int) -> None:
        """After `num_positions` more."""
        self.tail_B1D.copy_(tail_B1D)
        self.state_BHKK.copy_(state_BHKK)
        self.length += num_positions


class RWKV7(Mixer):
    """See `RWKV7Config`. `runs` may be swapped where the sequence is cut."""

    def __init__(self, config: RWKV7Config, width: int, output_scale: float) -> None:
        super().__init__()
        self.config = config
        self.reads = (FIRST_VALUES,) if config.values == "mixed" else ()
        heads = config.num_heads * config.head_size
        self.units = {"heads": config.head_size}
        self.runs: Runs = OneRun()
        fan_in = Initial(std=width**-0.5)
        for stream in _STREAMS:
            self.add_weight(f"mix_{stream}", (width,), ("embed",), Initial(mean=0.5))
        for stream in "rkv":
            self.add_weight(f"w_{stream}", (heads, width), ("heads", "embed"), fan_in)
        narrow = {"w": config.rank, "a": config.rank, "g": config.gate_rank}
        if self.reads:
            narrow["v"] = config.rank
        for stream, rank in narrow.items():
            self.add_weight(f"{stream}_down", (rank, width), ("rank", "embed"), fan_in)
            self.add_weight(f"{stream}_up", (heads, rank), ("heads", "rank"), Initial(std=rank**-0.5))
            if stream != "g":
                # Decay starts slow, between e^-0.07 and e^-0.03; the others in the middle of their sigmoids.
                start = Initial(std=0.3, mean=-2.5) if stream == "w" else Initial()
                self.add_weight(f"{stream}_bias", (heads,), ("heads",), start)
        self.removed = self.add_weight("removed", (heads,), ("heads",), Initial(mean=0.85))
        self.replaced = self.add_weight("replaced", (heads,), ("heads",), Initial(mean=1.0))
        self.bonus = self.add_weight("bonus", (heads,), ("heads",), Initial())
        self.norm_scale = self.add_weight("norm_scale", (heads,), ("heads",), Initial(mean=1.0))
        self.norm_bias = self.add_weight("norm_bias", (heads,), ("heads",), Initial())
        self.w_out = self.add_weight(
            "w_out", (width, heads), ("embed", "heads"), Initial(std=output_scale * heads**-0.5)
        )

    def forward(
        self, x_BLD: Tensor, docs: Documents, state: RWKV7State | None = None, shared: Shared | None = None
    ) -> Tensor:
        """(B, L, D) to (B, L, D)."""
        dtype = torch.promote_types(x_BLD.dtype, torch.float32)
        # A filter that holds the position before: it begins anew with documents, and runs, as convolutions do.
        taps_DK = x_BLD.new_tensor([1.0, 0.0]).expand(x_BLD.shape[-1], 2)
        tail = None if state is None else state.tail_B1D
        before_BLD, tail_B1D = causal_conv(x_BLD, taps_DK, None, docs, self.runs, tail)
        moved = before_BLD - x_BLD
        mixed = {name: torch.addcmul(x_BLD, moved, getattr(self, f"mix_{name}").to(x_BLD.dtype)) for name in _STREAMS}
        r, k, v = (self.linear(mixed[name], f"w_{name}").to(dtype) for name in "rkv")
        # exp(-e^-0.5 sigmoid): at least 0.545, so that undoing one position's decay is harmless.
        log_decay = -math.exp(-0.5) * self._narrow("w", mixed["w"], torch.tanh).sigmoid()
        a = self._narrow("a", mixed["a"]).sigmoid()
        gate = self.linear(self.linear(mixed["g"], "g_down").sigmoid(), "g_up").to(dtype)
        v = self._values(v, mixed["v"], shared)
        kappa = F.normalize(self._heads(k * self.removed.to(dtype)), dim=-1)
        k = k * (1 + (a - 1) * self.replaced.to(dtype))
        r_BLHK, k_BLHK, v_BLHK, a_BLHK, log_decay_BLHK = (self._heads(x) for x in (r, k, v, a, log_decay))
        y_BLHK, last = delta(
            r_BLHK,
            -kappa * (-log_decay_BLHK).exp(),  # this rule reads before it forgets
            kappa * a_BLHK,
            torch.zeros_like(v_BLHK),
            log_decay_BLHK,
            docs.positions == 0,
            None if state is None else state.state_BHKK,
            (k_BLHK, v_BLHK),
            block=self.config.block,
            runs=self.runs,
        )
        if state is not None:
            state.advance(tail_B1D, last(), x_BLD.shape[1])
        normed_BLHK = F.layer_norm(y_BLHK, y_BLHK.shape[-1:], eps=1e-5 * self.config.head_size)
        scale, bias, bonus = (self._heads(x.to(dtype)) for x in (self.norm_scale, self.norm_bias, self.bonus))
        y_BLHK = normed_BLHK * scale + bias + (r_BLHK * k_BLHK * bonus).sum(-1, keepdim=True) * v_BLHK
        return self.linear((y_BLHK.flatten(2) * gate).to(x_BLD.dtype), "w_out")

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.config.head_size))
        return heads

    def _narrow(self, name: str, x_BLD: Tensor, bend: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Through a narrow layer and with its bias, in at least fp32."""
        dtype = torch.promote_types(x_BLD.dtype, torch.float32)
        x_BLN = self.linear(x_BLD, f"{name}_down")
        x_BLN = x_BLN if bend is None else bend(x_BLN)
        wide = self.linear(x_BLN, f"{name}_up").to(dtype)
        return wide + self.get_parameter(f"{name}_bias").to(dtype)

    def _values(self, v: Tensor, x_BLD: Tensor, shared: Shared | None) -> Tensor:
        """The layer's own values, left for later layers; or mixed with those left by an earlier one."""
        if not self.reads:
            if shared is not None:
                # A copy: FSDP hangs its hooks on what a layer returns, and a view might lose them.
                shared[FIRST_VALUES] = v.clone()
            return v
        if shared is None or FIRST_VALUES not in shared:
            raise ValueError(f"needs an earlier layer's values in shared, under {FIRST_VALUES!r}")
        return v + (shared[FIRST_VALUES].to(v.dtype) - v) * self._narrow("v", x_BLD).sigmoid()

    def leaves(self, batch: int, length: int, dtype: torch.dtype) -> Shared:
        """See `Mixer.leaves`: values, in at least fp32."""
        wide = torch.promote_types(dtype, torch.float32)
        shape = (batch, length, self.get_parameter("w_v").shape[0])
        return {} if self.reads else {FIRST_VALUES: torch.empty(shape, dtype=wide, device="meta")}

    def new_state(self, batch: int, length: int, dtype: torch.dtype) -> RWKV7State:  # noqa: ARG002 - of one size
        """Zeros; the state is kept in at least fp32."""
        config, device = self.config, self.w_out.device
        wide = torch.promote_types(dtype, torch.float32)
        shape = (batch, config.num_heads, config.head_size, config.head_size)
        tail = torch.zeros((batch, 1, self.w_out.shape[0]), dtype=dtype, device=device)
        return RWKV7State(tail, torch.zeros(shape, dtype=wide, device=device))

    def flops(self, length: int, *, causal: bool) -> float:
        """Forward FLOPs a token: projections, and `delta_flops` of every head."""
        size = self.config.head_size
        head = delta_flops(length, self.config.block, size, size, causal=causal, has_added=True)
        return self._projections() + self.config.num_heads * head

    def decode_flops(self, length: int) -> float:  # noqa: ARG002 - the state has one size
        """One position: what it reads twice, and stores twice."""
        return self._projections() + 8.0 * self.config.num_heads * self.config.head_size**2

    def _projections(self) -> float:
        sizes: list[int] = [getattr(self, name).numel() for name, axes in self.axes.items() if len(axes) == 2]
        return 2.0 * sum(sizes)

    def state_bytes(self, length: int, dtype: torch.dtype) -> int:  # noqa: ARG002 - of one size
        """4 H K² (in fp32) and one position of the dtype."""
        wide = torch.promote_types(dtype, torch.float32)
        return self.config.num_heads * self.config.head_size**2 * wide.itemsize + self.w_out.shape[0] * dtype.itemsize

    def decode_bytes(self, length: int, dtype: torch.dtype) -> int:
        """All of the state is read and written."""
        return 2 * self.state_bytes(length, dtype)
