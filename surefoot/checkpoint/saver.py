"""Checkpoints written by all ranks of a run, in the background, and complete when all agree.

Every rank calls every method of its `Saver` at the same points of the run, and none waits for what only some know:
that all ranks have written is agreed by the run, with what its ranks exchange at each step anyway.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from surefoot.checkpoint.agreed import together
from surefoot.checkpoint.config import CheckpointConfig
from surefoot.checkpoint.manifest import reason, step_name
from surefoot.checkpoint.parts import Part, check_part
from surefoot.checkpoint.save import complete, not_saved, prepare, retain, staging_of, state_text, sync_directory
from surefoot.checkpoint.storage import Written, write_parts
from surefoot.config import CheckpointError
from surefoot.dist.objects import all_objects, first_object, objects_at_first, rank_in

Mode = Literal["asynchronous", "blocking"]

_SILENT_SECONDS = 2.0


class Saver:
    """One rank's side of a run's checkpoints. At most one is in flight: the next waits for it."""

    def __init__(
        self, folder: Path, config: CheckpointConfig, group: ProcessGroup | None, announce: Callable[[str], None]
    ) -> None:
        self.folder, self.config, self.group = folder, config, group
        self._announce = announce
        self._write: _Write | None = None
        self._newest: int | None = None
        self._buffers: dict[str, Tensor] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leave nothing behind that still writes. Ranks cannot agree any more; one process completes what it began."""
        write = self._write
        if write is None:
            return
        if self.group is not None or (kind is not None and not issubclass(kind, Exception)):
            write.cancel()
            return
        try:
            self.finish()
        except CheckpointError as failure:
            if error is None:
                raise
            self._announce(str(failure))

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes; one that failed has ended."""
        return self._write is not None and self._write.is_alive()

    def save(self, step: int, parts: Mapping[str, Part], state: Mapping[str, Any], mode: Mode) -> None:
        """Begin a checkpoint of the ranks' `parts`, which together make up whole tensors; blocking also ends it.

        Asynchronously, `parts` may change as soon as this returns. A step that this saver has just saved is not saved again.
        `CheckpointError`, on all ranks, where the one before failed or this one cannot begin.
        """
        self.finish()
        if step == self._newest:
            return
        final = self.folder / step_name(step)
        staging = self.folder / first_object(staging_of(self.folder, step).name, self.group)
        try:
            text = together(lambda: self._begin(staging, final, parts, state), self.group)
            together(lambda: _check_shared(staging), self.group)
        except CheckpointError:
            if rank_in(self.group) == 0:
                shutil.rmtree(staging, ignore_errors=True)
            raise
        kept = self._staged(parts) if mode == "asynchronous" else dict(parts)
        self._write = _Write(step, staging, final, rank_in(self.group), kept, text)
        self._write.start()
        if mode == "blocking":
            self.finish()

    def finish(self) -> None:
        """Wait until all ranks have written what is in flight, then settle it; no rank waits in a collective for long."""
        if self._write is None:
            return
        begun, is_silent = time.monotonic(), True
        while True:
            self._write.join(_SILENT_SECONDS)
            if not any(all_objects(self.is_writing, self.group)):
                break
            if is_silent and time.monotonic() - begun >= _SILENT_SECONDS:
                self._announce(f"waiting until {self._write.final} is written")
                is_silent = False
        self.settle()

    def settle(self) -> None:
        """Give the checkpoint that all ranks have written its name, and delete old ones; nothing where none is in flight.

        `CheckpointError`, on all ranks, where one could not write: then no half of it remains.
        """
        write, self._write = self._write, None
        if write is None:
            return
        write.join()
        found = objects_at_first((write.failure, write.written), self.group)
        failure = None if found is None else self._completed(write, found)
        failure = first_object(failure, self.group)
        if failure is not None:
            raise CheckpointError(failure)
        self._newest = write.step

    def _begin(self, staging: Path, final: Path, parts: Mapping[str, Part], state: Mapping[str, Any]) -> str:
        for name, part in parts.items():
            check_part(final, name, part)
        if rank_in(self.group) != 0:
            return ""
        text = state_text(final, state)
        try:
            prepare(staging)
        except OSError as error:
            raise CheckpointError(not_saved(final, reason(error))) from None
        return text

    def _staged(self, parts: Mapping[str, Part]) -> dict[str, Part]:
        """Copies of the parts in host memory, where those of the checkpoint before were."""
        buffers, staged = {}, {}
        for name, part in parts.items():
            buffer = self._buffers.pop(name, None)
            if buffer is None or (tuple(buffer.shape), buffer.dtype) != (part.box.shape, part.tensor.dtype):
                buffer = torch.empty(part.box.shape, dtype=part.tensor.dtype, pin_memory=part.tensor.is_cuda)
            buffers[name] = buffer.copy_(part.tensor.detach(), non_blocking=True)
            staged[name] = Part(part.shape, part.box, buffer)
        if any(part.tensor.is_cuda for part in parts.values()):
            torch.cuda.synchronize()
        self._buffers = buffers
        return staged

    def _completed(self, write: _Write, found: list[tuple[str | None, Written]]) -> str | None:
        """On rank 0: the checkpoint gets its name; the text says why it did not."""
        try:
            for rank, (failure, written) in enumerate(found):
                if failure is not None:
                    return not_saved(write.final, failure if rank == 0 else f"rank {rank}: {failure}")
                for name, record in written.files.items():
                    if not (file := write.staging / name).is_file() or file.stat().st_size != record.bytes:
                        return not_saved(write.final, f"{name}, which rank {rank} wrote, is not what rank 0 sees")
            complete(write.staging, write.final, write.step, write.text, [written for _, written in found])
            retain(self.folder, self.config.keep_last, self.config.keep_every)
        except OSError as error:
            return not_saved(write.final, reason(error))
        except CheckpointError as error:
            return str(error)
        finally:
            shutil.rmtree(write.staging, ignore_errors=True)
        return None


class _Write(threading.Thread):
    """A rank's parts on their way to the disk. Communicates with no other rank and draws no random number."""

    def __init__(self, step: int, staging: Path, final: Path, rank: int, parts: Mapping[str, Part], text: str) -> None:
        super().__init__(name=f"checkpoint of step {step}", daemon=True)
        self.step, self.staging, self.final, self.text = step, staging, final, text
        self.written = Written({}, ())
        self.failure: str | None = None
        self._rank, self._parts = rank, parts
        self._is_cancelled = threading.Event()

    def run(self) -> None:
        """Write and sync; a failure is kept for whoever asks."""
        try:
            self.written = write_parts(self.staging, self._rank, self._remaining())
            sync_directory(self.staging)
        except OSError as error:
            self.failure = reason(error)
        except Exception as error:
            self.failure = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
        finally:
            self._parts = {}

    def cancel(self) -> None:
        """Write nothing more."""
        self._is_cancelled.set()
        self.join()

    def _remaining(self) -> Iterator[tuple[str, Part]]:
        for item in self._parts.items():
            if self._is_cancelled.is_set():
                raise InterruptedError("given up")
            yield item


def _check_shared(staging: Path) -> None:
    if not staging.is_dir():
        raise CheckpointError(
            f"{staging.parent}: does not hold what rank 0 has just made there ({staging.name}); "
            "give all ranks one shared folder"
        )
