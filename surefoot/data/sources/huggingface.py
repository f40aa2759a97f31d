"""Datasets of the Hugging Face hub or of a folder in its format; needs the extra `hf`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from pydantic import Field

from surefoot.config import DataError
from surefoot.data.source import Document, Source, SourceConfig, SourceName

_BATCH_ROWS = 1000
"""Rows fetched at once: one by one costs more than tokenising them."""


class HuggingFaceConfig(SourceConfig):
    """One split of a dataset, one document a row. Pin `revision` for a run that can be repeated."""

    name: SourceName = "huggingface"
    dataset: str = Field(min_length=1, description="name on the hub, or a local folder")
    subset: str | None = Field(default=None, description="the dataset's configuration")
    split: str = "train"
    field: str = Field(default="text", min_length=1, description="the column that holds the text")
    revision: str | None = Field(default=None, description="commit, tag or branch of the dataset")

    def build(self) -> HuggingFaceSource:
        """Downloads where needed. Raises `DataError` where the extra, the dataset or the column is missing."""
        try:
            import datasets  # noqa: PLC0415 (optional)
        except ImportError:
            raise DataError(
                f"{self.name}: Hugging Face datasets are not installed; install them with: pip install 'surefoot[hf]'"
            ) from None
        try:
            rows = datasets.load_dataset(self.dataset, self.subset, split=self.split, revision=self.revision)
        except (
            Exception
        ) as error:  # the library and the hub raise dozens of kinds; the user needs the name and the reason
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(
                f"{self.name}: dataset {self.dataset!r} cannot be loaded ({reason}); "
                "check dataset, subset, split and network"
            ) from None
        if self.field not in rows.column_names:
            raise DataError(
                f"{self.name}: {self.dataset!r} has no column {self.field!r}; it has {', '.join(rows.column_names)}"
            )
        return HuggingFaceSource(self, rows)


class HuggingFaceSource(Source):
    """Rows of a map-style dataset, named `split/row`."""

    def __init__(self, config: HuggingFaceConfig, rows: Any) -> None:
        super().__init__(config.name)
        self._config, self._rows = config, rows

    def read(self, start: int = 0) -> Iterator[Document]:
        config = self._config
        column = self._rows.select_columns([config.field])
        column = column.select(range(start, len(column))) if start else column
        row = start
        for rows in column.iter(batch_size=_BATCH_ROWS):
            for value in rows[config.field]:
                if not isinstance(value, str):
                    raise DataError(
                        f"{config.dataset}: row {row}: column {config.field!r} holds {value!r:.60}, not text"
                    )
                yield Document(f"{config.split}/{row}", value.encode())
                row += 1

    def fingerprint(self) -> str:
        config = self._config
        identity = (config.dataset, config.subset, config.split, config.field, self._content())
        return hashlib.sha256(repr(identity).encode()).hexdigest()

    def facts(self) -> dict[str, Any]:
        config = self._config
        return {
            "name": self.name,
            "dataset": config.dataset,
            "subset": config.subset,
            "split": config.split,
            "revision": config.revision,
            "sha256": self.fingerprint(),
            "documents": len(self._rows),
        }

    def _content(self) -> str:
        # The library's own content hash: reading a large dataset only to hash it would take as long as tokenising it.
        return f"{self._rows._fingerprint} {len(self._rows)}"
