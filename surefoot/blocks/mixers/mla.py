"""Multi-head latent attention (DeepSeek-AI, 2024): keys and values of all heads are made from one small latent a token.

    c = norm(W_down x)    k_r = turn(W_kr x)    k_h = [W_uk,h c ; k_r]    v_h = W_uv,h c    q_h = [q_n ; turn(q_r)]

Training expands keys and values (naive form). Decoding keeps (c, k_r) alone and moves W_uk to the query and W_uv behind the sum
(absorbed form): q·k = (W_uk' q_n)·c + q_r·k_r, and the sum of weights times v is W_uv times the sum of weights times c.

Legend: B batch, L length (queries), S keys, D width, H heads, C latent size, N, R and V sizes of a head's part that does not
turn, of the one that does, and of a value; X = C + R, Y is N or V.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from surefoot.blocks.base import Block, Initial, Mixer, MixerConfig, Shared
from surefoot.blocks.mixers.cache import State, mean_seen
from surefoot.blocks.norm import RMSNorm
from surefoot.blocks.rope import Rope, RopeScaling, YarnScaling
from surefoot.ops.attention import Attend, attend, attend_plain
from surefoot.ops.documents import EVERYTHING, Documents
from surefoot.ops.scores import Scores


class MLAConfig(MixerConfig):
    """Multi-head latent attention (DeepSeek-V2, 2024)."""

    num_heads: int = Field(gt=0)
    latent_size: int = Field(gt=0, description="numbers a token that keys and values of all heads are made from")
    q_latent_size: int | None = Field(
        default=None, gt=0, description="likewise for queries; straight from x if not given"
    )
    head_size: int = Field(gt=0, description="of the part of queries and keys that does not turn")
    rope_size: int = Field(gt=0, multiple_of=2, description="of the part that turns, whose key all heads share")
    value_size: int = Field(gt=0)
    rope: Literal["half", "interleaved"] = "interleaved"
    rope_theta: float = Field(default=10_000.0, gt=1, description="longest wavelength is 2 pi times this")
    rope_scaling: RopeScaling | None = None
    scale: float | None = Field(
        default=None, gt=0, description="of products; 1 / sqrt(head_size + rope_size) where not given"
    )
    norm_eps: float = Field(default=1e-6, gt=0, description="of the norms of both latents")

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `MixerConfig.examples`."""
        example = partial(cls, num_heads=4, latent_size=12, head_size=6, rope_size=4, value_size=5, rope_theta=20.0)
        return {
            "full-rank queries": example(),
            "low-rank queries": example(q_latent_size=10),
            "yarn": example(rope="half", rope_scaling=YarnScaling(factor=4.0, original_length=16), scale=0.4),
        }

    def build(self, *, width: int, output_scale: float) -> MLA:
        """The mixer itself."""
        return MLA(self, width, output_scale)


class Expansion(Block):
    """A weight from the latent to a part of each head; `units` of one block cannot name heads of several sizes."""

    def __init__(self, num_heads: int, size: int, latent_size: int) -> None:
        super().__init__()
        self.size, self.units = size, {"heads": size}
        shape, fan_in = (num_heads * size, latent_size), Initial(std=latent_size**-0.5)
        self.weight = self.add_weight("weight", shape, ("heads", "latent"), fan_in)

    def forward(self, c_BSC: Tensor) -> Tensor:
        """(B, S, C) to (B, S, H, Y)."""
        x_BSHY: Tensor = self.linear(c_BSC, "weight").unflatten(-1, (-1, self.size))
        return x_BSHY

    def by_head(self, dtype: torch.dtype) -> Tensor:
        """(H, Y, C)."""
        weight_HYC: Tensor = self.weight.to(dtype).unflatten(0, (-1, self.size))
        return weight_HYC


class Output(Block):
    """From all heads' values back to the width."""

    def __init__(self, num_heads: int, size: int, width: int, output_scale: float) -> None:
        super().__init__()
        self.units = {"heads": size}
        fan_in = num_heads * size
        self.weight = self.add_weight(
            "weight", (width, fan_in), ("embed", "heads"), Initial(std=output_scale * fan_in**-0.5)
        )

    def forward(self, y_BLHV: Tensor) -> Tensor:
        """(B, L, D)."""
        return self.linear(y_BLHV.flatten(2), "weight")


class MLA(Mixer):
    """See `MLAConfig`. `attend` may be swapped for a parallel form."""

    def __init__(self, config: MLAConfig, width: int, output_scale: float) -> None:
        super().__init__()
        self.config = config
        self.num_heads, self.qk_size = config.num_heads, config.head_size + config.rope_size
        self.units = {"heads": self.qk_size}
        fan_in = Initial(std=width**-0.5)
        self.w_down = self.add_weight("w_down", (config.latent_size, width), ("latent", "embed"), fan_in)
        self.w_kr = self.add_weight("w_kr", (config.rope_size, width), ("head", "embed"), fan_in)
        self.norm_c = RMSNorm(config.latent_size, config.norm_eps, "latent")
        q_rows, self.norm_q = self.num_heads * self.qk_size, None
        if config.q_latent_size is None:
            self.wq = self.add_weight("wq", (q_rows, width), ("heads", "embed"), fan_in)
        else:
            size = config.q_latent_size
            self.wq_down = self.add_weight("wq_down", (size, width), ("latent", "embed"), fan_in)
            self.norm_q = RMSNorm(size, config.norm_eps, "latent")
            self.wq = self.add_weight("wq", (q_rows, size), ("heads", "latent"), Initial(std=size**-0.5))
        self.up_k = Expansion(self.num_heads, config.head_size, config.latent_size)
        self.up_v = Expansion(self.num_heads, config.value_size, config.latent_size)
        self.out = Output(self.num_heads, config.value_size, width, output_scale)
        self.rope = Rope(config.rope_size, config.rope_theta, config.rope, config.rope_scaling)
        self.scores = Scores(self.qk_size**-0.5 if config.scale is None else config.scale)
        self.attend: Attend = attend

    def forward(
        self,
        x_BLD: Tensor,
        docs: Documents,
        state: State | None = None,
        shared: Shared | None = None,  # noqa: ARG002 - keeps its latents to itself
    ) -> Tensor:
        """(B, L, D) to (B, L, D); with a state, queries also see the positions it holds."""
        config, tables = self.config, self.rope.tables(docs, x_BLD.dtype)
        c_BLC, kr_BLR = self.linear(x_BLD, "w_down", "w_kr").split((config.latent_size, config.rope_size), -1)
        q_input = x_BLD if self.norm_q is None else self.norm_q(self.linear(x_BLD, "wq_down"))
        # The weight says how many heads there are: under tensor parallelism it holds this rank's.
        q_BLHN, qr_BLHR = (
            self.linear(q_input, "wq").unflatten(-1, (-1, self.qk_size)).split((config.head_size, config.rope_size), -1)
        )
        qr_BLHR = self.rope.turn(qr_BLHR, tables)
        kr_BLR = self.rope.turn(kr_BLR[:, :, None], tables)[:, :, 0]
        latent_BSX = torch.cat((self.norm_c(c_BLC), kr_BLR), -1)
        if state is not None:
            (latent_BSX,) = state.append(latent_BSX)
        form = (
            self.naive if state is None or not self._is_absorbed(x_BLD.shape[1], latent_BSX.shape[1]) else self.absorbed
        )
        y_BLD: Tensor = self.out(form(q_BLHN, qr_BLHR, latent_BSX, docs))
        return y_BLD

    def naive(self, q_BLHN: Tensor, qr_BLHR: Tensor, latent_BSX: Tensor, docs: Documents) -> Tensor:
        """Values' sums (B, L, H, V) over expanded keys and values."""
        c_BSC, kr_BSR = latent_BSX.split((self.config.latent_size, self.config.rope_size), -1)
        k_BSHN, v_BSHV = self.up_k(c_BSC), self.up_v(c_BSC)
        k_BSHK = torch.cat((k_BSHN, kr_BSR[:, :, None].expand(-1, -1, k_BSHN.shape[2], -1)), -1)
        return self.attend(torch.cat((q_BLHN, qr_BLHR), -1), k_BSHK, v_BSHV, docs, self.scores)

    def absorbed(self, q_BLHN: Tensor, qr_BLHR: Tensor, latent_BSX: Tensor, docs: Documents) -> Tensor:
        """The same, and no key or value is ever made: the latent is the one key-value head of all queries."""
        q_BLHC = torch.einsum("blhn,hnc->blhc", q_BLHN, self.up_k.by_head(q_BLHN.dtype))
        k_BS1X = latent_BSX[:, :, None]
        q_BLHX, c_BS1C = torch.cat((q_BLHC, qr_BLHR), -1), k_BS1X[..., : self.config.latent_size]
        y_BLHC = self.attend(q_BLHX, k_BS1X, c_BS1C, docs, self.scores)
        return torch.einsum("blhc,hvc->blhv", y_BLHC, self.up_v.by_head(y_BLHC.dtype))

    def _is_absorbed(self, length: int, num_keys: int) -> bool:
        """Whether that takes fewer products, for `length` queries; a single one would read all heads for itself alone."""
        config = self.config
        both = config.head_size + config.value_size
        absorbed = length * (num_keys * (2 * config.latent_size + config.rope_size) + config.latent_size * both)
        naive = num_keys * (length * (both + config.rope_size) + config.latent_size * both)
        return length == 1 or absorbed <= naive

    def use_plain(self) -> None:
        """See `Mixer.use_plain`: all scores, those that the mask hides too."""
        self.attend = attend_plain

    def new_state(self, batch: int, length: int, dtype: torch.dtype) -> State:
        """One buffer of latents and turned keys."""
        shape = (batch, length, self.config.latent_size + self.config.rope_size)
        return State((shape,), EVERYTHING, dtype=dtype, device=self.wq.device)

    def flops(self, length: int, *, causal: bool) -> float:
        """Forward FLOPs a token in the naive form."""
        keys = mean_seen(EVERYTHING, length) if causal else length
        return self._weight_flops() + 2.0 * self.num_heads * (self.qk_size + self.config.value_size) * keys

    def decode_flops(self, length: int) -> float:
        """In the absorbed form, which multiplies by the same weights once a query."""
        size = 2 * self.config.latent_size + self.config.rope_size
        return self._weight_flops() + 2.0 * self.num_heads * size * length

    def _weight_flops(self) -> float:
        return 2.0 * sum(weight.numel() for weight in self.parameters() if weight.dim() == 2)

    def state_bytes(self, length: int, dtype: torch.dtype) -> int:
        """C + R numbers a position."""
        return length * (self.config.latent_size + self.config.rope_size) * dtype.itemsize
