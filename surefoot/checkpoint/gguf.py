"""Files for llama.cpp (extra `gguf`), with byte-level vocabularies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefoot.config import CheckpointError, ConfigError
from surefoot.models.hf.gguf import Described

FILE = "model.gguf"

# Patterns by which a tokenizer splits words, and llama.cpp's name for each.
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {_LETTERS + r"\p{N}{1,3}" + _REST: "llama-bpe", _LETTERS + r"\p{N}" + _REST: "qwen2"}
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5


def write_gguf(folder: Path, described: Described, name: str) -> Path:
    """Write a described model as `folder`/model.gguf with the tokenizer that lies in the folder, and return the file.

    `ConfigError` for a tokenizer that llama.cpp has not, `CheckpointError` without the extra.
    """
    try:
        import gguf  # noqa: PLC0415 - an extra
    except ImportError:
        raise CheckpointError(f"{folder / FILE}: writing it needs pip install surefoot[gguf]") from None
    writer = gguf.GGUFWriter(folder / FILE, described.architecture)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for key, value in described.fields.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{described.architecture}.{key}", value)
    _add_vocabulary(writer, folder, int(described.fields["vocab_size"]))
    for tensor_name, tensor in described.tensors.items():
        writer.add_tensor(tensor_name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / FILE


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
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    # llama.cpp wants one at least. This makes a token that is not there, which it then spells by bytes again.
    writer.add_token_merges(merges or ["Ā Ā"])
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
