"""Counting parameters and FLOPs of a model built on the meta device, under every convention in use.

"How many parameters" and "how many FLOPs" have several honest answers; scaling laws shift with the choice (Porian et
al., 2024), so a run records all of them by name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import overload

import torch
from torch import nn

from surefoot.models.decoder import Decoder, DecoderConfig
from surefoot.models.initialise import named_weights
from surefoot.models.multimodal import ModelConfig, Multimodal, MultimodalConfig


@overload
def build_meta(config: DecoderConfig) -> Decoder: ...
@overload
def build_meta(config: MultimodalConfig) -> Multimodal: ...
def build_meta(config: ModelConfig) -> Decoder | Multimodal:
    """The model without storage."""
    with torch.device("meta"):
        return config.build()


def uses_by_layers(layers: Iterable[nn.Module]) -> Counter[int]:
    """How many of the layers have a weight, by its `id`."""
    return Counter(id(weight) for layer in layers for weight in layer.parameters())


def count_parameters(model: Decoder) -> dict[str, int]:
    """Parameters by convention.

    total: every logical weight once (a tied head not again); non_embedding: without embeddings, of values too (Kaplan et al.,
    2020, with the head's own weight kept out too); active: what one token meets, of experts those that it is sent to; matmul:
    what multiplies a token (head included, also when tied); vector: norms and other 1-D weights.
    """
    total = active = vocabulary = vector = 0
    for _, block, name in named_weights(model):
        size, axes = getattr(block, name).numel(), block.axes[name]
        total += size
        active += round(size * math.prod(block.used.get(axis, 1.0) for axis in axes))
        vocabulary += size if {"vocab", "words"} & set(axes) else 0
        vector += size if len(axes) == 1 else 0
    return {
        "total": total,
        "non_embedding": total - vocabulary,
        "active": active,
        "matmul": active - vocabulary - vector + model.head.weight.numel(),
        "vector": vector,
    }


def flops_per_token(model: Decoder, length: int) -> dict[str, float]:
    """Training FLOPs a token (forward plus backward, a multiply-add counted as two) by convention.

    6N_total, 6N_non_embedding and 6N_active: six times that many parameters, attention ignored; full: matrix products and
    attention over all `length` keys, as PaLM counts (Chowdhery et al., 2022); causal: only the scores that the mask lets
    through. What predicts the token after the next is counted where it is trained: in parameters and in FLOPs.
    """
    counts = count_parameters(model)

    def forward(causal: bool) -> float:
        own = sum(layer.flops(length, causal=causal) for layer in model._layers()) + model.head.flops()
        return own if model.ahead is None else own + model.ahead.flops(length, causal=causal) + model.head.flops()

    return {
        "6N_total": 6.0 * counts["total"],
        "6N_non_embedding": 6.0 * counts["non_embedding"],
        "6N_active": 6.0 * counts["active"],
        "full": 3.0 * forward(causal=False),
        "causal": 3.0 * forward(causal=True),
    }
