"""Write checkpoints so that a reader finds a whole one or none, and delete those no longer wanted.

A checkpoint grows in a staging directory, its manifest last, and takes its name in one rename. Whatever is deleted first
loses that name, again in one rename. So a process killed at any moment leaves no half that looks whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from surefoot.checkpoint.inert import ForeignError
from surefoot.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    STATE,
    Manifest,
    candidates,
    check_lengths,
    named_step,
    read_manifest,
    reason,
    step_name,
)
from surefoot.checkpoint.metadata import read_metadata, write_metadata
from surefoot.checkpoint.parts import check_part, whole
from surefoot.checkpoint.storage import Written, write_bytes, write_parts
from surefoot.config import CheckpointError

_STAGING = re.compile(r"\.staging-.+-(\d+)")


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """Write `folder/step-XXXXXXXX` and return it; `state` is what JSON can hold, `tensors` go by flat logical names.

    A checkpoint of the same step is replaced; until the new one is whole, the old one stays. `CheckpointError` where the
    folder cannot be written or is out of space: then no half of it remains and earlier checkpoints are untouched.
    Clears away what processes that died in the middle of a save have left.
    """
    final, parts = folder / step_name(step), {name: whole(tensor) for name, tensor in tensors.items()}
    text = state_text(final, state)
    for name, part in parts.items():
        check_part(final, name, part)
    staging = staging_of(folder, step)
    try:
        prepare(staging)
        complete(staging, final, step, text, [write_parts(staging, 0, parts.items())])
    except OSError as error:
        raise CheckpointError(not_saved(final, reason(error))) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return final


def state_text(final: Path, state: Mapping[str, Any]) -> str:
    """The state as JSON; `CheckpointError` for one that JSON cannot hold."""
    try:
        return json.dumps(dict(state), indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{final}: the state cannot be written as JSON ({error}); pass numbers and text"
        ) from None


def not_saved(final: Path, why: str) -> str:
    """What is said of a checkpoint that could not be written."""
    return f"{final}: cannot be saved ({why}); make room or make it writable: earlier checkpoints are untouched"


def staging_of(folder: Path, step: int) -> Path:
    """Where this process lets a step's checkpoint grow."""
    return folder / f".staging-{step_name(step)}-{os.getpid()}"


def prepare(staging: Path) -> None:
    """Make an empty staging directory, after clearing away what dead processes have left; `OSError` where that fails."""
    staging.parent.mkdir(parents=True, exist_ok=True)
    _clear_stale(staging.parent)
    staging.mkdir()


def complete(staging: Path, final: Path, step: int, text: str, written: Sequence[Written]) -> None:
    """Give a staged checkpoint, whose parts all ranks have written, its other files and then its name.

    `CheckpointError`, and no name, unless the parts make up whole tensors; `OSError` where the disk fails.
    """
    parts = [part for one in written for part in one.parts]
    tensors = {part.name: part.tensor for part in parts}
    files = {name: record for one in written for name, record in one.files.items()}
    layout = write_metadata(parts)
    files[METADATA] = write_bytes(staging / METADATA, layout)
    files[STATE] = write_bytes(staging / STATE, text.encode())
    manifest = Manifest(step, files, tensors)
    try:
        if len(written) > 1:
            read_metadata(layout, manifest)  # what no reader would take is not published
    except ForeignError as error:
        raise CheckpointError(f"{final}: cannot be saved: the ranks' layout {error}") from None
    write_bytes(staging / MANIFEST, manifest.text().encode())
    sync_directory(staging)
    _publish(staging, final)


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
    sync_directory(final.parent)
    if os.path.lexists(aside):
        _discard(aside)


def _discard(path: Path) -> None:
    """Delete a checkpoint: its name first, then its files."""
    doomed = path.with_name(f".staging-removed-{path.name}-{os.getpid()}")
    path.rename(doomed)
    sync_directory(path.parent)
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


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
