"""DCP's `.metadata`: made of records of parts; a pickle, so read as data and copied, field by field and type by type."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from surefoot.checkpoint.archive import DTYPES
from surefoot.checkpoint.inert import Built, ForeignError, Name, read_pickle
from surefoot.checkpoint.manifest import Manifest, TensorRecord
from surefoot.checkpoint.parts import PartRecord

T = TypeVar("T")

_DCP = "torch.distributed.checkpoint.metadata"
_MAX_DIMS = 64
# Where DCP of torch 2.11 to 2.15 keeps what stands in a file of ours.
_NAMES = {
    (_DCP, "Metadata"),
    (_DCP, "TensorStorageMetadata"),
    (_DCP, "BytesStorageMetadata"),
    (_DCP, "ChunkStorageMetadata"),
    (_DCP, "TensorProperties"),
    (_DCP, "MetadataIndex"),
    (_DCP, "_MEM_FORMAT_ENCODING"),
    ("builtins", "getattr"),  # how some versions of Python pickle a member of an enumeration; it is not called
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("torch", name) for name in DTYPES),
}


def write_metadata(parts: Iterable[PartRecord]) -> bytes:
    """The pickle by which DCP, and `read_metadata`, find parts in their files; it depends on nothing else."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for part in parts:
        described = tensors.get(part.name)
        if not isinstance(described, TensorStorageMetadata):
            properties = TensorProperties(dtype=DTYPES[part.tensor.dtype], layout=torch.strided)
            described = TensorStorageMetadata(properties, torch.Size(part.tensor.shape), [])
            tensors[part.name] = described
        offsets = torch.Size(part.box.offset)
        storage[MetadataIndex(part.name, offsets, len(described.chunks))] = _StorageInfo(
            part.file, part.offset, part.length
        )
        described.chunks.append(ChunkStorageMetadata(offsets, torch.Size(part.box.shape)))
    return pickle.dumps(Metadata(tensors, storage_data=storage, version=CURRENT_DCP_VERSION))


def read_metadata(data: bytes, manifest: Manifest) -> Metadata:
    """DCP's metadata from its pickle; `ForeignError` where it holds, names or points at anything but `manifest`'s."""
    fields = _fields(read_pickle(data, _NAMES), "Metadata")
    # Filled by DCP only when it flattens nested state; ours is flat.
    if fields.get("planner_data") is not None or fields.get("storage_meta") is not None:
        raise ForeignError("holds planner data, which surefoot never writes")
    storage = {
        _index(key): _storage_info(value, manifest) for key, value in _typed(fields.get("storage_data"), dict).items()
    }
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    num_chunks = 0
    for name, value in _typed(fields.get("state_dict_metadata"), dict).items():
        tensor = _tensor(value, len(storage) - num_chunks)
        num_chunks += len(tensor.chunks)
        tensors[_typed(name, str)] = tensor
    metadata = Metadata(tensors, storage_data=storage)
    _check_against(metadata, manifest)
    _check_disjoint(storage.values())
    return metadata


def tensor_metadata(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """The layout of every tensor; DCP's type also allows pickled objects, which `read_metadata` refuses."""
    return {
        name: value for name, value in metadata.state_dict_metadata.items() if isinstance(value, TensorStorageMetadata)
    }


def _fields(value: object, kind: str) -> Mapping[str, Any]:
    return _typed(_built(value, kind).state, dict)


def _built(value: object, kind: str) -> Built:
    if type(value) is not Built or value.of.name != kind:
        raise ForeignError(f"holds a {_kind(value)} where a {kind} belongs")
    return value


def _tensor(value: object, max_chunks: int) -> TensorStorageMetadata:
    if type(value) is Built and value.of.name == "BytesStorageMetadata":
        raise ForeignError("holds a pickled object beside the tensors, which is never loaded")
    fields = _fields(value, "TensorStorageMetadata")
    state = _typed(_built(fields.get("properties"), "TensorProperties").state, tuple)
    if len(state) != 5 or _built(state[1], "_get_layout").arguments != ("torch.strided",):
        raise ForeignError("describes a tensor that is not dense")
    dtype = _typed(state[0], Name).name
    if dtype not in DTYPES:
        raise ForeignError("describes a tensor of no known dtype")
    chunks = _typed(fields.get("chunks"), list)
    if len(chunks) > max_chunks:
        raise ForeignError("describes more parts of tensors than it says the place of")
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=DTYPES[dtype], layout=torch.strided),
        size=_size(fields.get("size")),
        chunks=[_chunk(chunk) for chunk in chunks],
    )


def _chunk(value: object) -> ChunkStorageMetadata:
    fields = _fields(value, "ChunkStorageMetadata")
    return ChunkStorageMetadata(offsets=_size(fields.get("offsets")), sizes=_size(fields.get("sizes")))


def _index(value: object) -> MetadataIndex:
    fields = _fields(value, "MetadataIndex")
    index = fields.get("index")
    return MetadataIndex(
        _typed(fields.get("fqn"), str),
        None if fields.get("offset") is None else _size(fields["offset"]),
        None if index is None else _count(index),
    )


def _storage_info(value: object, manifest: Manifest) -> _StorageInfo:
    fields = _fields(value, "_StorageInfo")
    name = _typed(fields.get("relative_path"), str)
    if name not in manifest.files:
        raise ForeignError(f"points at {name!a:.120}, which is not a file of the checkpoint")
    if fields.get("transform_descriptors"):
        raise ForeignError("asks for a transformation of its files, which surefoot never writes")
    offset, length = _count(fields.get("offset")), _count(fields.get("length"))
    if offset + length > manifest.files[name].bytes:
        raise ForeignError(f"points beyond the end of {name!a:.120}")
    return _StorageInfo(name, offset, length)


def _check_against(metadata: Metadata, manifest: Manifest) -> None:
    """The layout describes exactly the manifest's tensors, each made of chunks that are there and big enough."""
    described = tensor_metadata(metadata)
    found = {
        name: TensorRecord(tuple(tensor.size), str(tensor.properties.dtype).removeprefix("torch."))
        for name, tensor in described.items()
    }
    if found != dict(manifest.tensors):
        raise ForeignError("describes other tensors than the manifest")
    for name, tensor in described.items():
        for chunk in tensor.chunks:
            info = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            # DCP never saves less than the elements themselves, so no file can claim more memory than it is long.
            if info is None or info.length < math.prod(chunk.sizes) * tensor.properties.dtype.itemsize:
                raise ForeignError(f"does not say where a part of {name!a:.120} lies")
        if not _make_up(tensor.chunks, tensor.size):
            raise ForeignError(f"describes parts of {name!a:.120} that do not make up the whole")


def _make_up(chunks: list[ChunkStorageMetadata], whole: torch.Size) -> bool:
    """Whether parts tile the whole as a grid, which is how every layout over a mesh of ranks cuts a tensor."""
    if any(not len(chunk.offsets) == len(chunk.sizes) == len(whole) for chunk in chunks):
        return False
    if 0 in whole:
        return all(
            offset + size <= end
            for chunk in chunks
            for offset, size, end in zip(chunk.offsets, chunk.sizes, whole, strict=True)
        )
    parts = [chunk for chunk in chunks if 0 not in chunk.sizes]
    cuts = [sorted({part.offsets[dim] for part in parts}) for dim in range(len(whole))]
    ends = [dict(pairwise([*starts, end])) for starts, end in zip(cuts, whole, strict=True)]
    return (
        len(parts) == len({part.offsets for part in parts}) == math.prod(len(starts) for starts in cuts)
        and all(starts[:1] == [0] for starts in cuts)
        and all(
            offset + size == ends[dim][offset]
            for part in parts
            for dim, (offset, size) in enumerate(zip(part.offsets, part.sizes, strict=True))
        )
    )


def _check_disjoint(storage: Iterable[_StorageInfo]) -> None:
    """No byte of a file stands for two parts, else a small file could fill any memory."""
    regions = sorted((info.relative_path, info.offset, info.length) for info in storage)
    for (file, offset, length), (next_file, next_offset, _) in pairwise(regions):
        if file == next_file and next_offset < offset + length:
            raise ForeignError(f"takes two tensors from the same bytes of {file!a:.120}")


def _size(value: object) -> torch.Size:
    arguments = _built(value, "Size").arguments
    sizes = _typed(arguments[0] if len(arguments) == 1 else None, tuple)
    if len(sizes) > _MAX_DIMS or math.prod(max(_count(size), 1) for size in sizes) >= 1 << 62:
        raise ForeignError("describes a tensor larger than any")
    return torch.Size(sizes)


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ForeignError("holds something else where a count belongs")
    return value


def _typed(value: object, kind: type[T]) -> T:
    if type(value) is not kind:
        raise ForeignError(f"holds a {_kind(value)} where a {kind.__name__} belongs")
    return value


def _kind(value: object) -> str:
    return type(value).__name__
