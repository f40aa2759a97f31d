"""Find, check and read checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from surefoot.checkpoint.archive import DTYPES
from surefoot.checkpoint.inert import ForeignError
from surefoot.checkpoint.manifest import (
    DAMAGED,
    METADATA,
    STATE,
    TensorRecord,
    candidates,
    check_hashes,
    named_step,
    open_regular,
    read_manifest,
    reason,
)
from surefoot.checkpoint.metadata import read_metadata
from surefoot.checkpoint.storage import Reader, call_dcp
from surefoot.config import CheckpointError


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk: every byte was checked when it was opened; its tensors are still in its files."""

    path: Path
    step: int
    state: Mapping[str, Any]
    tensors: Mapping[str, TensorRecord]
    metadata: Metadata = field(repr=False)


def latest(folder: Path, announce: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint of a folder; each damaged one passed over is named through `announce`."""
    try:
        found = candidates(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({reason(error)}); make it readable") from None
    for _, path in found:
        try:
            if path.is_symlink():
                raise CheckpointError(f"{path}: is a link; name the checkpoint it leads to, or put a copy in its place")
            return open_checkpoint(path)
        except CheckpointError as error:
            announce(f"passing over a checkpoint: {error}")
    return None


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint by its directory; `CheckpointError` names what is missing, damaged or foreign in it."""
    manifest = read_manifest(path)
    if named_step(path) not in (None, manifest.step):
        raise CheckpointError(f"{path}: holds step {manifest.step}; give it back the name it was saved under")
    check_hashes(path, manifest)
    try:
        state = json.loads(_read(path / STATE))
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path / STATE}: is not readable JSON; it {DAMAGED}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path / STATE}: is not an object; it {DAMAGED}")
    try:
        metadata = read_metadata(_read(path / METADATA), manifest)
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
    _fill(checkpoint, tensors)


def read_tensors(checkpoint: Checkpoint, prefix: str = "") -> dict[str, Tensor]:
    """New CPU tensors of every name under `prefix`, by the rest of the name."""
    tensors = {
        name: torch.empty(record.shape, dtype=DTYPES[record.dtype])
        for name, record in checkpoint.tensors.items()
        if name.startswith(prefix)
    }
    _fill(checkpoint, tensors)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _fill(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    if not tensors:
        return
    reader = Reader(checkpoint.path, checkpoint.metadata)
    targets = {name: tensor.detach() for name, tensor in tensors.items()}
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    call_dcp(lambda: state_dict_loader.load(targets, storage_reader=reader, planner=planner, no_dist=True))


def _read(file: Path) -> bytes:
    try:
        with open_regular(file) as stream:
            return stream.read()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({reason(error)}); the checkpoint {DAMAGED}") from None


def _first(names: list[str]) -> str:
    return repr(names[0]) + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
