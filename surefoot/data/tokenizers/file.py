"""Any published `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import Field

from surefoot.data.tokenizer import TokenizerConfig
from surefoot.data.tokenizers.wrapped import WrappedTokenizer, load_tokenizer


class FileTokenizerConfig(TokenizerConfig):
    """A tokenizer.json of the `tokenizers` library, or the directory that holds one."""

    path: str = Field(min_length=1)
    document: str | None = Field(default=None, description="token that separates documents; found by name by default")
    pad: str | None = Field(default=None, description="padding token; found in the file by default, and may be absent")

    def build(self, texts: Iterable[str] = ()) -> WrappedTokenizer:  # noqa: ARG002 (already trained)
        """Raises `DataError` naming the file."""
        return load_tokenizer(Path(self.path).expanduser(), document=self.document, pad=self.pad)
