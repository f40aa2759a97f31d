"""Models of the llama kind for llama.cpp (extra `gguf`), with byte-level vocabularies.

Legend: D width, F frequencies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.blocks.rope import Llama3Scaling
from surefoot.config import CheckpointError, ConfigError
from surefoot.models.hf.family import Family
from surefoot.ops.rope import frequencies

FILE = "model.gguf"

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
# Patterns by which a tokenizer splits words, and llama.cpp's name for each.
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {_LETTERS + r"\p{N}{1,3}" + _REST: "llama-bpe", _LETTERS + r"\p{N}" + _REST: "qwen2"}
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5


def write_gguf(
    folder: Path, family: Family, settings: Mapping[str, Any], theirs: Mapping[str, Tensor], name: str
) -> Path:
    """Write a published model's tensors as `folder`/model.gguf, its tokenizer being in the folder, and return the file.

    `ConfigError` for an architecture, a setting or a tokenizer that llama.cpp has not, `CheckpointError` without the extra.
    """
    try:
        import gguf  # noqa: PLC0415 - an extra
    except ImportError:
        raise CheckpointError(f"{folder / FILE}: writing it needs pip install surefoot[gguf]") from None
    if family.name not in _ARCHITECTURES:
        raise ConfigError(
            "--to", "gguf", f"is written for {', '.join(_ARCHITECTURES)}, and this model is {family.name}"
        )
    architecture, neighbours = _ARCHITECTURES[family.name]
    config = family.decoder(settings, family.name)
    mixer = config.mixer
    if not isinstance(mixer, AttentionConfig) or any(
        getattr(config.mixer_of(layer), "window", None) for layer in range(config.depth)
    ):
        raise ConfigError("model.mixer.window", getattr(mixer, "window", None), "is unknown to llama.cpp's llama")
    size = mixer.head_size or config.width // mixer.num_heads
    writer = gguf.GGUFWriter(folder / FILE, architecture)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(int(settings.get("max_position_embeddings") or 2048))
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.depth)
    writer.add_feed_forward_length(int(settings["intermediate_size"]))
    writer.add_head_count(mixer.num_heads)
    writer.add_head_count_kv(mixer.num_kv_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(mixer.rope_theta)
    if isinstance(mixer.rope_scaling, Llama3Scaling):
        plain_F = frequencies(size, mixer.rope_theta)
        stretched_F = mixer.rope_scaling.stretch(plain_F, mixer.rope_theta)
        writer.add_tensor("rope_freqs.weight", (plain_F / stretched_F).float().numpy())
    elif mixer.rope_scaling is not None:
        raise ConfigError("model.mixer.rope_scaling", type(mixer.rope_scaling).__name__, "is not written to gguf")
    _add_vocabulary(writer, folder, config.vocab_size)
    for full_name, tensor in theirs.items():
        stem, _, kind = full_name.rpartition(".")
        turns = neighbours and stem.endswith(("q_proj", "k_proj"))
        heads = mixer.num_heads if stem.endswith("q_proj") else mixer.num_kv_heads
        writer.add_tensor(f"{_name(stem)}.{kind}", (_neighbours(tensor, heads) if turns else tensor).float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / FILE


def _name(stem: str) -> str:
    if stem in _WHOLE:
        return _WHOLE[stem]
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_OF_LAYER[part]}"


def _neighbours(rows: Tensor, num_heads: int) -> Tensor:
    """Rows i and i + half of each head brought side by side."""
    return torch.stack(rows.unflatten(0, (num_heads, 2, -1)).unbind(1), 2).flatten(0, 2).contiguous()


def _add_vocabulary(writer: Any, folder: Path, vocab_size: int) -> None:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError("--to", "gguf", "needs the tokenizer inside the file, and this model has none")
    description = json.loads(file.read_text(encoding="utf-8"))
    named = folder / "tokenizer_config.json"
    names = json.loads(named.read_text(encoding="utf-8")) if named.is_file() else {}
    model = description["model"]
    split = _split(description)
    if model.get("type") != "BPE" or split is None or description.get("normalizer") is not None:
        raise ConfigError(
            "--to", "gguf", "takes byte-level BPE of GPT-2, Llama 3 or Qwen 2, and this tokenizer is another"
        )
    tokens, kinds = [f"[unused {id_}]" for id_ in range(vocab_size)], [_UNUSED] * vocab_size
    for text, id_ in model["vocab"].items():
        tokens[id_], kinds[id_] = text, _NORMAL
    special = {added["content"]: added["id"] for added in description["added_tokens"]}
    for text, id_ in special.items():
        tokens[id_], kinds[id_] = text, _CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    begin, end = (_content(names.get(key)) for key in ("bos_token", "eos_token"))
    if begin in special:
        writer.add_bos_token_id(special[begin])
    if end in special:
        writer.add_eos_token_id(special[end])
    writer.add_add_bos_token(begin in special and names.get("add_bos_token") is not False)


def _content(token: object) -> object:
    return token.get("content") if isinstance(token, dict) else token


def _split(description: Mapping[str, Any]) -> str | None:
    """llama.cpp's name for how a tokenizer splits words; without merges any will do."""
    outer = description.get("pre_tokenizer") or {}
    parts = outer.get("pretokenizers", [outer])
    if parts[-1].get("type") != "ByteLevel" or parts[-1].get("add_prefix_space"):
        return None
    if parts[-1].get("use_regex") or not description["model"]["merges"]:
        return "gpt-2" if len(parts) == 1 else None
    pattern = parts[0].get("pattern", {}).get("Regex") if len(parts) == 2 and parts[0].get("type") == "Split" else None
    return _SPLITS.get(str(pattern))
