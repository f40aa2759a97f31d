"""Granite 4 (IBM, 2025): layers of Mamba-2 and of attention without positions, each with experts, scaled as in muP."""

from __future__ import annotations

from typing import cast

from surefoot.blocks.base import FeedForwardConfig, MixerConfig
from surefoot.blocks.connections.add import AddConfig
from surefoot.blocks.ffn.moe import MoEConfig
from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.blocks.mixers.mamba2 import Mamba2Config
from surefoot.blocks.routers.topk import TopKConfig
from surefoot.models.decoder import DecoderConfig
from surefoot.models.hf.family import Family, by_layer
from surefoot.models.hf.llama import (
    layer_ties,
    read_attention,
    read_stem,
    self_attention_ties,
    write_attention,
    write_stem,
)
from surefoot.models.hf.settings import Json, Settings
from surefoot.models.hf.weights import Tie, convolution, joined, same

_STATE, _ATTENTION = ("linear_attention", "mamba"), ("full_attention", "attention")
"""What transformers 5 and 4 call the two kinds of layers."""


def read_mamba(settings: Settings, width: int) -> Mamba2Config:
    """A Mamba-2 mixer; its heads' outputs are normed in as many parts as there are groups."""
    settings.expect(mamba_proj_bias=False)
    inner = settings.whole("mamba_expand", 2) * width
    num_heads, num_groups = settings.whole("mamba_n_heads", 128), settings.whole("mamba_n_groups", 1)
    automatic = settings.says("mamba_d_head") and settings.word("mamba_d_head") == "auto"
    head_size = inner // num_heads if automatic else settings.whole("mamba_d_head", inner // num_heads)
    if head_size * num_heads != inner:
        raise settings.refuse("mamba_d_head", f"times mamba_n_heads {num_heads} must be {inner}; repair the file")
    return Mamba2Config(
        num_heads=num_heads,
        head_size=head_size,
        state_size=settings.whole("mamba_d_state", 256),
        num_groups=num_groups,
        conv_size=settings.whole("mamba_d_conv", 4),
        conv_bias=settings.flag("mamba_conv_bias", True),
        norm_groups=num_groups,
        norm_eps=settings.number("rms_norm_eps"),
        block=settings.whole("mamba_chunk_size", 256),
        dt_limit=settings.limits("time_step_limit"),
    )


def mamba_ties(theirs: str, ours: str, mixer: Mamba2Config) -> list[Tie]:
    """Projections in and convolutions are one tensor each on disk."""
    heads, per_group = mixer.num_heads * mixer.head_size, mixer.num_groups * mixer.state_size
    sizes = {"z": heads, "x": heads, "b": per_group, "c": per_group, "dt": mixer.num_heads}
    taps = [f"{ours}.conv_{name}" for name in "xbc"]
    ties = [
        joined(f"{theirs}.in_proj.weight", [f"{ours}.w_{name}" for name in sizes], list(sizes.values())),
        convolution(f"{theirs}.conv1d.weight", taps, [heads, per_group, per_group]),
        same(f"{theirs}.A_log", f"{ours}.log_a"),
        same(f"{theirs}.D", f"{ours}.skip"),
        same(f"{theirs}.dt_bias", f"{ours}.dt_bias"),
        same(f"{theirs}.norm.weight", f"{ours}.norm.scale"),
        same(f"{theirs}.out_proj.weight", f"{ours}.w_out"),
    ]
    if mixer.conv_bias:
        biases = [f"{ours}.conv_bias_{name}" for name in "xbc"]
        ties.append(joined(f"{theirs}.conv1d.bias", biases, [heads, per_group, per_group]))
    return ties


def _read(settings: Settings) -> DecoderConfig:
    stem = read_stem(settings)
    settings.expect(hidden_act="silu", attention_bias=False)
    width, depth = stem["width"], stem["depth"]
    embedding = settings.word("position_embedding_type")
    if embedding not in (None, "rope"):
        raise settings.refuse("position_embedding_type", "must be null or rope; surefoot has no other here")
    attention = read_attention(settings, qk_norm="none", scale=settings.number("attention_multiplier", 1.0))
    if embedding is None:
        attention = AttentionConfig(**dict(attention) | {"rope": "none", "rope_scaling": None, "rope_theta": 10_000.0})
    settings.without_effect("rope_theta", "rope_parameters", "rope_scaling")
    default = [_STATE[0]] * depth
    kinds = settings.words("layer_types", depth, _STATE + _ATTENTION) or default
    mamba = read_mamba(settings, width) if any(kind in _STATE for kind in kinds) else None
    mixers: list[MixerConfig | None] = [attention if kind in _ATTENTION else mamba for kind in kinds]
    return DecoderConfig(
        **stem,
        **by_layer(mixers, [_read_network(settings)] * depth),
        embedding_scale=settings.number("embedding_multiplier", 1.0),
        logit_scale=1 / settings.number("logits_scaling", 1.0),
        connection=AddConfig(scale=settings.number("residual_multiplier", 1.0)),
    )


def _read_network(settings: Settings) -> FeedForwardConfig:
    """Experts beside a shared one, or where there are none, the shared one alone."""
    shared, hidden = settings.whole("shared_intermediate_size", 1024), settings.whole("intermediate_size", 11008)
    num_experts, top_k = settings.number("num_local_experts", 8), settings.number("num_experts_per_tok", 2)
    if num_experts == 0:
        return SwiGLUConfig(hidden=shared)
    router = TopKConfig(balance_loss=0.0, z_loss=0.0)
    return MoEConfig(num_experts=int(num_experts), top_k=int(top_k), hidden=hidden, shared_hidden=shared, router=router)


def _write(config: DecoderConfig) -> Json:
    mixers = [config.mixer_of(layer) for layer in range(config.depth)]
    attention = next((mixer for mixer in mixers if isinstance(mixer, AttentionConfig)), None)
    mamba = next((mixer for mixer in mixers if isinstance(mixer, Mamba2Config)), None)
    values = write_stem(config) | {
        "hidden_act": "silu",
        "attention_bias": False,
        "embedding_multiplier": config.embedding_scale,
        "logits_scaling": 1 / config.logit_scale,
        "residual_multiplier": cast(AddConfig, config.connection).scale,
        "layer_types": [(_STATE if isinstance(mixer, Mamba2Config) else _ATTENTION)[0] for mixer in mixers],
    }
    if attention is None:
        values |= {"num_attention_heads": 1}
    else:
        size = attention.head_size or config.width // attention.num_heads
        values |= write_attention(attention, config.width)
        values |= {
            "attention_multiplier": attention.scale or size**-0.5,
            "position_embedding_type": None if attention.rope == "none" else "rope",
        }
    if mamba is not None:
        values |= {
            "mamba_n_heads": mamba.num_heads,
            "mamba_n_groups": mamba.num_groups,
            "mamba_d_state": mamba.state_size,
            "mamba_d_head": mamba.head_size,
            "mamba_d_conv": mamba.conv_size,
            "mamba_expand": mamba.num_heads * mamba.head_size // config.width,
            "mamba_chunk_size": mamba.block,
            "mamba_conv_bias": mamba.conv_bias,
            "mamba_proj_bias": False,
            "time_step_limit": list(mamba.dt_limit or (0.0, {"__float__": "Infinity"})),
        }
    if isinstance(config.ffn, SwiGLUConfig):
        return values | {"num_local_experts": 0, "shared_intermediate_size": config.ffn.hidden}
    ffn = cast(MoEConfig, config.ffn)
    return values | {
        "num_local_experts": ffn.num_experts,
        "num_experts_per_tok": ffn.top_k,
        "intermediate_size": ffn.hidden,
        "shared_intermediate_size": ffn.shared_hidden,
    }


def _network_ties(theirs: str, ours: str, ffn: FeedForwardConfig | None) -> list[Tie]:
    """Gate and up are one tensor, of all experts and of the shared one."""
    shared, experts = f"{theirs}.shared_mlp", f"{theirs}.block_sparse_moe"
    if not isinstance(ffn, MoEConfig):
        hidden = cast(SwiGLUConfig, ffn).hidden
        return [
            joined(f"{shared}.input_linear.weight", [f"{ours}.w_gate", f"{ours}.w_up"], [hidden, hidden]),
            same(f"{shared}.output_linear.weight", f"{ours}.w_down"),
        ]
    both, alone = [ffn.hidden] * 2, [ffn.shared_hidden] * 2
    inner = f"{ours}.experts"
    return [
        same(f"{experts}.router.layer.weight", f"{ours}.router.weight"),
        joined(f"{experts}.input_linear.weight", [f"{inner}.w_gate", f"{inner}.w_up"], both, dim=1),
        same(f"{experts}.output_linear.weight", f"{inner}.w_down"),
        joined(f"{shared}.input_linear.weight", [f"{ours}.shared_gate", f"{ours}.shared_up"], alone),
        same(f"{shared}.output_linear.weight", f"{ours}.shared_down"),
    ]


def _mixer_ties(theirs: str, ours: str, mixer: MixerConfig | None) -> list[Tie]:
    if isinstance(mixer, Mamba2Config):
        return mamba_ties(f"{theirs}.mamba", ours, mixer)
    return self_attention_ties(theirs, ours, mixer)


def _ties(config: DecoderConfig) -> list[Tie]:
    return layer_ties(config, _mixer_ties, _network_ties)


FAMILIES = (Family("granitemoehybrid", "GraniteMoeHybridForCausalLM", _read, _write, _ties, is_general=True),)
