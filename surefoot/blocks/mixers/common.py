"""A transformer block that several layers have in common (Zamba2; Glorioso et al., 2024).

    z = norm([x, e]);  y = network(norm(attention(z)));  the layer adds y W

e are the token's embeddings. Norms, attention and network are one set of weights, wherever they stand; each layer's own are W
and an adapter of low rank beside the network's first projections. In Zamba2 x is the stream itself, and y W is added to what
the Mamba layer after it reads; here the decoder's norm comes before, and y W is added to the stream.

Legend: B batch, L length, D width, F hidden width, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from surefoot.blocks.base import EMBEDDED, Block, Common, FeedForward, Initial, Mixer, MixerConfig, Shared
from surefoot.blocks.ffn.gated import Gated
from surefoot.blocks.mixers.attention import Attention, AttentionConfig
from surefoot.blocks.mixers.composite import Composite, CompositeState, inner_states
from surefoot.blocks.norm import RMSNorm
from surefoot.config import FieldError
from surefoot.ops.activations import ACTIVATIONS
from surefoot.ops.documents import Documents


class CommonBlockConfig(MixerConfig):
    """One block for all layers of its letter in `mixer_pattern`; two letters are two blocks that may take turns."""

    attention: AttentionConfig = Field(description="of an input twice as wide as the model")
    hidden: int = Field(gt=0, description="width between the projections of the network")
    activation: Literal["gelu", "gelu_tanh", "silu", "relu"] = "gelu"
    rank: int = Field(gt=0, description="of each layer's own adapter")
    norm_eps: float = Field(default=1e-5, gt=0)

    @model_validator(mode="after")
    def _attention_stands_alone(self) -> Self:
        for name in ("leaves", "reads", "value_rows"):
            if (value := getattr(self.attention, name)) is not None:
                raise FieldError(f"attention.{name}", value, "has no place in a block that layers share; leave it out")
        return self

    @property
    def reads_embedded(self) -> bool:
        """See `MixerConfig.reads_embedded`."""
        return True

    @property
    def is_common(self) -> bool:
        """See `MixerConfig.is_common`."""
        return True

    def check_width(self, width: int) -> None:
        """See `MixerConfig.check_width`."""
        self.attention.check_width(2 * width)

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `MixerConfig.examples`."""
        attention = AttentionConfig(num_heads=4, num_kv_heads=2, qk_norm="none", rope_theta=20.0)
        return {"": cls(attention=attention, hidden=24, rank=6)}

    def build(self, *, width: int, output_scale: float) -> CommonBlock:
        """The mixer itself."""
        return CommonBlock(self, width, output_scale)


class Adapter(Block):
    """What a layer adds to the first projections of the common network: two products through R numbers (Hu et al., 2021)."""

    def __init__(self, rank: int, hidden: int, width: int) -> None:
        super().__init__()
        self.add_weight("w_in", (rank, width), ("rank", "embed"), Initial(std=width**-0.5))
        self.add_weight("w_gate", (hidden, rank), ("ffn", "rank"), Initial())
        self.add_weight("w_up", (hidden, rank), ("ffn", "rank"), Initial())

    def forward(self, x_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """(B, L, D) to what is added to the gate and to what it lets through, (B, L, F) each."""
        x_BLR = self.linear(x_BLD, "w_in")
        return self.linear(x_BLR, "w_gate"), self.linear(x_BLR, "w_up")

    def flops(self) -> float:
        """Forward FLOPs a token."""
        return 2.0 * sum(weight.numel() for weight in self.parameters())


class Network(Gated):
    """activation(x Wg + a) · (x Wu + b) Wd, where a and b are an adapter's."""

    def __init__(self, config: CommonBlockConfig, width: int) -> None:
        super().__init__(config.hidden, width, 1.0)
        self.activation = ACTIVATIONS[config.activation]

    def gate(self, gate_BLF: Tensor, up_BLF: Tensor) -> Tensor:
        """See `Gated.gate`."""
        return self.activation(gate_BLF) * up_BLF

    def forward(self, x_BLD: Tensor, adapter: Adapter | None = None) -> Tensor:
        """(B, L, D) to (B, L, D)."""
        if adapter is None:
            return super().forward(x_BLD)
        gate_BLF, up_BLF = adapter(x_BLD)
        h_BLF = self.gate(self.linear(x_BLD, "w_gate") + gate_BLF, self.linear(x_BLD, "w_up") + up_BLF)
        return self.linear(h_BLF, "w_down")


class CommonParts(Common):
    """What the layers have in common."""

    def __init__(self, config: CommonBlockConfig, width: int) -> None:
        super().__init__()
        self.norm_in = RMSNorm(2 * width, config.norm_eps)
        self.attention = Attention(config.attention, 2 * width, 1.0, out_width=width)
        self.norm_network = RMSNorm(width, config.norm_eps)
        self.network = Network(config, width)

    def forward(
        self, x_BLD: Tensor, embedded_BLD: Tensor, docs: Documents, state: CompositeState | None, adapter: Adapter
    ) -> Tensor:
        """Stream and embeddings, (B, L, D) each, to (B, L, D)."""
        (own,) = inner_states(state, 1)
        z_BLE = self.norm_in(torch.cat((x_BLD, embedded_BLD), -1))
        y_BLD: Tensor = self.network(self.norm_network(self.attention(z_BLE, docs, own)), adapter)
        return y_BLD


class CommonBlock(Composite):
    """See `CommonBlockConfig`."""

    reads = (EMBEDDED,)

    def __init__(self, config: CommonBlockConfig, width: int, output_scale: float) -> None:
        super().__init__()
        self.common = CommonParts(config, width)
        self.adapter = Adapter(config.rank, config.hidden, width)
        output = Initial(std=output_scale * width**-0.5)
        self.w_out = self.add_weight("w_out", (width, width), ("embed", "written"), output)

    def share(self, first: Mixer) -> None:
        """See `Mixer.share`."""
        assert isinstance(first, CommonBlock)
        self.common = first.common

    def mixers(self) -> Sequence[Mixer]:
        """See `Composite.mixers`."""
        return (self.common.attention,)

    def parts(self) -> Sequence[Mixer | FeedForward]:
        """See `Mixer.parts`."""
        return (self.common.attention, self.common.network)

    def forward(
        self, x_BLD: Tensor, docs: Documents, state: CompositeState | None = None, shared: Shared | None = None
    ) -> Tensor:
        """See `Mixer.forward`. Embeddings are those that the decoder leaves in `shared`."""
        if shared is None:
            raise ValueError(f"needs embeddings in shared, under {EMBEDDED!r}")
        return self.linear(self.common(x_BLD, shared[EMBEDDED], docs, state, self.adapter), "w_out")

    def flops_between(self) -> float:
        """See `Composite.flops_between`."""
        return self.common.network.flops() + self.adapter.flops() + 2.0 * self.w_out.numel()
