"""Find, check and read checkpoints; with a group, all its ranks do so together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata

from surefoot.checkpoint.agreed import together
from surefoot.checkpoint.archive import DTYPES
from surefoot.checkpoint.inert import ForeignError
from surefoot.checkpoint.manifest import (
    DAMAGED,
    METADATA,
    STATE,
    Manifest,
    TensorRecord,
    candidates,
    check_hashes,
    named_step,
    read_checked,
    read_manifest,
    reason,
)
from surefoot.checkpoint.metadata import read_metadata
from surefoot.checkpoint.read import fill
from surefoot.config import CheckpointError
from surefoot.dist.layout import Box
from surefoot.dist.objects import all_objects, first_object, num_ranks_in, rank_in


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk: every byte was checked when it was opened; its tensors are still in its files."""

    path: Path
    step: int
    state: Mapping[str, Any]
    tensors: Mapping[str, TensorRecord]
    metadata: Metadata = field(repr=False)


def latest(folder: Path, announce: Callable[[str], None], group: ProcessGroup | None = None) -> Checkpoint | None:
    """The newest whole checkpoint of a folder; each damaged one passed over is named through `announce`.

    Ranks of a `group` open the same one, or all none. `CheckpointError` where they do not see the same folder.
    """
    for name in _names(folder, group):
        path = folder / name
        try:
            return open_checkpoint(path, group, follow_link=False)
        except CheckpointError as error:
            announce(f"passing over a checkpoint: {error}")
    return None


def open_checkpoint(path: Path, group: ProcessGroup | None = None, *, follow_link: bool = True) -> Checkpoint:
    """A checkpoint by its directory; `CheckpointError` names what is missing, damaged or foreign in it.

    Ranks of a `group` share the files out: each is hashed by one of them.
    """
    manifest = first_object(
        together(lambda: _manifest(path, follow_link) if not rank_in(group) else None, group), group
    )
    assert manifest is not None
    return together(lambda: _checked(path, manifest, rank_in(group), num_ranks_in(group)), group)


def _names(folder: Path, group: ProcessGroup | None) -> list[str]:
    """What bears a checkpoint's name, newest first, as all ranks see it."""

    def listed() -> list[str]:
        try:
            return [path.name for _, path in candidates(folder)]
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be read ({reason(error)}); make it readable") from None

    own, *others = all_objects(together(listed, group), group)
    for rank, names in enumerate(others, 1):
        if names != own:
            odd = sorted(set(own) ^ set(names))[0]
            sees, misses = (0, rank) if odd in own else (rank, 0)
            raise CheckpointError(
                f"{folder / odd}: rank {sees} sees it and rank {misses} does not; give all ranks one shared folder"
            )
    return own


def _manifest(path: Path, follow_link: bool) -> Manifest:
    if path.is_symlink() and not follow_link:
        raise CheckpointError(f"{path}: is a link; name the checkpoint it leads to, or put a copy in its place")
    manifest = read_manifest(path)
    if named_step(path) not in (None, manifest.step):
        raise CheckpointError(f"{path}: holds step {manifest.step}; give it back the name it was saved under")
    return manifest


def _checked(path: Path, manifest: Manifest, rank: int, num_ranks: int) -> Checkpoint:
    """The checkpoint, of which this rank has read the small files and hashed its share of the others."""
    large = sorted(manifest.files.keys() - {STATE, METADATA}, key=lambda name: (-manifest.files[name].bytes, name))
    check_hashes(path, manifest, large[rank::num_ranks])
    try:
        state = json.loads(read_checked(path, manifest, STATE))
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path / STATE}: is not readable JSON; it {DAMAGED}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path / STATE}: is not an object; it {DAMAGED}")
    try:
        metadata = read_metadata(read_checked(path, manifest, METADATA), manifest)
    except ForeignError as error:
        raise CheckpointError(f"{path / METADATA}: {error}; it was not written by surefoot or {DAMAGED}") from None
    return Checkpoint(path, manifest.step, state, manifest.tensors, metadata)


def load_into(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    """Fill `tensors` in place; names, shapes and dtypes must be exactly the checkpoint's, else `CheckpointError`.

    They are compared before anything is filled. Full logical names, as given to `save`.
    """
    lacking = sorted(tensors.keys() - checkpoint.tensors.keys())
    unasked = sorted(checkpoint.tensors.keys() - tensors.keys())
    if lacking or unasked:
        parts = [f"lacks {_first(lacking)}"] if lacking else []
        parts += [f"holds {_first(unasked)} for which there is no place"] if unasked else []
        raise CheckpointError(f"{checkpoint.path}: {' and '.join(parts)}; it belongs to another model or optimizer")
    for name, tensor in tensors.items():
        wanted = TensorRecord(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if wanted != checkpoint.tensors[name]:
            raise CheckpointError(
                f"{checkpoint.path}: {name} is {checkpoint.tensors[name]}, not {wanted}; it belongs to another model"
            )
        if tensor.is_meta:
            raise ValueError(f"{name} has no memory to load into; materialise it first")
    fill(checkpoint.path, checkpoint.metadata, {n: (Box.whole(tuple(t.shape)), t) for n, t in tensors.items()})


def read_tensors(checkpoint: Checkpoint, prefix: str = "") -> dict[str, Tensor]:
    """New CPU tensors of every name under `prefix`, by the rest of the name."""
    boxes = {name: Box.whole(record.shape) for name, record in checkpoint.tensors.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): tensor for name, tensor in read_parts(checkpoint, boxes).items()}


def read_parts(checkpoint: Checkpoint, boxes: Mapping[str, Box]) -> dict[str, Tensor]:
    """New CPU tensors that hold a box each of the checkpoint's tensors, by their full names."""
    tensors = {
        name: torch.empty(box.shape, dtype=DTYPES[checkpoint.tensors[name].dtype]) for name, box in boxes.items()
    }
    fill(checkpoint.path, checkpoint.metadata, {name: (boxes[name], tensor) for name, tensor in tensors.items()})
    return tensors


def _first(names: list[str]) -> str:
    return repr(names[0]) + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
