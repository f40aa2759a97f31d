"""Models of the llama kind as llama.cpp names them: metadata, tensors and their names.

Legend: D width, F frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.blocks.rope import Llama3Scaling
from surefoot.config import ConfigError
from surefoot.models.hf.family import Family
from surefoot.models.hf.settings import Json
from surefoot.ops.rope import frequencies

# llama.cpp's architecture of a family, and whether that turns neighbouring components, so that rows must be put there.
_ARCHITECTURES = {
    "llama": ("llama", True),
    "mistral": ("llama", True),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class Described(NamedTuple):
    """A model for a gguf file; `fields` go under the architecture's name."""

    architecture: str
    fields: dict[str, int | float]
    tensors: dict[str, Tensor]


def describe(family: Family, settings: Json, theirs: Mapping[str, Tensor]) -> Described:
    """Out of a published model; `ConfigError` for an architecture or a setting that llama.cpp's has not."""
    if family.name not in _ARCHITECTURES:
        raise ConfigError("--to", "gguf", f"is written for {', '.join(_ARCHITECTURES)}, and this is {family.name}")
    architecture, neighbours = _ARCHITECTURES[family.name]
    config = family.decoder(settings, family.name)
    mixers = [config.mixer_of(layer) for layer in range(config.depth)]
    window = next((mixer.window for mixer in mixers if isinstance(mixer, AttentionConfig) and mixer.window), None)
    mixer = config.mixer
    if window is not None or not isinstance(mixer, AttentionConfig):
        raise ConfigError("model.mixer.window", window, f"is unknown to llama.cpp's {architecture}")
    size, scaling = mixer.head_size or config.width // mixer.num_heads, mixer.rope_scaling
    tensors = {}
    if isinstance(scaling, Llama3Scaling):
        plain_F = frequencies(size, mixer.rope_theta)
        tensors["rope_freqs.weight"] = plain_F / scaling.stretch(plain_F, mixer.rope_theta)
    elif scaling is not None:
        raise ConfigError("model.mixer.rope_scaling", type(scaling).__name__, "cannot be written to gguf; leave it out")
    for full_name, tensor in theirs.items():
        stem, _, kind = full_name.rpartition(".")
        turns = neighbours and stem.endswith(("q_proj", "k_proj"))
        heads = mixer.num_heads if stem.endswith("q_proj") else mixer.num_kv_heads
        tensors[f"{_name(stem)}.{kind}"] = _neighbours(tensor, heads) if turns else tensor
    fields: dict[str, int | float] = {
        "vocab_size": config.vocab_size,
        "context_length": int(settings.get("max_position_embeddings") or 2048),
        "embedding_length": config.width,
        "block_count": config.depth,
        "feed_forward_length": int(settings["intermediate_size"]),
        "attention.head_count": mixer.num_heads,
        "attention.head_count_kv": mixer.num_kv_heads,
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.dimension_count": size,
        "rope.freq_base": mixer.rope_theta,
    }
    return Described(architecture, fields, {name: tensor.float() for name, tensor in tensors.items()})


def _name(stem: str) -> str:
    if stem in _WHOLE:
        return _WHOLE[stem]
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_OF_LAYER[part]}"


def _neighbours(rows: Tensor, num_heads: int) -> Tensor:
    """Rows i and i + half of each head brought side by side."""
    return torch.stack(rows.unflatten(0, (num_heads, 2, -1)).unbind(1), 2).flatten(0, 2).contiguous()
