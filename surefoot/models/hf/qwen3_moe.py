"""Qwen 3 with experts (Qwen team, 2025): on disk one tensor an expert and projection."""

from __future__ import annotations

from typing import Any, cast

from surefoot.blocks.base import FeedForwardConfig
from surefoot.blocks.ffn.moe import MoEConfig
from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.blocks.routers.topk import TopKConfig
from surefoot.models.decoder import DecoderConfig
from surefoot.models.hf.family import Family, by_layer
from surefoot.models.hf.llama import (
    layer_ties,
    network_ties,
    read_attention,
    read_stem,
    self_attention_ties,
    write_attention,
    write_stem,
)
from surefoot.models.hf.settings import Json, Settings
from surefoot.models.hf.weights import Tie, same, stacked


def read_experts(settings: Settings, **fields: Any) -> MoEConfig:
    """Routed experts, whose number has two names.

    Their auxiliary losses are 0: transformers adds them only where `output_router_logits` is true.
    """
    num_experts = settings.optional_whole("num_experts")
    if num_experts not in (None, settings.whole("num_local_experts", num_experts)):
        raise settings.refuse("num_experts", "is not num_local_experts; make them one")
    return MoEConfig(
        num_experts=settings.whole("num_local_experts", num_experts),
        top_k=settings.whole("num_experts_per_tok"),
        hidden=settings.whole("moe_intermediate_size"),
        router=TopKConfig(
            softmax_over="chosen" if settings.flag("norm_topk_prob", False) else "all", balance_loss=0.0, z_loss=0.0
        ),
        **fields,
    )


def write_experts(ffn: MoEConfig) -> Json:
    """What `read_experts` reads."""
    return {
        "num_experts": ffn.num_experts,
        "num_local_experts": ffn.num_experts,
        "num_experts_per_tok": ffn.top_k,
        "moe_intermediate_size": ffn.hidden,
        "norm_topk_prob": cast(TopKConfig, ffn.router).softmax_over == "chosen",
    }


def expert_ties(theirs: str, ours: str, num_experts: int) -> list[Tie]:
    """The router and each expert's three matrices."""
    return [
        same(f"{theirs}.gate.weight", f"{ours}.router.weight"),
        *(
            stacked(
                (f"{theirs}.experts.{e}.{name}_proj.weight" for e in range(num_experts)), f"{ours}.experts.w_{name}"
            )
            for name in ("gate", "up", "down")
        ),
    ]


def _read(settings: Settings) -> DecoderConfig:
    stem = read_stem(settings)
    settings.expect(hidden_act="silu", attention_bias=False, use_sliding_window=False)
    settings.without_effect("sliding_window", "max_window_layers")
    mixer = read_attention(settings, qk_norm="head")
    experts, dense = read_experts(settings), SwiGLUConfig(hidden=settings.whole("intermediate_size"))
    step, only_dense = settings.whole("decoder_sparse_step", 1), settings.wholes("mlp_only_layers")
    ffns: list[FeedForwardConfig] = [
        dense if layer in only_dense or (layer + 1) % step else experts for layer in range(stem["depth"])
    ]
    return DecoderConfig(**stem, **by_layer([mixer] * stem["depth"], ffns))


def _write(config: DecoderConfig) -> Json:
    ffns = [config.ffn_of(layer) for layer in range(config.depth)]
    experts = next((ffn for ffn in ffns if isinstance(ffn, MoEConfig)), cast(MoEConfig, config.ffn))
    dense = next((ffn.hidden for ffn in ffns if isinstance(ffn, SwiGLUConfig)), experts.hidden)
    return (
        write_stem(config)
        | write_attention(cast(AttentionConfig, config.mixer), config.width)
        | write_experts(experts)
        | {
            "intermediate_size": dense,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [layer for layer, ffn in enumerate(ffns) if isinstance(ffn, SwiGLUConfig)],
            "hidden_act": "silu",
            "attention_bias": False,
            "use_sliding_window": False,
        }
    )


def _network_ties(theirs: str, ours: str, ffn: FeedForwardConfig | None) -> list[Tie]:
    if isinstance(ffn, MoEConfig):
        return expert_ties(f"{theirs}.mlp", ours, ffn.num_experts)
    return network_ties(f"{theirs}.mlp", ours)


def _ties(config: DecoderConfig) -> list[Tie]:
    return layer_ties(config, self_attention_ties, _network_ties)


FAMILIES = (Family("qwen3_moe", "Qwen3MoeForCausalLM", _read, _write, _ties),)
