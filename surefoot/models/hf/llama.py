"""Llama (Touvron et al., 2023) and what is the same function with a window, biases or normed queries: Mistral, Qwen 2, Qwen 3."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from surefoot.blocks.base import FeedForwardConfig, MixerConfig
from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.models.decoder import DecoderConfig
from surefoot.models.hf.family import Family, by_layer
from surefoot.models.hf.rope import read_rope, write_rope
from surefoot.models.hf.settings import Json, Settings
from surefoot.models.hf.weights import Tie, same

KINDS = ("sliding_attention", "full_attention")


def read_stem(settings: Settings) -> dict[str, Any]:
    """The fields of a `DecoderConfig` beside its layers."""
    return {
        "vocab_size": settings.whole("vocab_size"),
        "width": settings.whole("hidden_size"),
        "depth": settings.whole("num_hidden_layers"),
        "norm_eps": settings.number("rms_norm_eps"),
        "tied": settings.flag("tie_word_embeddings", False),
        "z_loss": 0.0,
    }


def write_stem(config: DecoderConfig) -> Json:
    """What `read_stem` reads."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
    }


def read_attention(
    settings: Settings, *, head_size: int | None = None, rope_share: float | None = None, **fields: Any
) -> AttentionConfig:
    """Grouped attention with positions. `head_size` and `rope_share` hold where a file is silent."""
    settings.expect(attention_dropout=(0.0, 0))
    num_heads, width = settings.whole("num_attention_heads"), settings.whole("hidden_size")
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=settings.whole("num_key_value_heads", num_heads),
        head_size=settings.whole("head_dim", head_size or width // num_heads),
        norm_eps=settings.number("rms_norm_eps"),
        **(read_rope(settings, rope_share) | fields),
    )


def write_attention(mixer: AttentionConfig, width: int) -> Json:
    """What `read_attention` reads."""
    return {
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_size or width // mixer.num_heads,
        "attention_dropout": 0.0,
    } | write_rope(mixer)


def stem_ties(config: DecoderConfig) -> list[Tie]:
    """Embedding, last norm and head; a tied head is on no disk."""
    head = [] if config.tied else [same("lm_head.weight", "head.weight")]
    return [same("model.embed_tokens.weight", "embedding.weight"), same("model.norm.weight", "norm.scale"), *head]


def attention_ties(theirs: str, ours: str, mixer: AttentionConfig) -> list[Tie]:
    """Projections, biases and norms of one layer's attention."""
    ties = [same(f"{theirs}.{name}_proj.weight", f"{ours}.w{name}") for name in "qkvo"]
    if mixer.bias == "qkv":
        ties += [same(f"{theirs}.{name}_proj.bias", f"{ours}.b{name}") for name in "qkv"]
    if mixer.qk_norm == "head":
        ties += [same(f"{theirs}.{name}_norm.weight", f"{ours}.norm_{name}.scale") for name in "qk"]
    return ties


def network_ties(theirs: str, ours: str) -> list[Tie]:
    """A gated network of three matrices."""
    return [same(f"{theirs}.{name}_proj.weight", f"{ours}.w_{name}") for name in ("gate", "up", "down")]


Windows = list[int | None]
"""Of each layer; None where it sees all."""


def _no_windows(settings: Settings, depth: int) -> Windows:
    settings.expect(attention_bias=False, mlp_bias=False)
    return [None] * depth


def _one_window(settings: Settings, depth: int) -> Windows:
    """Mistral: where nothing is said it is 4,096, where null is said there is none."""
    given = settings.optional_whole("sliding_window")
    return [given if settings.says("sliding_window") else 4096] * depth


def _windows_by_layer(settings: Settings, depth: int) -> Windows:
    """Qwen: by `layer_types`, before transformers 5 all from `max_window_layers` on."""
    settings.expect(attention_bias=False)
    length, wanted = settings.optional_whole("sliding_window") or 4096, settings.flag("use_sliding_window", False)
    first = int(settings.number("max_window_layers", 28))
    default = [KINDS[0] if wanted and layer >= first else KINDS[1] for layer in range(depth)]
    kinds = settings.words("layer_types", depth, KINDS) or default
    if not wanted and KINDS[0] in kinds:
        raise settings.refuse("layer_types", "has sliding_attention, and use_sliding_window is not true; repair one")
    return [length if kind == KINDS[0] else None for kind in kinds]


def windows_of(config: DecoderConfig) -> Json:
    """`sliding_window`, null where there is none, and the kind of each layer."""
    windows = [cast(AttentionConfig, config.mixer_of(layer)).window for layer in range(config.depth)]
    return {
        "sliding_window": next(filter(None, windows), None),
        "layer_types": [KINDS[0] if window else KINDS[1] for window in windows],
    }


def _read(settings: Settings, *, windows: Callable[[Settings, int], Windows], **attention: Any) -> DecoderConfig:
    stem = read_stem(settings)
    settings.expect(hidden_act="silu")
    mixer = read_attention(settings, **attention)
    mixers = [mixer.model_copy(update={"window": length}) for length in windows(settings, stem["depth"])]
    network = SwiGLUConfig(hidden=settings.whole("intermediate_size"))
    return DecoderConfig(**stem, **by_layer(mixers, [network] * stem["depth"]))


def _write(config: DecoderConfig, *, windows: Callable[[Settings, int], Windows]) -> Json:
    mixer = cast(AttentionConfig, config.mixer)
    values = write_stem(config) | write_attention(mixer, config.width)
    values |= {"intermediate_size": cast(SwiGLUConfig, config.ffn).hidden, "hidden_act": "silu"}
    if windows is _no_windows:
        return values | {"attention_bias": False, "mlp_bias": False}
    if windows is _one_window:
        return values | {"sliding_window": mixer.window}
    by_kind = windows_of(config)
    return values | by_kind | {"use_sliding_window": by_kind["sliding_window"] is not None}


def layer_ties(
    config: DecoderConfig,
    of_mixer: Callable[[str, str, MixerConfig | None], list[Tie]],
    of_network: Callable[[str, str, FeedForwardConfig | None], list[Tie]],
) -> list[Tie]:
    """Of a model of pre-norm layers, each a mixer and a network: `of_mixer` and `of_network` are given their name for the
    layer and ours for the part."""
    ties = stem_ties(config)
    for layer in range(config.depth):
        theirs, ours = f"model.layers.{layer}", f"layers.{layer}"
        ties += [
            same(f"{theirs}.input_layernorm.weight", f"{ours}.norm_mixer.scale"),
            *of_mixer(theirs, f"{ours}.mixer", config.mixer_of(layer)),
            same(f"{theirs}.post_attention_layernorm.weight", f"{ours}.norm_ffn.scale"),
            *of_network(theirs, f"{ours}.ffn", config.ffn_of(layer)),
        ]
    return ties


def self_attention_ties(theirs: str, ours: str, mixer: MixerConfig | None) -> list[Tie]:
    """Of a layer's attention under its usual name."""
    return attention_ties(f"{theirs}.self_attn", ours, cast(AttentionConfig, mixer))


def _ties(config: DecoderConfig) -> list[Tie]:
    return layer_ties(config, self_attention_ties, lambda theirs, ours, _: network_ties(f"{theirs}.mlp", ours))


def _family(name: str, architecture: str, windows: Callable[[Settings, int], Windows], **attention: Any) -> Family:
    read, write = partial(_read, windows=windows, **attention), partial(_write, windows=windows)
    return Family(name, architecture, read, write, _ties)


FAMILIES = (
    _family("llama", "LlamaForCausalLM", _no_windows, qk_norm="none"),
    _family("mistral", "MistralForCausalLM", _one_window, qk_norm="none"),
    _family("qwen2", "Qwen2ForCausalLM", _windows_by_layer, qk_norm="none", bias="qkv"),
    _family("qwen3", "Qwen3ForCausalLM", _windows_by_layer, qk_norm="head", head_size=128),
)
