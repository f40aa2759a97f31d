"""Shards: a source's documents as ids in memory-mapped files, one a split, tokenised once.

Each document is stored as [separator, t1 … tn, separator]: the opening separator predicts t1, tn predicts the closing
one, and the closing one predicts nothing. So every token of text and every end is predicted exactly once, and no
position predicts another document.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, overload

import numpy as np
from numpy.typing import NDArray

from surefoot.config import DataError
from surefoot.data.cache import damaged, entry
from surefoot.data.source import Document, Source
from surefoot.data.tokenizer import Tokenizer

FORMAT = 2
"""Version of the layout, part of every cache key: an older cache is then left alone, not misread."""

CHUNK_BYTES = 4 << 20
"""Text tokenised in one call: enough for all cores, little enough to hold."""

Announce = Callable[[str], None]
SplitName = Literal["train", "heldout"]
SPLITS: tuple[SplitName, ...] = ("train", "heldout")
KINDS = ("ids", "ends", "names", "name-ends")
"""The files of a split: little-endian ids and document ends, all names in a row, and where each name ends."""


def split_of(name: str, heldout_fraction: float) -> SplitName:
    """The split of a document, by the hash of its name: adding documents never moves another one."""
    value = int.from_bytes(hashlib.sha256(name.encode(errors="surrogatepass")).digest()[:8], "big")
    return "heldout" if value < heldout_fraction * 2.0**64 else "train"


class Names(Sequence[str]):
    """The names of a split's documents, left on disk: there may be millions."""

    def __init__(self, content: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self._content, self._ends = content, ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = int(self._ends[index - 1]) if index else 0
        return self._content[start : int(self._ends[index])].tobytes().decode(errors="surrogatepass")


@dataclass(frozen=True)
class Split:
    """One split of one source: the stream of ids, and where each document ends in it (exclusive)."""

    ids: NDArray[np.uint16] | NDArray[np.uint32]
    ends: NDArray[np.int64]
    names: Names


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
    return _open(directory, entry(directory, write, announce), source, tokenizer)


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
        self._files: dict[str, BinaryIO] = {kind: (directory / f"{split}.{kind}").open("wb") for kind in KINDS}
        self._dtype = dtype
        self._separator = np.array([tokenizer.document], dtype).tobytes()
        self._num_documents, self._num_ids, self._num_name_bytes = 0, 0, 0

    def add(self, name: str, ids: NDArray[np.uint32]) -> None:
        self._num_documents += 1
        self._num_ids += len(ids) + 2
        self._files["ids"].write(self._separator + ids.astype(self._dtype).tobytes() + self._separator)
        self._files["ends"].write(np.array([self._num_ids], "<i8").tobytes())
        self._num_name_bytes += self._files["names"].write(name.encode(errors="surrogatepass"))
        self._files["name-ends"].write(np.array([self._num_name_bytes], "<i8").tobytes())

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
        manifest["source"].keys()
    except (KeyError, TypeError, ValueError, AttributeError):
        raise damaged(directory / "manifest.json", "lacks its counts") from None
    for name in (f"{split}.{kind}" for split in SPLITS for kind in KINDS):
        if name not in manifest["files"]:
            raise damaged(directory / "manifest.json", f"does not name {name}")
    splits = {split: _open_split(directory, split, np.dtype(dtype), *counts[split]) for split in SPLITS}
    return Shards(source.name, splits, num_bytes, counted_bytes, manifest)


def _open_split(directory: Path, split: SplitName, dtype: np.dtype[Any], num_documents: int, num_ids: int) -> Split:
    ids = _map(directory / f"{split}.ids", dtype)
    ends = _read_ends(directory / f"{split}.ends", num_documents, len(ids), shortest=2)
    if len(ids) != num_ids:
        raise damaged(directory / f"{split}.ids", f"does not hold the {num_ids} ids of its manifest")
    content = _map(directory / f"{split}.names", np.dtype(np.uint8))
    name_ends = _read_ends(directory / f"{split}.name-ends", num_documents, len(content), shortest=0)
    return Split(ids, ends, Names(content, name_ends))


def _map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    if path.stat().st_size % dtype.itemsize:
        raise damaged(path, f"ends inside a number of {dtype.itemsize} bytes")
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


def _read_ends(path: Path, count: int, total: int, *, shortest: int) -> NDArray[np.int64]:
    """Ends of `count` pieces, each at least `shortest` long, that fill `total` exactly."""
    ends = _map(path, np.dtype("<i8")).astype(np.int64)
    is_ordered = bool((np.diff(ends, prepend=0) >= shortest).all())
    if len(ends) != count or not is_ordered or (int(ends[-1]) if count else 0) != total:
        raise damaged(path, f"does not divide what it belongs to into the {count} documents of its manifest")
    return ends


# -- what a tokenizer learns from --------------------------------------------------------------------------------------


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
