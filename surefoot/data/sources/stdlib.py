"""The source code of Python's standard library on this machine: real text without a download."""

from __future__ import annotations

import os
import platform
import sysconfig
from pathlib import Path

from surefoot.config import DataError
from surefoot.data.source import SourceConfig, SourceName, TextTree, read_bytes

# Tests repeat themselves and hold odd bytes on purpose; `encodings` is tables and `pydoc_data` one generated page of prose,
# so large that it alone was two thirds of a held-out split; the others are not the library.
_DROPPED = {
    "test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__",
}  # fmt: skip


class StdlibConfig(SourceConfig):
    """The modules of the running interpreter's standard library, one document a file."""

    name: SourceName = "stdlib"

    def build(self) -> TextTree:
        """Raises `DataError` on a Python that ships without the library's source."""
        root = Path(sysconfig.get_paths()["stdlib"])
        files = []
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in _DROPPED]  # site-packages may be large
            paths = [Path(folder, name) for name in names if name.endswith(".py")]
            files += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file() and _is_utf8(path)]
        if not files:
            raise DataError(f"{root}: this Python has no standard library source; use another source or another Python")
        return TextTree(self.name, files, {"python": platform.python_version()})


def _is_utf8(path: Path) -> bool:
    try:
        read_bytes(path).decode()
    except UnicodeDecodeError:
        return False
    return True
