"""Parts of a checkpoint's tensors, out of the parts that were saved: any layout's out of any other's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from surefoot.checkpoint.archive import read_tensor
from surefoot.checkpoint.inert import ForeignError
from surefoot.checkpoint.manifest import DAMAGED, open_regular, reason
from surefoot.checkpoint.metadata import tensor_metadata
from surefoot.checkpoint.parts import common, within
from surefoot.config import CheckpointError
from surefoot.dist.layout import Box


class _Piece(NamedTuple):
    """A saved part, and what of it goes where."""

    name: str
    info: _StorageInfo
    dtype: torch.dtype
    saved: Box
    shared: Box


def fill(directory: Path, metadata: Metadata, wanted: Mapping[str, tuple[Box, Tensor]]) -> None:
    """Fill each tensor with its box; `CheckpointError` where a file holds anything else than checked metadata says.

    Opens only files in which there is something to read, and holds one saved part at a time.
    """
    by_file: dict[str, list[_Piece]] = {}
    for piece in _pieces(metadata, wanted):
        by_file.setdefault(piece.info.relative_path, []).append(piece)
    for name, pieces in by_file.items():
        file = directory / name
        try:
            with open_regular(file) as stream:
                for piece in sorted(pieces, key=lambda piece: piece.info.offset):
                    stream.seek(piece.info.offset)
                    source = _tensor(file, piece, stream.read(piece.info.length))
                    box, target = wanted[piece.name]
                    target.detach()[within(piece.shared, box).slices].copy_(
                        source[within(piece.shared, piece.saved).slices]
                    )
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read ({reason(error)}); the checkpoint {DAMAGED}") from None


def _pieces(metadata: Metadata, wanted: Mapping[str, tuple[Box, Tensor]]) -> Iterator[_Piece]:
    described = tensor_metadata(metadata)
    for name, (box, _) in wanted.items():
        for chunk in described[name].chunks:
            saved = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            shared = common(saved, box)
            if shared is not None:
                info = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
                yield _Piece(name, info, described[name].properties.dtype, saved, shared)


def _tensor(file: Path, piece: _Piece, data: bytes) -> Tensor:
    try:
        found = read_tensor(data)
    except ForeignError as error:
        raise CheckpointError(f"{file}: the part for {piece.name!a:.120} {error}; the checkpoint {DAMAGED}") from None
    if (found.dtype, tuple(found.shape)) != (piece.dtype, piece.saved.shape):
        raise CheckpointError(f"{file}: holds another tensor than {piece.name!a:.120}; the checkpoint {DAMAGED}")
    return found
