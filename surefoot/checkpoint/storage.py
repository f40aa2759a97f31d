"""DCP's file readers and writers, narrowed: what is written is hashed and synced, what is read can only be tensors."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from surefoot.checkpoint.archive import read_tensor
from surefoot.checkpoint.inert import ForeignError
from surefoot.checkpoint.manifest import DAMAGED, FileRecord, open_regular, reason
from surefoot.checkpoint.metadata import tensor_metadata
from surefoot.config import CheckpointError

if TYPE_CHECKING:
    from typing_extensions import Buffer


def call_dcp(action: Callable[[], object]) -> None:
    """Run a DCP call in this process alone; what failed inside it is raised as itself."""
    try:
        with warnings.catch_warnings():
            # DCP remarks on every call without a process group.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            action()
    except CheckpointException as error:
        failure: BaseException = next(iter(error.failures.values()))[0]
        # An interrupt leaves torch's writer half-way, which then complains of something else.
        context: BaseException | None = failure
        while context is not None:
            if not isinstance(context, Exception):
                raise context from None
            context = context.__context__
        raise failure from None


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


class HashingFileSystem(FileSystem):
    """DCP's view of one directory: every stream is a `HashedFile`, recorded under its final name."""

    def __init__(self) -> None:
        self.files: dict[str, FileRecord] = {}
        self.failure: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """A new file; `mode` is always "wb" in a save."""
        if mode != "wb":
            raise ValueError(f"a save opens files to write, not {mode!r}")
        stream = HashedFile(Path(path))
        try:
            with stream:
                yield stream
        finally:
            self.failure = self.failure or stream.failure
        self.files[Path(path).name] = stream.record()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file and its record."""
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class Writer(FileSystemWriter):
    """DCP's writer into a new directory, in bytes that depend on nothing but the tensors."""

    def __init__(self, directory: Path, file_system: HashingFileSystem) -> None:
        super().__init__(directory, sync_files=False)
        self.fs = file_system

    def storage_meta(self) -> StorageMeta | None:
        """Nothing: DCP would put this machine's path and a random number into the metadata."""
        return None


class Reader(FileSystemReader):
    """DCP's reader over metadata that was checked before; opens only the files it names, and takes only tensors."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata
        self._directory = directory
        self._parts = {
            MetadataIndex(name, chunk.offsets): (tensor.properties.dtype, chunk.sizes)
            for name, tensor in tensor_metadata(metadata).items()
            for chunk in tensor.chunks
        }

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """The checked metadata; the file is not opened again."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors; `CheckpointError` where the file holds anything else."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            if item.type != LoadItemType.TENSOR:
                raise CheckpointError(f"{self._directory}: holds a pickled object, which is never loaded; it {DAMAGED}")
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            file = self._directory / name
            try:
                with open_regular(file) as stream:
                    for item in items:
                        info = self.storage_data[item.storage_index]
                        stream.seek(info.offset)
                        self._fill(file, item, stream.read(info.length), planner)
            except OSError as error:
                raise CheckpointError(f"{file}: cannot be read ({reason(error)}); the checkpoint {DAMAGED}") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _fill(self, file: Path, item: ReadItem, data: bytes, planner: LoadPlanner) -> None:
        name = item.storage_index.fqn
        try:
            source = read_tensor(data)
        except ForeignError as error:
            raise CheckpointError(f"{file}: the part for {name!a:.120} {error}; the checkpoint {DAMAGED}") from None
        if (source.dtype, source.shape) != self._parts[item.storage_index]:
            raise CheckpointError(f"{file}: holds another tensor than {name!a:.120}; the checkpoint {DAMAGED}")
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            source = source.narrow(dim, start, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(source)
        planner.commit_tensor(item, target)
