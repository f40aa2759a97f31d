"""What anyone who writes a checkpoint's files can do: put in other bytes, recompute every hash, and seal it again."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from surefoot.checkpoint.load import open_checkpoint, read_tensors
from surefoot.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    FileRecord,
    Manifest,
    TensorRecord,
    read_manifest,
    step_name,
)
from surefoot.checkpoint.parts import Part, whole
from surefoot.checkpoint.save import complete, prepare, save, staging_of, state_text
from surefoot.checkpoint.storage import write_parts
from surefoot.config import CheckpointError
from surefoot.dist.layout import Box

DATA = "__0_0.distcp"


def small() -> dict[str, Tensor]:
    """A few tensors of several kinds, some hundred bytes."""
    generator = torch.Generator().manual_seed(1)
    return {
        "model/matrix": torch.randn(3, 5, generator=generator),
        "model/half": torch.randn(4, generator=generator).bfloat16(),
        "step": torch.tensor(7),
    }


def save_small(folder: Path, step: int = 1) -> Path:
    return save(folder, step, {name: tensor + step for name, tensor in small().items()}, {"step": step})


def cut(tensor: Tensor, *offset_and_shape: tuple[int, ...]) -> Part:
    """A box of a tensor."""
    box = Box(*offset_and_shape)
    return Part(tuple(tensor.shape), box, tensor[box.slices])


def save_small_by_ranks(folder: Path, step: int = 1) -> Path:
    """The same tensors as four ranks write them, each into its file: the matrix in a grid of 2 by 2."""
    tensors = {name: tensor + step for name, tensor in small().items()}
    matrix, half = tensors["model/matrix"], tensors["model/half"]
    parts: list[dict[str, Part]] = [
        {"model/matrix": cut(matrix, (0, 0), (2, 3)), "step": whole(tensors["step"])},
        {"model/matrix": cut(matrix, (0, 3), (2, 2)), "model/half": cut(half, (0,), (2,))},
        {"model/half": cut(half, (2,), (2,)), "model/matrix": cut(matrix, (2, 0), (1, 3))},
        {"model/matrix": cut(matrix, (2, 3), (1, 2))},
    ]
    staging, final = staging_of(folder, step), folder / step_name(step)
    prepare(staging)
    written = [write_parts(staging, rank, own.items()) for rank, own in enumerate(parts)]
    complete(staging, final, step, state_text(final, {"step": step}), written)
    return final


def same(tensor: Tensor, other: Tensor) -> bool:
    """Equal in dtype, shape and every bit."""
    return (
        tensor.dtype == other.dtype
        and tensor.shape == other.shape
        and bits(tensor.resolve_conj().resolve_neg()) == bits(other.resolve_conj().resolve_neg())
    )


def bits(tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def reseal(path: Path, tensors: Mapping[str, TensorRecord] | None = None, step: int | None = None) -> None:
    """Make the manifest fit the files that are there."""
    old = read_manifest(path)
    files = {
        file.name: FileRecord(file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest())
        for file in path.iterdir()
        if file.name != MANIFEST
    }
    manifest = Manifest(old.step if step is None else step, files, old.tensors if tensors is None else tensors)
    _write_anew(path / MANIFEST, manifest.text().encode())


def put(path: Path, name: str, data: bytes) -> None:
    """Replace one file and seal."""
    _write_anew(path / name, data)
    reseal(path)


def _write_anew(file: Path, data: bytes) -> None:
    file.unlink()  # file systems sync a file that is cut and written again, and the tests write many
    file.write_bytes(data)


def change_metadata(path: Path, change: Callable[[Metadata], object]) -> None:
    """Alter the metadata as the object it is, and seal."""
    metadata: Any = pickle.loads((path / METADATA).read_bytes())
    change(metadata)
    put(path, METADATA, pickle.dumps(metadata))


def put_record(path: Path, name: str, data: bytes) -> None:
    """Let the record of one tensor be `data`, long enough for what it claims, and seal."""
    file = path / DATA
    offset = file.stat().st_size
    file.write_bytes(file.read_bytes() + data)

    def change(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == name:
                info.offset, info.length = offset, len(data)

    change_metadata(path, change)


def refusal(path: Path) -> str:
    """The one line with which a checkpoint is refused, by the time its tensors would be there."""
    with pytest.raises(CheckpointError) as caught:
        read_tensors(open_checkpoint(path))
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    assert len(text) < 600 + len(str(path))
    assert text.isprintable()
    return text
