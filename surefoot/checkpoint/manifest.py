"""The manifest: the file written last, which says what a whole checkpoint consists of.

    step-00000500/
    ├── manifest.json   format, step, every other file's length and sha256, every tensor's shape and dtype, a seal
    ├── state.json      the run's plain state
    ├── .metadata       DCP's layout (a pickle; see `metadata.py`)
    └── __0_0.distcp    DCP's tensors, a file for each rank that wrote some (__1_0.distcp, …)

The seal is the sha256 of the manifest's own text, so that no byte of a checkpoint can change unseen. It guards against
accidents, not against malice: whoever makes a file can seal it. Nothing a manifest says is trusted to be harmless.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from surefoot.config import CheckpointError

FORMAT = 1
MANIFEST, STATE, METADATA = "manifest.json", "state.json", ".metadata"
DAMAGED = "is damaged; delete it, or copy it again from where it came"

_MAX_MANIFEST_BYTES = 1 << 28
_STEP = re.compile(r"step-(\d{8,})(~?)")


@dataclass(frozen=True)
class FileRecord:
    """Length and hash of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class TensorRecord:
    """Logical shape and dtype ("float32") of one tensor."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of: files by plain name, tensors by logical name."""

    step: int
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]

    def text(self) -> str:
        """The only text that stands for this manifest."""
        content: dict[str, Any] = {
            "format": FORMAT,
            "step": self.step,
            "files": {name: asdict(record) for name, record in self.files.items()},
            "tensors": {name: {"shape": list(r.shape), "dtype": r.dtype} for name, r in self.tensors.items()},
        }
        return _canonical(content | {"seal": hashlib.sha256(_canonical(content).encode()).hexdigest()})


def step_name(step: int) -> str:
    """The directory name of a step's checkpoint."""
    return f"step-{step:08d}"


def named_step(path: Path) -> int | None:
    """The step whose checkpoint a path's name claims to be; None for other names."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match and path.name.rstrip("~") == step_name(int(match[1])) else None


def candidates(folder: Path) -> list[tuple[int, Path]]:
    """Everything in `folder` that bears a checkpoint's name, newest first, a replaced one ("~") after its successor."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        step = named_step(path)
        if step is not None:
            found.append((step, path))
    return sorted(found, key=lambda item: (-item[0], item[1].name))


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading; `OSError` where it is a link, a pipe or anything else that leads elsewhere."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint, checked against its seal; `CheckpointError` where there is none to rely on."""
    file = directory / MANIFEST
    try:
        with open_regular(file) as stream:
            data = stream.read(_MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        raise CheckpointError(f"{directory}: is not a whole checkpoint (no {MANIFEST}); name one that is") from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({reason(error)}); the checkpoint {DAMAGED}") from None
    try:
        return _parse(data)
    except _UnknownFormatError as error:
        raise CheckpointError(
            f"{file}: has format {error}, this surefoot reads format {FORMAT}; use the version that wrote it"
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: {_one_line(error)}; it {DAMAGED}") from None


def check_lengths(directory: Path, manifest: Manifest, names: Iterable[str] | None = None) -> None:
    """`CheckpointError` unless every file, or those of `names`, is a regular file and as long as the manifest says."""
    for name in manifest.files if names is None else names:
        record, file = manifest.files[name], directory / name
        try:
            status = file.lstat()
        except OSError as error:
            raise CheckpointError(f"{file}: is missing ({reason(error)}); the checkpoint {DAMAGED}") from None
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{file}: is a link or no file at all; the checkpoint {DAMAGED}")
        if status.st_size != record.bytes:
            raise CheckpointError(f"{file}: has {status.st_size} bytes instead of {record.bytes}; it {DAMAGED}")


def check_hashes(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """`CheckpointError` unless the files of `names` hold the bytes that were saved."""
    names = tuple(names)
    check_lengths(directory, manifest, names)
    for name in names:
        file = directory / name
        try:
            with open_regular(file) as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read ({reason(error)}); the checkpoint {DAMAGED}") from None
        _check_hash(file, found, manifest)


def read_checked(directory: Path, manifest: Manifest, name: str) -> bytes:
    """The content of a small file, which is what was saved; else `CheckpointError`."""
    file = directory / name
    check_lengths(directory, manifest, (name,))
    try:
        with open_regular(file) as stream:
            data = stream.read()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({reason(error)}); the checkpoint {DAMAGED}") from None
    _check_hash(file, hashlib.sha256(data).hexdigest(), manifest)
    return data


def _check_hash(file: Path, found: str, manifest: Manifest) -> None:
    wanted = manifest.files[file.name].sha256
    if found != wanted:
        raise CheckpointError(f"{file}: has sha256 {found[:12]}… instead of {wanted[:12]}…; it {DAMAGED}")


def reason(error: OSError) -> str:
    """What went wrong, in the system's words."""
    return error.strerror or type(error).__name__


class _UnknownFormatError(Exception):
    """The manifest of another version."""


def _parse(data: bytes) -> Manifest:
    content = json.loads(data.decode(), parse_constant=_refuse_constant)
    if not isinstance(content, dict):
        raise TypeError("is not an object")
    if content.get("format") != FORMAT:
        if isinstance(content.get("format"), int):
            raise _UnknownFormatError(f"{content['format']!s:.20}")
        raise ValueError("names no format")
    manifest = Manifest(
        step=_count(content["step"]),
        files={_plain_name(name): _file_record(record) for name, record in content["files"].items()},
        tensors={name: _tensor_record(record) for name, record in content["tensors"].items()},
    )
    if data.decode() != manifest.text():
        raise ValueError("does not match its seal")
    if not {STATE, METADATA} <= manifest.files.keys() or MANIFEST in manifest.files:
        raise ValueError("does not list the files of a checkpoint")
    return manifest


def _file_record(record: dict[str, Any]) -> FileRecord:
    if not isinstance(record["sha256"], str):
        raise TypeError("holds a sha256 that is no text")
    return FileRecord(_count(record["bytes"]), record["sha256"])


def _tensor_record(record: dict[str, Any]) -> TensorRecord:
    if not isinstance(record["dtype"], str):
        raise TypeError("holds a dtype that is no text")
    return TensorRecord(tuple(_count(size) for size in record["shape"]), record["dtype"])


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"holds {value!r} where a count belongs")
    return value


def _plain_name(name: str) -> str:
    """A name that cannot lead out of the directory: no separator, no `..`, nothing but itself."""
    if not name or name in (".", "..") or not name.isprintable() or any(mark in name for mark in "/\\:"):
        raise ValueError(f"lists {name!r}, which is not the name of a file in the checkpoint's directory")
    return name


def _canonical(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def _refuse_constant(name: str) -> float:
    raise ValueError(f"holds {name}")


def _one_line(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return "is not whole JSON"
    if isinstance(error, KeyError):
        return f"lacks {error.args[0]!r}"
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
