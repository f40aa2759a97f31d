"""Write checkpoints so that a reader finds a whole one or none, and delete those no longer wanted.

A checkpoint grows in a staging directory, its manifest last, and takes its name in one rename. Whatever is deleted first
loses that name, again in one rename. So a process killed at any moment leaves no half that looks whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from surefoot.checkpoint.archive import DTYPES
from surefoot.checkpoint.manifest import (
    MANIFEST,
    STATE,
    FileRecord,
    Manifest,
    TensorRecord,
    candidates,
    check_lengths,
    named_step,
    read_manifest,
    reason,
    step_name,
)
from surefoot.checkpoint.storage import HashedFile, HashingFileSystem, Writer, call_dcp
from surefoot.config import CheckpointError

_STAGING = re.compile(r"\.staging-.+-(\d+)")


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """Write `folder/step-XXXXXXXX` and return it; `state` is what JSON can hold, `tensors` go by flat logical names.

    A checkpoint of the same step is replaced; until the new one is whole, the old one stays. `CheckpointError` where the
    folder cannot be written or is out of space: then no half of it remains and earlier checkpoints are untouched.
    Clears away what processes that died in the middle of a save have left.
    """
    final = folder / step_name(step)
    staging = folder / f".staging-{step_name(step)}-{os.getpid()}"
    try:
        state_text = json.dumps(dict(state), indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{final}: the state cannot be written as JSON ({error}); pass numbers and text"
        ) from None
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout != torch.strided or tensor.is_meta or dtype not in DTYPES:
            raise CheckpointError(
                f"{final}: {name} ({dtype}) is not a dense tensor of numbers with memory; only such can be saved"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear_stale(folder)
        staging.mkdir()
        _write(staging, step, tensors, state_text)
        _publish(staging, final)
    except OSError as error:
        raise CheckpointError(
            f"{final}: cannot be saved ({reason(error)}); make room or make it writable: earlier checkpoints are untouched"
        ) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return final


def retain(folder: Path, keep_last: int, keep_every: int | None) -> list[Path]:
    """Delete whole checkpoints but the `keep_last` newest and multiples of `keep_every`; return what was deleted.

    The newest is never deleted. Damaged ones neither count nor go: they are evidence. Wholeness is judged by manifest
    and lengths, without reading the files.
    """
    try:
        whole = [(step, path) for step, path in candidates(folder) if _looks_whole(path)]
        steps = sorted({step for step, _ in whole}, reverse=True)
        kept = set(steps[: max(keep_last, 1)]) | {step for step in steps if keep_every and step % keep_every == 0}
        seen: set[int] = set()
        deleted = []
        for step, path in whole:
            # A replaced checkpoint outlives its successor's arrival only where the process was killed just then.
            if step not in kept or step in seen:
                _discard(path)
                deleted.append(path)
            seen.add(step)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: old checkpoints cannot be deleted ({reason(error)}); make it writable"
        ) from None
    return deleted


def _write(staging: Path, step: int, tensors: Mapping[str, Tensor], state_text: str) -> None:
    file_system = HashingFileSystem()
    planner = DefaultSavePlanner(flatten_state_dict=False)
    flat = {name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in tensors.items()}
    try:
        call_dcp(
            lambda: state_dict_saver.save(
                flat, storage_writer=Writer(staging, file_system), planner=planner, no_dist=True
            )
        )
    except Exception:
        if file_system.failure is not None:
            raise file_system.failure from None
        raise
    files = dict(file_system.files)
    files[STATE] = _write_text(staging / STATE, state_text)
    records = {
        name: TensorRecord(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in flat.items()
    }
    _write_text(staging / MANIFEST, Manifest(step, files, records).text())
    _sync_directory(staging)


def _write_text(file: Path, text: str) -> FileRecord:
    with HashedFile(file) as stream:
        stream.write(text.encode())
    return stream.record()


def _publish(staging: Path, final: Path) -> None:
    """Give the staged checkpoint its name; one that bears it steps aside to "name~", where readers still find it."""
    aside = final.with_name(final.name + "~")
    if os.path.lexists(final):
        if os.path.lexists(aside):
            _discard(aside)
        final.rename(aside)
    try:
        staging.rename(final)
    except OSError:
        if os.path.lexists(aside):
            aside.rename(final)
        raise
    _sync_directory(final.parent)
    if os.path.lexists(aside):
        _discard(aside)


def _discard(path: Path) -> None:
    """Delete a checkpoint: its name first, then its files."""
    doomed = path.with_name(f".staging-removed-{path.name}-{os.getpid()}")
    path.rename(doomed)
    _sync_directory(path.parent)
    _remove(doomed)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _clear_stale(folder: Path) -> None:
    """Remove what saves and deletions of dead processes, or earlier ones of this process, have left."""
    for path in folder.iterdir():
        match = _STAGING.fullmatch(path.name)
        if match and (int(match[1]) == os.getpid() or not _is_alive(int(match[1]))):
            _remove(path)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _looks_whole(path: Path) -> bool:
    if path.is_symlink():
        return False
    try:
        manifest = read_manifest(path)
        check_lengths(path, manifest)
    except CheckpointError:
        return False
    return manifest.step == named_step(path)  # under another name it is none that `latest` would open


def _sync_directory(path: Path) -> None:
    """Make renames and new names in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
