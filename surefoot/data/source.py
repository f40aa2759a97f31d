"""`Source`: named documents in a fixed order, and the position in it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from surefoot.config import Config, DataError

SourceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]


@dataclass(frozen=True)
class Document:
    """One text. `name` is unique in its source and decides its split; `text` is valid UTF-8."""

    name: str
    text: bytes


class Source(ABC):
    """Documents in an order that depends on the data alone.

    `read` is one stateless pass. `__iter__` is a pass with a position: `state()` fixes the next item, in any process,
    and a finished pass begins again.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._next = 0

    @abstractmethod
    def read(self, start: int = 0) -> Iterator[Document]:
        """Documents from number `start` on. Raises `DataError` naming file and place."""

    @abstractmethod
    def fingerprint(self) -> str:
        """sha256 (hex) that changes whenever the documents do."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What a run records about where its text came from."""

    def __iter__(self) -> Iterator[Document]:
        for document in self.read(self._next):
            self._next += 1  # before the yield, so that the state names the item after the one in hand
            yield document
        self._next = 0

    def state(self) -> dict[str, int]:
        """The position as plain JSON."""
        return {"next": self._next}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue a later `__iter__` from a saved `state`."""
        position = state.get("next")
        if not isinstance(position, int) or position < 0:
            raise DataError(f"{self.name}: {dict(state)!r} is not a position in a source; use what state() returned")
        self._next = position


class SourceConfig(Config):
    """Describes a source; `name` tells sources of one corpus apart."""

    name: SourceName

    @abstractmethod
    def build(self) -> Source:
        """The source. Raises `DataError` where its data is missing."""


class TextTree(Source):
    """Whole files as documents: `files` pairs each document's name with its path, sorted by name."""

    def __init__(self, name: str, files: Sequence[tuple[str, Path]], facts: Mapping[str, Any]) -> None:
        super().__init__(name)
        self._files = sorted(files)
        self._facts = dict(facts)
        self._digest: tuple[str, int] | None = None

    def read(self, start: int = 0) -> Iterator[Document]:
        for name, path in self._files[start:]:
            yield Document(name, read_bytes(path))

    def fingerprint(self) -> str:
        return self._measure()[0]

    def facts(self) -> dict[str, Any]:
        sha256, num_bytes = self._measure()
        return {"name": self.name, **self._facts, "sha256": sha256, "files": len(self._files), "bytes": num_bytes}

    def _measure(self) -> tuple[str, int]:
        if self._digest is None:
            digest, num_bytes = hashlib.sha256(), 0
            for document in self.read():
                update_digest(digest, document)
                num_bytes += len(document.text)
            self._digest = digest.hexdigest(), num_bytes
        return self._digest


def update_digest(digest: hashlib._Hash, document: Document) -> None:
    """Add a document to a content hash; lengths keep neighbours apart."""
    name = document.name.encode(errors="surrogatepass")  # file names need not be UTF-8
    digest.update(b"%d %d " % (len(name), len(document.text)) + name)
    digest.update(document.text)


def read_bytes(path: Path) -> bytes:
    """The file's bytes; `DataError` names it where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from None


def check_text(text: bytes, where: str) -> bytes:
    """`text` itself if it is UTF-8 without NUL; otherwise `DataError` with the offset of the first bad byte."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {error.start} (0x{text[error.start]:02x}) is not UTF-8, so this is binary or in another "
            "encoding; convert it to UTF-8 or leave it out"
        ) from None
    nul = text.find(b"\0")
    if nul >= 0:
        raise DataError(f"{where}: byte {nul} is 0x00, so this is binary; leave it out")
    return text
