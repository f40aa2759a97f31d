"""One tensor as `torch.save` writes it: a zip of a small pickle and the elements; read as data.

`torch.load(weights_only=True)` runs no code, yet inflates whatever is compressed and allocates what the pickle asks for.
Here the elements are a view of the bytes at hand, so a tensor never takes more memory than its file.
"""

from __future__ import annotations

import sys
import warnings
import zipfile
from collections.abc import Container
from io import BytesIO

import torch
from torch import Tensor

from surefoot.checkpoint.inert import Built, ForeignError, Name, Stored, read_pickle

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
_UNTYPED = "torch.storage", "UntypedStorage"
# Which dtypes a checkpoint can hold: whole bytes, and a place in torch's own formats.
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in [
        *_STORAGES.values(),
        *(value for name, value in vars(torch).items() if name in ("uint16", "uint32", "uint64")),
        *(value for name, value in vars(torch).items() if name.startswith("float8_")),
    ]
    if isinstance(dtype, torch.dtype)
}
_NAMES: Container[tuple[str, str]] = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("collections", "OrderedDict"),
    _UNTYPED,
    *(("torch", name) for name in (*_STORAGES, *DTYPES)),
}


def read_tensor(data: bytes) -> Tensor:
    """The dense tensor in `data`, not to be written to: it is a view; `ForeignError` where it is anything else."""
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if bytes(_content(data, members["byteorder"])) != sys.byteorder.encode():
            raise ForeignError("holds numbers in another order of bytes")
        root = read_pickle(bytes(_content(data, members["data.pkl"])), _NAMES)
        dtype, key, offset, size, stride = _description(root)
        elements = _content(data, members[f"data/{key}"])
        if not elements:
            return torch.empty(size, dtype=dtype).as_strided(size, stride, offset)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(elements, dtype=dtype).as_strided(size, stride, offset)
    except ForeignError:
        raise
    except Exception as error:  # a broken archive raises almost anything
        raise ForeignError(f"is not a readable tensor ({type(error).__name__})") from None


def _content(data: bytes, member: zipfile.ZipInfo) -> memoryview:
    # Not `archive.read`: it copies, inflates, and wants checksums that torch can be told to leave out.
    start = member.header_offset
    header = data[start : start + 30]
    start += 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    if member.compress_type != zipfile.ZIP_STORED or start + member.file_size > len(data):
        raise ForeignError("is packed in a way that torch never uses")
    return memoryview(data)[start : start + member.file_size]


def _description(root: object) -> tuple[torch.dtype, str, int, tuple[int, ...], tuple[int, ...]]:
    """Dtype, key of the storage, offset, size and stride, as the pickle gives them."""
    if type(root) is not Built or not root.of.name.startswith("_rebuild_tensor_"):
        raise ForeignError("holds something other than a tensor")
    storage, offset, size, stride, _requires_grad, _hooks, *more = root.arguments
    if type(storage) is not Stored or type(storage.key) is not tuple:
        raise ForeignError("holds a tensor without elements")
    _storage, kind, key, _location, _count = storage.key
    if type(kind) is not Name or type(key) is not str:
        raise ForeignError("holds a tensor without elements")
    if root.of.name == "_rebuild_tensor_v2":
        dtype = _STORAGES[kind.name]
    else:
        name = more.pop(0)
        if type(name) is not Name or (kind.module, kind.name) != _UNTYPED:
            raise ForeignError("holds a tensor of no known type")
        dtype = DTYPES[name.name]
    if more:
        raise ForeignError("holds a tensor with more than elements")
    if (
        type(size) is not tuple
        or type(stride) is not tuple
        or any(type(n) is not int for n in (offset, *size, *stride))
    ):
        raise ForeignError("holds a tensor of no known shape")
    return dtype, key, offset, size, stride
