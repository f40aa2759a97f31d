"""Gemma 2 (Gemma team, 2024): norms around each part with scales counted from 1, two softcaps, every second layer a window."""

from __future__ import annotations

from typing import cast

from surefoot.blocks.ffn.glu import GLUConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.models.decoder import DecoderConfig
from surefoot.models.hf.family import Family, by_layer
from surefoot.models.hf.llama import (
    KINDS,
    attention_ties,
    network_ties,
    read_attention,
    read_stem,
    stem_ties,
    windows_of,
    write_attention,
    write_stem,
)
from surefoot.models.hf.settings import Json, Settings
from surefoot.models.hf.weights import Tie, same

_NORMS = {
    "input": "norm_mixer",
    "post_attention": "norm_mixer_out",
    "pre_feedforward": "norm_ffn",
    "post_feedforward": "norm_ffn_out",
}


def _read(settings: Settings) -> DecoderConfig:
    stem = read_stem(settings)
    settings.expect(
        hidden_activation="gelu_pytorch_tanh",
        hidden_act=("gelu_pytorch_tanh", "gelu"),  # of old files, and without effect
        attention_bias=False,
        use_bidirectional_attention=(None, False),
    )
    full = read_attention(
        settings,
        head_size=256,
        qk_norm="none",
        scale=settings.number("query_pre_attn_scalar", 256) ** -0.5,
        softcap=settings.optional_number("attn_logit_softcapping") if settings.says("attn_logit_softcapping") else 50.0,
    )
    window = settings.optional_whole("sliding_window") if settings.says("sliding_window") else 4096
    default = [KINDS[layer % 2] for layer in range(stem["depth"])]
    kinds = settings.words("layer_types", stem["depth"], KINDS) or default
    mixers = [full.model_copy(update={"window": window if kind == KINDS[0] else None}) for kind in kinds]
    network = GLUConfig(hidden=settings.whole("intermediate_size"), activation="gelu_tanh")
    cap = settings.optional_number("final_logit_softcapping") if settings.says("final_logit_softcapping") else 30.0
    return DecoderConfig(
        **stem | {"tied": settings.flag("tie_word_embeddings", True)},
        **by_layer(mixers, [network] * stem["depth"]),
        norm_placement="sandwich",
        norm_offset=1,
        embedding_scale=stem["width"] ** 0.5,
        logit_softcap=cap,
    )


def _write(config: DecoderConfig) -> Json:
    mixer = cast(AttentionConfig, config.mixer)
    size = mixer.head_size or config.width // mixer.num_heads
    squared = (mixer.scale or size**-0.5) ** -2
    # Published files have a whole number here; the scale is its root's inverse, which rounds.
    scalar: float = round(squared) if round(squared) ** -0.5 == (mixer.scale or size**-0.5) else squared
    return (
        write_stem(config)
        | write_attention(mixer, config.width)
        | windows_of(config)
        | {
            "query_pre_attn_scalar": scalar,
            "attn_logit_softcapping": mixer.softcap,
            "final_logit_softcapping": config.logit_softcap,
            "intermediate_size": cast(GLUConfig, config.ffn).hidden,
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
        }
    )


def _ties(config: DecoderConfig) -> list[Tie]:
    ties = stem_ties(config)
    for layer in range(config.depth):
        theirs, ours = f"model.layers.{layer}", f"layers.{layer}"
        ties += attention_ties(f"{theirs}.self_attn", f"{ours}.mixer", cast(AttentionConfig, config.mixer_of(layer)))
        ties += network_ties(f"{theirs}.mlp", f"{ours}.ffn")
        ties += [same(f"{theirs}.{name}_layernorm.weight", f"{ours}.{own}.scale") for name, own in _NORMS.items()]
    return ties


FAMILIES = (Family("gemma2", "Gemma2ForCausalLM", _read, _write, _ties),)
