"""Bytes as tokens: no vocabulary to learn, 256 ids and a separator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from surefoot.data.tokenizer import Ids, TokenizerConfig
from surefoot.data.tokenizers.wrapped import DOCUMENT, WrappedTokenizer


class BytesConfig(TokenizerConfig):
    """Id = value of the byte; 256 separates documents."""

    def build(self, texts: Iterable[str] = ()) -> BytesTokenizer:  # noqa: ARG002 (nothing to learn)
        """The tokenizer."""
        return BytesTokenizer()


class BytesTokenizer(WrappedTokenizer):
    """Saved as an ordinary tokenizer.json (BPE without merges); encoding is a copy of the bytes."""

    def __init__(self) -> None:
        vocabulary = {character: value for value, character in enumerate(_byte_characters())}
        inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = decoders.ByteLevel()
        inner.add_special_tokens([AddedToken(DOCUMENT, special=True, normalized=False)])
        super().__init__(inner, document=DOCUMENT, where="bytes")

    def encode_batch(self, texts: Sequence[bytes | str]) -> list[Ids]:
        raw = [text if isinstance(text, bytes) else text.encode() for text in texts]
        return [np.frombuffer(text, dtype=np.uint8).astype(np.uint32) for text in raw]


def _byte_characters() -> list[str]:
    """The printable character by which byte-level tokenizers spell each byte value (Radford et al., 2019)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(value) if value in printable else chr(next(others)) for value in range(256)]
