"""Qwen3-Next (Qwen team, 2025): three layers of Gated DeltaNet to one of gated attention, experts and a weighted shared one."""

from __future__ import annotations

from typing import cast

from surefoot.blocks.base import FeedForwardConfig, MixerConfig
from surefoot.blocks.ffn.moe import MoEConfig
from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.blocks.mixers.delta_net import GatedDeltaNetConfig
from surefoot.models.decoder import DecoderConfig
from surefoot.models.hf.family import Family, by_layer
from surefoot.models.hf.llama import (
    layer_ties,
    network_ties,
    read_attention,
    read_stem,
    write_attention,
    write_stem,
)
from surefoot.models.hf.qwen3_moe import expert_ties, read_experts, write_experts
from surefoot.models.hf.settings import Json, Settings
from surefoot.models.hf.weights import Tie, convolution, grouped, same

_LINEAR, _FULL = "linear_attention", "full_attention"


def _read(settings: Settings) -> DecoderConfig:
    stem = read_stem(settings)
    depth = stem["depth"]
    settings.expect(hidden_act="silu", attention_bias=False)
    attention = read_attention(settings, head_size=256, rope_share=0.25, qk_norm="head", norm_offset=1, gate="sigmoid")
    linear = GatedDeltaNetConfig(
        num_heads=settings.whole("linear_num_value_heads", 32),
        num_key_heads=settings.whole("linear_num_key_heads", 16),
        key_size=settings.whole("linear_key_head_dim", 128),
        value_size=settings.whole("linear_value_head_dim", 128),
        conv_size=settings.whole("linear_conv_kernel_dim", 4),
        norm_eps=settings.number("rms_norm_eps"),
    )
    interval = settings.whole("full_attention_interval", 4)
    default = [_LINEAR if (layer + 1) % interval else _FULL for layer in range(depth)]
    kinds = settings.words("layer_types", depth, (_LINEAR, _FULL)) or default
    mixers: list[MixerConfig | None] = [linear if kind == _LINEAR else attention for kind in kinds]
    experts = read_experts(
        settings, shared_hidden=settings.whole("shared_expert_intermediate_size", 512), shared_weight="sigmoid"
    )
    dense = SwiGLUConfig(hidden=settings.whole("intermediate_size", 5632))
    step, only_dense = settings.whole("decoder_sparse_step", 1), settings.wholes("mlp_only_layers")
    ffns: list[FeedForwardConfig | None] = [
        dense if layer in only_dense or (layer + 1) % step else experts for layer in range(depth)
    ]
    return DecoderConfig(**stem, **by_layer(mixers, ffns), norm_offset=1)


def _write(config: DecoderConfig) -> Json:
    layers = range(config.depth)
    mixers, ffns = [config.mixer_of(layer) for layer in layers], [config.ffn_of(layer) for layer in layers]
    linear = next(
        mixer for mixer in (*mixers, GatedDeltaNetConfig(num_heads=1)) if isinstance(mixer, GatedDeltaNetConfig)
    )
    attention = next(
        (mixer for mixer in mixers if isinstance(mixer, AttentionConfig)), cast(AttentionConfig, config.mixer)
    )
    experts = next((ffn for ffn in ffns if isinstance(ffn, MoEConfig)), cast(MoEConfig, config.ffn))
    return (
        write_stem(config)
        | write_attention(attention, config.width)
        | write_experts(experts)
        | {
            "linear_num_value_heads": linear.num_heads,
            "linear_num_key_heads": linear.num_key_heads or linear.num_heads,
            "linear_key_head_dim": linear.key_size,
            "linear_value_head_dim": linear.value_size,
            "linear_conv_kernel_dim": linear.conv_size,
            "layer_types": [_LINEAR if isinstance(mixer, GatedDeltaNetConfig) else _FULL for mixer in mixers],
            "shared_expert_intermediate_size": experts.shared_hidden,
            "intermediate_size": next((ffn.hidden for ffn in ffns if isinstance(ffn, SwiGLUConfig)), experts.hidden),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [layer for layer, ffn in enumerate(ffns) if isinstance(ffn, SwiGLUConfig)],
            "hidden_act": "silu",
            "attention_bias": False,
        }
    )


def _linear_ties(theirs: str, ours: str, mixer: GatedDeltaNetConfig) -> list[Tie]:
    """What goes into a key head and the value heads that it serves lies together."""
    num_keys = mixer.num_key_heads or mixer.num_heads
    each = mixer.num_heads // num_keys
    keys, values = num_keys * mixer.key_size, mixer.num_heads * mixer.value_size
    sizes = [mixer.key_size, mixer.key_size, each * mixer.value_size, each * mixer.value_size]
    taps = [f"{ours}.conv_{name}" for name in "qkv"]
    return [
        grouped(f"{theirs}.in_proj_qkvz.weight", [f"{ours}.w_{name}" for name in "qkvz"], num_keys, sizes),
        grouped(f"{theirs}.in_proj_ba.weight", [f"{ours}.w_beta", f"{ours}.w_decay"], num_keys, [each, each]),
        convolution(f"{theirs}.conv1d.weight", taps, [keys, keys, values]),
        same(f"{theirs}.A_log", f"{ours}.log_a"),
        same(f"{theirs}.dt_bias", f"{ours}.dt_bias"),
        same(f"{theirs}.norm.weight", f"{ours}.norm.scale"),
        same(f"{theirs}.out_proj.weight", f"{ours}.w_out"),
    ]


def _attention_ties(theirs: str, ours: str, mixer: AttentionConfig, width: int) -> list[Tie]:
    """Each head's queries and gates lie together."""
    size = mixer.head_size or width // mixer.num_heads
    return [
        grouped(f"{theirs}.q_proj.weight", [f"{ours}.wq", f"{ours}.w_gate"], mixer.num_heads, [size, size]),
        *(same(f"{theirs}.{name}_proj.weight", f"{ours}.w{name}") for name in "kvo"),
        *(same(f"{theirs}.{name}_norm.weight", f"{ours}.norm_{name}.scale") for name in "qk"),
    ]


def _network_ties(theirs: str, ours: str, ffn: FeedForwardConfig | None) -> list[Tie]:
    if not isinstance(ffn, MoEConfig):
        return network_ties(theirs, ours)
    return [
        *expert_ties(theirs, ours, ffn.num_experts),
        *(
            same(f"{theirs}.shared_expert.{name}_proj.weight", f"{ours}.shared_{name}")
            for name in ("gate", "up", "down")
        ),
        same(f"{theirs}.shared_expert_gate.weight", f"{ours}.shared_share"),
    ]


def _ties(config: DecoderConfig) -> list[Tie]:
    def of_mixer(theirs: str, ours: str, mixer: MixerConfig | None) -> list[Tie]:
        if isinstance(mixer, GatedDeltaNetConfig):
            return _linear_ties(f"{theirs}.linear_attn", ours, mixer)
        return _attention_ties(f"{theirs}.self_attn", ours, cast(AttentionConfig, mixer), config.width)

    return layer_ties(config, of_mixer, lambda theirs, ours, ffn: _network_ties(f"{theirs}.mlp", ours, ffn))


FAMILIES = (Family("qwen3_next", "Qwen3NextForCausalLM", _read, _write, _ties),)
