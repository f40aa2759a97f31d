"""The cache directory: entries that appear whole or not at all, and are checked whenever they are opened."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from surefoot.config import DataError

MANIFEST = "manifest.json"

_QUICK_BYTES = 1 << 30
"""More than this takes over two seconds to hash, which a user should know."""


def cache_directory() -> Path:
    """`$SUREFOOT_CACHE`, else `$XDG_CACHE_HOME/surefoot`, else `~/.cache/surefoot`."""
    if chosen := os.environ.get("SUREFOOT_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "surefoot"


def entry(
    directory: Path, write: Callable[[Path], dict[str, Any]], announce: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """The manifest of a cache entry, which is written first where there is none.

    `write` fills an empty staging directory and returns what the manifest should say; length and sha256 of each file
    are added. The directory gets its name in one step, so a killed writer leaves nothing under it. Raises `DataError`.
    """
    try:
        if not directory.exists():
            directory.parent.mkdir(parents=True, exist_ok=True)
            with _only_writer(directory):
                if not directory.exists():  # another process may have written it while this one waited
                    _publish(directory, write)
    except OSError as error:
        raise DataError(
            f"{directory.parent}: cannot be written ({error.strerror}); free space there, or set SUREFOOT_CACHE to a "
            "directory that can be written"
        ) from None
    size = sum(path.lstat().st_size for path in directory.iterdir()) if directory.is_dir() else 0
    if size > _QUICK_BYTES:
        announce(f"verifying {size / 1e9:.1f} GB in {directory}")
    return open_entry(directory)


def open_entry(directory: Path) -> dict[str, Any]:
    """The manifest of an existing entry, after every file's length and sha256 agreed with it."""
    manifest = _read_manifest(directory)
    files = manifest.get("files")
    if not isinstance(files, dict) or not files:
        raise damaged(directory / MANIFEST, "names no files")
    for name, expected in files.items():
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name or "\\" in name:
            raise damaged(directory / MANIFEST, f"names {name!r}, which is not a plain file name")
        path = directory / name
        try:
            if path.is_symlink():
                raise damaged(path, "is a link out of its directory")
            actual = describe(path)
        except OSError as error:
            raise damaged(path, f"cannot be read ({error.strerror})") from None
        if not isinstance(expected, dict) or actual["bytes"] != expected.get("bytes"):
            wanted = expected.get("bytes") if isinstance(expected, dict) else expected
            raise damaged(path, f"has {actual['bytes']} bytes and its manifest says {wanted}")
        if actual["sha256"] != expected.get("sha256"):
            raise damaged(path, "has another sha256 than its manifest says")
    return manifest


def damaged(path: Path, what: str) -> DataError:
    """A refusal that names the file and what to delete. Nothing is rebuilt unasked: the cause may be a failing disk."""
    return DataError(f"{path}: {what}, so the cache is damaged; delete {path.parent} and it is made again")


def describe(path: Path) -> dict[str, Any]:
    """Length and sha256 of a file, as a manifest holds them."""
    with path.open("rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _publish(directory: Path, write: Callable[[Path], dict[str, Any]]) -> None:
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        manifest = write(staging)
        manifest["files"] = {path.name: describe(path) for path in sorted(staging.iterdir())}
        (staging / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        for path in staging.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        staging.chmod(0o755)  # mkdtemp's 0700 would keep a shared cache to one user
        with contextlib.suppress(OSError):  # on a file system without locks another process may have published first
            staging.replace(directory)
        if not directory.exists():
            raise OSError(0, f"{staging} could not be renamed to {directory.name}")
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def _only_writer(directory: Path) -> Iterator[None]:
    """Hold the entry's lock, and clear away what a writer that was killed left behind."""
    with (directory.parent / f".{directory.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: writers may do the same work twice, but publish whole entries
            yield
            return
        for abandoned in directory.parent.glob(f".{directory.name}.*"):
            if abandoned.is_dir():
                shutil.rmtree(abandoned, ignore_errors=True)
        yield


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise damaged(path, f"cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise damaged(path, "is not complete JSON") from None
    if not isinstance(manifest, dict):
        raise damaged(path, "is not a manifest")
    return manifest
