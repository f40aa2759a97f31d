"""`WrappedTokenizer`: a tokenizer of the `tokenizers` library behind our contract.

Legend: V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from surefoot.config import DataError
from surefoot.data.tokenizer import Ids, Tokenizer

DOCUMENT = "<|document|>"
_BYTE_FALLBACK = re.compile("<0x[0-9A-F]{2}>")
_KNOWN_SEPARATORS = (DOCUMENT, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]", "[EOS]")


class WrappedTokenizer(Tokenizer):
    """`where` names the tokenizer in errors. Raises `DataError` where separator, padding and vocabulary do not fit."""

    def __init__(self, inner: tokenizers.Tokenizer, *, document: str, pad: str | None = None, where: str) -> None:
        self._inner, self._document_text, self._pad_text = inner, document, pad
        # A document that spells out a special token must not be able to place one.
        inner.encode_special_tokens = True
        inner.no_padding()
        inner.no_truncation()
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > 2 * len(vocabulary) + 1024:
            raise DataError(
                f"{where}: has ids up to {self.vocab_size - 1} for {len(vocabulary)} tokens; the vocabulary is damaged"
            )
        self._description: dict[str, Any] = json.loads(inner.to_str())  # walks every id: only now
        if document not in vocabulary:
            raise DataError(f"{where}: has no token {document!r} to separate documents; name one that it has")
        if pad is not None and pad not in vocabulary:
            raise DataError(f"{where}: has no token {pad!r} for padding; name one that it has, or none")
        self.document = vocabulary[document]
        self.pad = None if pad is None else vocabulary[pad]
        if self.pad == self.document:
            raise DataError(
                f"{where}: padding and end of document are both {document!r}, so ends would be masked with the "
                "padding; name another padding token, or none"
            )
        specials = {token["id"] for token in self._description.get("added_tokens", []) if token["special"]}
        self._special_ids = sorted(specials | {self.document} | ({self.pad} if self.pad is not None else set()))

    def encode_batch(self, texts: Sequence[bytes | str]) -> list[Ids]:
        plain = [text.decode() if isinstance(text, bytes) else text for text in texts]
        encodings = self._inner.encode_batch_fast(plain, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._inner.decode([int(id_) for id_ in ids], skip_special_tokens=False)
        return text

    def byte_lengths(self) -> NDArray[np.float64]:
        lengths_V = np.zeros(self.vocab_size)
        is_byte_level = self._is_byte_level()
        added = {token["id"] for token in self._description.get("added_tokens", [])}
        for token, id_ in self._inner.get_vocab(with_added_tokens=True).items():
            if is_byte_level and id_ not in added:
                lengths_V[id_] = len(token)  # byte-level tokens spell each byte as one character
            else:
                lengths_V[id_] = 1 if _BYTE_FALLBACK.fullmatch(token) else len(_spelled(token))
        lengths_V[self._special_ids] = 0
        return lengths_V

    def _is_byte_level(self) -> bool:
        def holds_byte_level(part: object) -> bool:
            if isinstance(part, dict):
                return part.get("type") == "ByteLevel" or any(holds_byte_level(value) for value in part.values())
            return isinstance(part, list) and any(holds_byte_level(item) for item in part)

        return holds_byte_level(self._description.get("pre_tokenizer"))

    def fingerprint(self) -> str:
        identity = json.dumps([self._description, self.document, self.pad], sort_keys=True)
        return hashlib.sha256(identity.encode()).hexdigest()

    def save(self, directory: Path) -> None:
        (directory / "tokenizer.json").write_text(self._inner.to_str(), encoding="utf-8")
        names = {"eos_token": self._document_text, "bos_token": self._document_text, "pad_token": self._pad_text}
        text = json.dumps({key: name for key, name in names.items() if name is not None}, indent=2) + "\n"
        (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _spelled(token: str) -> bytes:
    """The text of a SentencePiece or WordPiece token, as far as the token alone can say."""
    return token.replace("▁", " ").removeprefix("##").encode()


def load_tokenizer(path: Path, *, document: str | None = None, pad: str | None = None) -> WrappedTokenizer:
    """A tokenizer from a `tokenizer.json` or the directory that holds one.

    The separator and padding come from the arguments, else from `tokenizer_config.json` beside it, else (the separator)
    from the names that published tokenizers use. Raises `DataError` naming the file.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read ({error}); name a tokenizer.json") from None
    try:
        inner = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{file}: is not a tokenizer.json ({str(error).splitlines()[0]}); fetch it again") from None
    names = _read_names(file.with_name("tokenizer_config.json"))
    declared = (inner.padding or {}).get("pad_token")
    vocabulary = inner.get_vocab(with_added_tokens=True)
    separator = (
        document or names.get("eos_token") or next((name for name in _KNOWN_SEPARATORS if name in vocabulary), None)
    )
    if separator is None:
        raise DataError(f"{file}: no token to separate documents is known; set `document` to one of its tokens")
    return WrappedTokenizer(inner, document=separator, pad=pad or names.get("pad_token") or declared, where=str(file))


def _read_names(file: Path) -> dict[str, str]:
    """`eos_token` and `pad_token` of a Hugging Face tokenizer_config.json; none where there is no such file."""
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: cannot be read ({error}); repair it or remove it") from None
    names = {}
    for key in ("eos_token", "pad_token"):
        value = values.get(key) if isinstance(values, dict) else None
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            names[key] = value
    return names
