"""What a model costs to serve: weights and state in memory, and how long a token takes at least.

Times are a roofline (Williams et al., 2009): the larger of FLOPs over the device's FLOP/s and bytes over its bandwidth. No
implementation is faster; a good one comes near. What several devices send each other is not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from surefoot.models.count import build_meta, count_parameters, uses_by_layers
from surefoot.models.decoder import Decoder, DecoderConfig
from surefoot.models.initialise import named_weights
from surefoot.planner.devices import Device

USABLE = 0.9
"""Share of a device's memory that weights and states may fill; the rest is for activations and fragments."""


@dataclass(frozen=True)
class Bound:
    """One pass: FLOPs, bytes from and to memory, the least seconds, and which of the two sets them."""

    flops: float
    num_bytes: float
    seconds: float
    limit: str


class Serving:
    """The costs of one model whose weights and states are kept in `dtype` (what a state keeps wider, stays wider)."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        # What predicts the token after the next trains and does not serve.
        self.model: Decoder = build_meta(config.model_copy(update={"ahead_weight": 0.0}))
        self.dtype = dtype
        self.parameters = count_parameters(self.model)

    @property
    def weight_bytes(self) -> int:
        """Of all weights."""
        return self.parameters["total"] * self.dtype.itemsize

    def state_bytes(self, context: int) -> int:
        """Of one sequence after `context` positions, all layers."""
        return sum(mixer.state_bytes(context, self.dtype) for mixer in self.model.mixers())

    def state_slope(self, context: int) -> float:
        """Bytes that one more position adds around `context`, averaged over as many again."""
        return (self.state_bytes(2 * context) - self.state_bytes(context)) / context

    def largest_batch(self, context: int, device: Device) -> int:
        """Sequences of `context` positions that fit beside the weights; 0 where not even the weights do."""
        room = USABLE * device.memory - self.weight_bytes
        each = self.state_bytes(context)
        return max(0, math.floor(room / each)) if each else int(room > 0)

    def weight_bytes_read(self, num_tokens: int) -> float:
        """Of the weights that `num_tokens` tokens meet, if each chooses its experts at random; embeddings by the row, and what
        several layers have in common once a layer."""
        uses = uses_by_layers(self.model.layers)
        numbers = 0.0
        for name, block, own_name in named_weights(self.model):
            weight = getattr(block, own_name)
            is_embedding = name == "embedding.weight" and not self.model.config.tied
            if is_embedding or "words" in block.axes[own_name]:
                numbers += min(num_tokens, weight.shape[0]) * weight.shape[1]
                continue
            used = math.prod(block.used.get(axis, 1.0) for axis in block.axes[own_name])
            numbers += max(1, uses[id(weight)]) * weight.numel() * (1 - (1 - used) ** num_tokens)
        return numbers * self.dtype.itemsize

    def decode(self, context: int, batch: int, device: Device) -> Bound:
        """One more token of `batch` sequences, each after `context` positions."""
        layers = sum(mixer.decode_flops(context) for mixer in self.model.mixers()) + self._ffn_flops()
        state = sum(mixer.decode_bytes(context, self.dtype) for mixer in self.model.mixers())
        return self._bound(
            batch * (layers + self.model.head.flops()), self.weight_bytes_read(batch) + batch * state, device
        )

    def prefill(self, context: int, batch: int, device: Device) -> Bound:
        """`batch` prompts of `context` tokens, up to the logits of the last one."""
        mixers = sum(mixer.flops(context, causal=True) for mixer in self.model.mixers())
        flops = batch * (context * (mixers + self._ffn_flops()) + self.model.head.flops())
        num_bytes = self.weight_bytes_read(batch * context) + batch * self.state_bytes(context)
        return self._bound(flops, num_bytes, device)

    def _ffn_flops(self) -> float:
        return sum(ffn.flops() for ffn in self.model.ffns())

    def _bound(self, flops: float, num_bytes: float, device: Device) -> Bound:
        compute, memory = flops / device.flops, num_bytes / device.bandwidth
        return Bound(flops, num_bytes, max(compute, memory), "compute" if compute > memory else "memory")
