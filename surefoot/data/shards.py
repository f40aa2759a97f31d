"""Shards: a source's documents as ids in memory-mapped files, one a split, tokenised once.

Each document is stored as [separator, t1 … tn, separator]: the opening separator predicts t1, tn predicts the closing
one, and the closing one predicts nothing. So every token of text and every end is predicted exactly once, and no
position predicts another document.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from surefoot.config import DataError
from surefoot.data.cache import damaged, entry
from surefoot.data.source import Document, Source
from surefoot.data.tokenizer import Tokenizer

FORMAT = 1
"""Version of the layout, part of every cache key: an older cache is then left alone, not misread."""

CHUNK_BYTES = 4 << 20
"""Text tokenised in one call: enough for all cores, little enough to hold."""

Announce = Callable[[str], None]
SplitName = Literal["train", "heldout"]
SPLITS: tuple[SplitName, ...] = ("train", "heldout")


def split_of(name: str, heldout_fraction: float) -> SplitName:
    """The split of a document, by the hash of its name: adding documents never moves another one."""
    value = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return "heldout" if value < heldout_fraction * 2.0**64 else "train"


@dataclass(frozen=True)
class Split:
    """One split of one source: the stream of ids, and where each document ends in it (exclusive)."""

    ids: NDArray[np.uint16] | NDArray[np.uint32]
    ends: NDArray[np.int64]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Shards:
    """A tokenised source. `counted_bytes` is what the tokenizer's byte lengths sum to over both splits."""

    source: str
    splits: dict[SplitName, Split]
    num_bytes: int
    counted_bytes: float
    manifest: dict[str, Any]


def open_shards(
    source: Source, tokenizer: Tokenizer, heldout_fraction: float, cache: Path, announce: Announce = lambda _: None
) -> Shards:
    """The source's shards from the cache, tokenised first where they are not there. Raises `DataError`."""
    key = content_key(source.fingerprint(), tokenizer.fingerprint(), heldout_fraction)

    def write(directory: Path) -> dict[str, Any]:
        announce(f"{source.name}: tokenising (once; kept in {cache / 'shards' / key})")
        return _write(directory, source, tokenizer, heldout_fraction)

    directory = cache / "shards" / key
    return _open(directory, entry(directory, write), source, tokenizer)


def content_key(*parts: object) -> str:
    """The name of a cache entry: a hash of all that decides its content, the layout's version included."""
    return hashlib.sha256(json.dumps([FORMAT, *parts]).encode()).hexdigest()[:32]


# -- writing -----------------------------------------------------------------------------------------------------------


def _write(directory: Path, source: Source, tokenizer: Tokenizer, heldout_fraction: float) -> dict[str, Any]:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    byte_lengths_V = tokenizer.byte_lengths()
    writers = {split: _SplitWriter(directory, split, tokenizer, dtype) for split in SPLITS}
    seen: set[str] = set()
    num_bytes, counted_bytes, num_empty = 0, 0.0, 0
    try:
        for chunk in _chunks(source.read()):
            for document, ids in zip(chunk, tokenizer.encode_batch([part.text for part in chunk]), strict=True):
                if document.name in seen:
                    raise DataError(f"{source.name}: two documents are named {document.name!r}; names must be unique")
                seen.add(document.name)
                if not ids.size:
                    num_empty += 1
                    continue
                if int(ids.max()) >= tokenizer.vocab_size:
                    raise DataError(
                        f"{source.name}: {document.name!r} has id {int(ids.max())} and the vocabulary only "
                        f"{tokenizer.vocab_size}; use the tokenizer.json that belongs to this vocabulary"
                    )
                if (ids == tokenizer.document).any():
                    raise DataError(
                        f"{source.name}: {document.name!r} holds the document separator (id {tokenizer.document}) as "
                        "text; choose another separator token"
                    )
                num_bytes += len(document.text)
                counted_bytes += float(byte_lengths_V[ids].sum())
                writers[split_of(document.name, heldout_fraction)].add(document.name, ids)
    finally:
        for writer in writers.values():
            writer.close()
    if not num_bytes:
        raise DataError(f"{source.name}: has no text; check its paths")
    return {
        "format": FORMAT,
        "source": source.facts(),
        "heldout_fraction": heldout_fraction,
        "dtype": dtype.str,
        "vocab_size": tokenizer.vocab_size,
        "document": tokenizer.document,
        "tokenizer": tokenizer.fingerprint(),
        "num_bytes": num_bytes,
        "counted_bytes": counted_bytes,
        "num_empty_documents": num_empty,
        "splits": {split: writers[split].counts() for split in SPLITS},
    }


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document.text)
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class _SplitWriter:
    """Appends documents to the three files of one split."""

    def __init__(self, directory: Path, split: SplitName, tokenizer: Tokenizer, dtype: np.dtype[Any]) -> None:
        self._files: dict[str, BinaryIO] = {
            kind: (directory / f"{split}.{kind}").open("wb") for kind in ("ids", "ends", "names")
        }
        self._dtype = dtype
        self._separator = np.array([tokenizer.document], dtype).tobytes()
        self._num_documents, self._num_ids = 0, 0

    def add(self, name: str, ids: NDArray[np.uint32]) -> None:
        self._num_documents += 1
        self._num_ids += len(ids) + 2
        self._files["ids"].write(self._separator + ids.astype(self._dtype).tobytes() + self._separator)
        self._files["ends"].write(np.array([self._num_ids], "<i8").tobytes())
        self._files["names"].write(json.dumps(name).encode() + b"\n")

    def counts(self) -> dict[str, int]:
        return {"documents": self._num_documents, "ids": self._num_ids}

    def close(self) -> None:
        for file in self._files.values():
            file.close()


# -- reading -----------------------------------------------------------------------------------------------------------


def _open(directory: Path, manifest: dict[str, Any], source: Source, tokenizer: Tokenizer) -> Shards:
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    expected = {
        "format": FORMAT,
        "dtype": dtype,
        "vocab_size": tokenizer.vocab_size,
        "document": tokenizer.document,
        "tokenizer": tokenizer.fingerprint(),
    }
    for field, wanted in expected.items():
        if manifest.get(field) != wanted:
            raise damaged(
                directory / "manifest.json", f"says {field} {manifest.get(field)!r} where {wanted!r} is in use"
            )
    try:
        counts = {
            split: (int(manifest["splits"][split]["documents"]), int(manifest["splits"][split]["ids"]))
            for split in SPLITS
        }
        num_bytes, counted_bytes = int(manifest["num_bytes"]), float(manifest["counted_bytes"])
    except (KeyError, TypeError, ValueError):
        raise damaged(directory / "manifest.json", "lacks its counts") from None
    splits = {split: _open_split(directory, split, np.dtype(dtype), *counts[split]) for split in SPLITS}
    return Shards(source.name, splits, num_bytes, counted_bytes, manifest)


def _open_split(directory: Path, split: SplitName, dtype: np.dtype[Any], num_documents: int, num_ids: int) -> Split:
    ids_path, ends_path, names_path = (directory / f"{split}.{kind}" for kind in ("ids", "ends", "names"))
    if ids_path.stat().st_size != num_ids * dtype.itemsize:
        raise damaged(ids_path, f"does not hold the {num_ids} ids of its manifest")
    ids = np.memmap(ids_path, dtype, mode="r") if num_ids else np.empty(0, dtype)
    ends = np.fromfile(ends_path, "<i8").astype(np.int64)
    ends_in_order = bool((np.diff(ends, prepend=0) >= 2).all()) and (int(ends[-1]) if len(ends) else 0) == num_ids
    if len(ends) != num_documents or not ends_in_order:
        raise damaged(ends_path, "does not hold the document ends of its manifest")
    try:
        names = tuple(json.loads(line) for line in names_path.read_bytes().splitlines())
    except ValueError:
        raise damaged(names_path, "does not hold document names") from None
    if len(names) != num_documents:
        raise damaged(names_path, f"does not hold the {num_documents} names of its manifest")
    return Split(ids, ends, names)


# -- what a tokenizer learns from ---------------------------------------------------------------------------------------


def training_texts(sources: list[Source], heldout_fraction: float, num_bytes_each: int) -> Iterator[str]:
    """Documents of the training split, up to about `num_bytes_each` of every source."""
    for source in sources:
        left = num_bytes_each
        for document in source.read():
            if split_of(document.name, heldout_fraction) == "train":
                yield document.text.decode()
                left -= len(document.text)
                if left <= 0:
                    break
