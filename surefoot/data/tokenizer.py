"""`Tokenizer`: text to ids and back, and how many bytes of text each id stands for.

Legend: V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from surefoot.config import Config

Ids = NDArray[np.uint32]


class Tokenizer(ABC):
    """Ids lie in [0, vocab_size). `document` opens and closes every document; text never encodes to it."""

    vocab_size: int
    document: int
    pad: int | None
    """The id a model reads at padding; `None` where the tokenizer has none (padding is never predicted)."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[bytes | str]) -> list[Ids]:
        """The ids of each text, without separators. Special tokens spelled out in a text are read as plain text."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens spelled out; bytes that are not UTF-8 become U+FFFD."""

    @abstractmethod
    def byte_lengths(self) -> NDArray[np.float64]:
        """(V) bytes of UTF-8 text each id stands for; special tokens stand for none."""

    @abstractmethod
    def fingerprint(self) -> str:
        """sha256 (hex) of all that decides ids."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json` into an existing directory for `load_tokenizer`."""


class TokenizerConfig(Config):
    """Describes a tokenizer."""

    reads_texts: ClassVar[bool] = False
    """Whether `build` learns from the texts: it is then built once and cached beside the shards."""

    @abstractmethod
    def build(self, texts: Iterable[str]) -> Tokenizer:
        """The tokenizer, trained on `texts` where it is trained at all."""
