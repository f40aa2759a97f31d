"""DCP's `.metadata` is a pickle: here it is read so that nothing in it can run.

The unpickler knows a short list of names and hands out a throw-away stand-in for each, never the class itself; a pickle
can call and alter nothing else. What it built is then copied, field by field and type by type, into real DCP metadata.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from surefoot.checkpoint.manifest import Manifest, TensorRecord

T = TypeVar("T")

_DCP = "torch.distributed.checkpoint.metadata"
# Where DCP of torch 2.11 to 2.15 keeps the classes that stand in a file of ours.
_RECORDS = {
    (_DCP, "Metadata"),
    (_DCP, "TensorStorageMetadata"),
    (_DCP, "BytesStorageMetadata"),
    (_DCP, "ChunkStorageMetadata"),
    (_DCP, "TensorProperties"),
    (_DCP, "MetadataIndex"),
    (_DCP, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class ForeignError(Exception):
    """The text says what in the metadata is not what DCP writes for tensors."""


def read_metadata(data: bytes, manifest: Manifest) -> Metadata:
    """DCP's metadata from its pickle; `ForeignError` where it holds, names or points at anything but `manifest`'s."""
    try:
        root = _Unpickler(BytesIO(data)).load()
    except ForeignError:
        raise
    except Exception as error:  # a broken pickle raises almost anything
        raise ForeignError(f"is not readable as DCP metadata ({type(error).__name__})") from None
    fields = _fields(root, "Metadata")
    # Filled by DCP only when it flattens nested state; ours is flat.
    if fields.get("planner_data") is not None or fields.get("storage_meta") is not None:
        raise ForeignError("holds planner data, which surefoot never writes")
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        _typed(name, str): _tensor(value) for name, value in _typed(fields.get("state_dict_metadata"), dict).items()
    }
    storage = {}
    for key, value in _typed(fields.get("storage_data"), dict).items():
        index = _index(key)
        storage[index] = _storage_info(value, manifest)
    metadata = Metadata(tensors, storage_data=storage)
    _check_against(metadata, manifest)
    return metadata


def tensor_metadata(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """The layout of every tensor; DCP's type also allows pickled objects, which `read_metadata` refuses."""
    return {
        name: value for name, value in metadata.state_dict_metadata.items() if isinstance(value, TensorStorageMetadata)
    }


class _Unpickler(pickle.Unpickler):
    """An unpickler to which nothing exists but stand-ins for the names on the list."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file)
        self._stand_ins: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Callable[..., Any] | torch.dtype:
        """The stand-in for a name; `ForeignError` for a name that is not on the list."""
        if (module, name) in _RECORDS:
            return self._stand_ins.setdefault(name, type(name, (_Record,), {}))
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("torch.serialization", "_get_layout"):
            return str
        raise ForeignError(f"names {module}.{name!s:.80}, which is not part of a checkpoint".replace("\n", " "))


class _Record:
    """What a pickle may build: arguments and a state, both inert."""

    def __init__(self, *values: object) -> None:
        self.values = values
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


def _fields(value: object, kind: str) -> Mapping[str, Any]:
    if not isinstance(value, _Record) or type(value).__name__ != kind:
        raise ForeignError(f"holds a {_kind(value)} where a {kind} belongs")
    return _typed(getattr(value, "state", None), dict)


def _tensor(value: object) -> TensorStorageMetadata:
    if isinstance(value, _Record) and type(value).__name__ == "BytesStorageMetadata":
        raise ForeignError("holds a pickled object beside the tensors, which is never loaded")
    fields = _fields(value, "TensorStorageMetadata")
    properties = fields.get("properties")
    if not isinstance(properties, _Record) or type(properties).__name__ != "TensorProperties":
        raise ForeignError(f"holds a {_kind(properties)} where TensorProperties belong")
    state = _typed(getattr(properties, "state", None), tuple)
    if len(state) != 5 or state[1] != "torch.strided":
        raise ForeignError("describes a tensor that is not dense")
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=_typed(state[0], torch.dtype), layout=torch.strided),
        size=_size(fields.get("size")),
        chunks=[_chunk(chunk) for chunk in _typed(fields.get("chunks"), list)],
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
        raise ForeignError(f"points at {name[:120]!r}, which is not a file of the checkpoint")
    if fields.get("transform_descriptors"):
        raise ForeignError("asks for a transformation of its files, which surefoot never writes")
    offset, length = _count(fields.get("offset")), _count(fields.get("length"))
    if offset + length > manifest.files[name].bytes:
        raise ForeignError(f"points beyond the end of {name!r}")
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
        num_elements = 0
        for chunk in tensor.chunks:
            if not len(chunk.offsets) == len(chunk.sizes) == len(tensor.size) or any(
                offset + size > whole
                for offset, size, whole in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
            ):
                raise ForeignError(f"describes a part of {name!r} that lies outside it")
            info = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            # DCP never saves less than the elements themselves, so no file can claim more memory than it is long.
            if info is None or info.length < math.prod(chunk.sizes) * tensor.properties.dtype.itemsize:
                raise ForeignError(f"does not say where a part of {name!r} lies")
            num_elements += math.prod(chunk.sizes)
        if num_elements != math.prod(tensor.size):
            raise ForeignError(f"describes parts of {name!r} that do not make up the whole")


def _size(value: object) -> torch.Size:
    return torch.Size([_count(item) for item in _typed(value, tuple)])


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
