"""Linear attention with a fixed decay a head: retention (Sun et al., 2023, without its rotation) and lightning attention
(Qin et al., 2024), computed as the state space that it is (Dao and Gu, 2024).

Legend: B batch, L length, D width, H heads, K head size.
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from surefoot.blocks.base import Initial, Mixer, MixerConfig, Shared
from surefoot.blocks.norm import RMSNorm
from surefoot.ops.documents import Documents
from surefoot.ops.runs import OneRun, Runs
from surefoot.ops.ssd import ssd


class RetentionConfig(MixerConfig):
    """S = λ S + k vᵀ, y = Sᵀ q, normed a head and gated; λ is given by the head's number and never learned.

    Tensor parallelism is refused: a rank that holds some of the heads would not know which.
    """

    num_heads: int = Field(gt=0)
    head_size: int = Field(default=64, gt=0)
    decay: Literal["retention", "lightning"] = Field(
        default="lightning",
        description="λ of head h of H, from 1: retention 1 - 2^(-4-h); lightning e^-s with the slopes of ALiBi, "
        "s = 2^(-8h/H) (Press et al., 2022)",
    )
    slope_scale: float = Field(
        default=1.0,
        gt=0,
        description="multiplies s; lightning has 1 - layer/depth + 1e-5, so that later layers last longer",
    )
    activation: Literal["silu", "none"] = Field(default="silu", description="of q, k and v")
    norm_eps: float = Field(default=1e-6, gt=0)
    block: int = Field(default=64, gt=0, description="positions at once; changes speed and rounding only")

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `MixerConfig.examples`."""
        return {
            "lightning": cls(num_heads=4, head_size=8, slope_scale=0.2, block=8),
            "retention": cls(num_heads=4, head_size=8, decay="retention", activation="none", block=8),
        }

    def build(self, *, width: int, output_scale: float) -> Retention:
        """The mixer itself."""
        return Retention(self, width, output_scale)

    def log_decays(self) -> list[float]:
        """log λ of every head."""
        heads = range(1, self.num_heads + 1)
        if self.decay == "retention":
            decays = torch.tensor([-(2.0 ** (-4 - head)) for head in heads], dtype=torch.float64).log1p()
            return [self.slope_scale * value for value in decays.tolist()]
        return [-self.slope_scale * 2.0 ** (-8 * head / self.num_heads) for head in heads]


class RetentionState:
    """The map from keys to values of each head."""

    def __init__(self, state_BHKK: Tensor) -> None:
        self.state_BHKK, self.length = state_BHKK, 0

    def advance(self, state_BHKK: Tensor, num_positions: int) -> None:
        """After `num_positions` more."""
        self.state_BHKK.copy_(state_BHKK)
        self.length += num_positions


class Retention(Mixer):
    """See `RetentionConfig`. `runs` may be swapped where the sequence is cut."""

    def __init__(self, config: RetentionConfig, width: int, output_scale: float) -> None:
        super().__init__()
        self.config = config
        heads = config.num_heads * config.head_size
        self.units = {"heads": config.head_size}
        self.runs: Runs = OneRun()
        fan_in = Initial(std=width**-0.5)
        self.w_q = self.add_weight("w_q", (heads, width), ("heads", "embed"), fan_in)
        self.w_k = self.add_weight("w_k", (heads, width), ("heads", "embed"), fan_in)
        self.w_v = self.add_weight("w_v", (heads, width), ("heads", "embed"), fan_in)
        self.w_z = self.add_weight("w_z", (heads, width), ("heads", "embed"), fan_in)
        self.norm = RMSNorm(config.head_size, config.norm_eps, "head")
        out = Initial(std=output_scale * heads**-0.5)
        self.w_out = self.add_weight("w_out", (width, heads), ("embed", "heads"), out)

    def forward(
        self,
        x_BLD: Tensor,
        docs: Documents,
        state: RetentionState | None = None,
        shared: Shared | None = None,  # noqa: ARG002 - reads and leaves nothing
    ) -> Tensor:
        """(B, L, D) to (B, L, D)."""
        config, (batch, length, _) = self.config, x_BLD.shape
        dtype = torch.promote_types(x_BLD.dtype, torch.float32)
        *qkv, z = self.linear(x_BLD, "w_q", "w_k", "w_v", "w_z").to(dtype).chunk(4, -1)
        if config.activation == "silu":
            qkv = [F.silu(x) for x in qkv]
        q_BLHK, k_BLHK, v_BLHK = (x.unflatten(-1, (-1, config.head_size)) for x in qkv)
        # A head's decay is told by its number, also under tensor parallelism, where others have the heads before.
        num_heads = q_BLHK.shape[2]
        log_decays = config.log_decays()[self.part * num_heads :][:num_heads]
        log_decay_H = torch.tensor(log_decays, dtype=dtype, device=x_BLD.device)
        y_BLHK, last_BHKK = ssd(
            v_BLHK,
            log_decay_H.expand(batch, length, -1),
            k_BLHK,
            q_BLHK,
            docs.positions == 0,
            None if state is None else state.state_BHKK,
            block=config.block,
            runs=self.runs,
        )
        if state is not None:
            state.advance(last_BHKK, length)
        gated = self.norm(y_BLHK).flatten(2) * (F.silu(z) if config.decay == "retention" else z.sigmoid())
        return self.linear(gated.to(x_BLD.dtype), "w_out")

    def new_state(self, batch: int, length: int, dtype: torch.dtype) -> RetentionState:  # noqa: ARG002 - of one size
        """Zeros, in at least fp32."""
        shape = (batch, self.config.num_heads, self.config.head_size, self.config.head_size)
        wide = torch.promote_types(dtype, torch.float32)
        return RetentionState(torch.zeros(shape, dtype=wide, device=self.w_out.device))

    def flops(self, length: int, *, causal: bool) -> float:
        """Forward FLOPs a token: projections, and by blocks of c positions 4 c H K + 4 H K²; half of the scores of a block
        are masked."""
        config = self.config
        heads, block = config.num_heads * config.head_size, min(config.block, length)
        filled = -(-length // block) * block / length
        seen = (block + 1) / 2 if causal else block
        return self._projections() + filled * 4.0 * heads * (seen + config.head_size)

    def decode_flops(self, length: int) -> float:  # noqa: ARG002 - the state has one size
        """One position: what it adds to the state and what it reads."""
        return self._projections() + 4.0 * self.config.num_heads * self.config.head_size**2

    def _projections(self) -> float:
        return 2.0 * 5 * self.w_out.numel()

    def state_bytes(self, length: int, dtype: torch.dtype) -> int:  # noqa: ARG002 - of one size
        """4 H K², in fp32."""
        wide = torch.promote_types(dtype, torch.float32)
        return self.config.num_heads * self.config.head_size**2 * wide.itemsize

    def decode_bytes(self, length: int, dtype: torch.dtype) -> int:
        """All of the state is read and written."""
        return 2 * self.state_bytes(length, dtype)
