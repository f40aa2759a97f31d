"""A rank's file of tensors: hashed and synced as it is written, read as data, in DCP's format."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surefoot.checkpoint.manifest import FileRecord
from surefoot.checkpoint.parts import Part, PartRecord

if TYPE_CHECKING:
    from typing_extensions import Buffer


class HashedFile(io.BufferedWriter):
    """A new file that knows the sha256 of what was written to it and is on the disk once closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "x"))
        self.failure: OSError | None = None
        self._path = path
        self._hash = hashlib.sha256()
        self._num_bytes = 0

    def write(self, data: Buffer, /) -> int:
        """Write all of `data`."""
        with self._remembering_failure():
            written = super().write(data)
        self._hash.update(data)
        self._num_bytes += written
        return written

    def close(self) -> None:
        """Flush, sync and close."""
        if self.closed:
            return
        with self._remembering_failure():
            try:
                self.flush()
                os.fsync(self.fileno())
            finally:
                super().close()

    def record(self) -> FileRecord:
        """Length and hash of what was written."""
        return FileRecord(self._num_bytes, self._hash.hexdigest())

    @contextmanager
    def _remembering_failure(self) -> Iterator[None]:
        # torch's own file writer turns an error from below into one of its own words, so the first is kept here.
        try:
            yield
        except OSError as error:
            error.filename = error.filename or str(self._path)
            self.failure = self.failure or error
            raise


@dataclass(frozen=True)
class Written:
    """What one rank has put into a checkpoint's directory."""

    files: dict[str, FileRecord]
    parts: tuple[PartRecord, ...]


def write_parts(directory: Path, rank: int, parts: Iterable[tuple[str, Part]]) -> Written:
    """Write a rank's named parts into a file of its own, one after another; no file where there are none."""
    remaining = iter(parts)
    item = next(remaining, None)
    if item is None:
        return Written({}, ())
    file = f"__{rank}_0.distcp"
    records = []
    stream = HashedFile(directory / file)
    try:
        with stream:
            while item is not None:
                name, part = item
                offset = stream.tell()
                torch.save(_compact(part.tensor), stream)
                records.append(PartRecord(name, part.record, part.box, file, offset, stream.tell() - offset))
                item = next(remaining, None)
    except Exception as error:
        raise _cause(error, stream) from None
    return Written({file: stream.record()}, tuple(records))


def write_bytes(file: Path, data: bytes) -> FileRecord:
    """Write a small file."""
    with HashedFile(file) as stream:
        stream.write(data)
    return stream.record()


def _compact(tensor: Tensor) -> Tensor:
    """A tensor in host memory that brings nothing but its own elements along."""
    host = tensor.detach().resolve_conj().resolve_neg().cpu()
    return host.clone() if host.untyped_storage().nbytes() != host.numel() * host.itemsize else host


def _cause(error: Exception, stream: HashedFile) -> BaseException:
    """What made a write fail: torch's writer, left half-way by a full disk or an interrupt, complains of something else."""
    context: BaseException | None = error
    while context is not None:
        if not isinstance(context, Exception):
            return context
        context = context.__context__
    return error if stream.failure is None else stream.failure
