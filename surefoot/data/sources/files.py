"""A user's own files: text, JSON lines or Parquet, by path or glob."""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from surefoot.config import DataError
from surefoot.data.source import Document, Source, SourceConfig, SourceName, check_text, read_bytes

Format = Literal["text", "jsonl", "parquet"]
_BY_SUFFIX: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


class FilesConfig(SourceConfig):
    """Files as documents: a text file is one document, a line of JSON or a row of Parquet is one document each."""

    name: SourceName = "files"
    paths: tuple[str, ...] = Field(min_length=1, description="paths or globs; ** matches any depth")
    format: Literal["auto", "text", "jsonl", "parquet"] = Field(
        default="auto", description="auto: by suffix, else text"
    )
    field: str = Field(default="text", min_length=1, description="the key or column that holds the text")
    separator: str | None = Field(
        default=None, min_length=1, description="cuts a text file into documents, e.g. \\n\\n"
    )

    def build(self) -> FilesSource:
        """Raises `DataError` naming a path or glob that matches no file."""
        found: set[Path] = set()
        for pattern in self.paths:
            expanded = Path(pattern).expanduser()
            if expanded.is_dir():
                raise DataError(f"{pattern}: is a directory; name its files, for example {expanded / '**' / '*.txt'}")
            matches = [expanded] if expanded.is_file() else map(Path, glob.glob(str(expanded), recursive=True))  # noqa: PTH207
            files = {path.absolute() for path in matches if path.is_file()}
            if not files:
                raise DataError(f"{pattern}: there is no such file; check {self.name}'s paths")
            found |= files
        # Names relative to what all paths share: unique, and the same wherever the folder is moved.
        root = os.path.commonpath([path.parent for path in found])
        named = sorted((path.relative_to(root).as_posix(), path) for path in found)
        formats: list[Format] = [self._format_of(path) for _, path in named]
        return FilesSource(self.name, named, formats, field=self.field, separator=self.separator)

    def _format_of(self, path: Path) -> Format:
        return _BY_SUFFIX.get(path.suffix.lower(), "text") if self.format == "auto" else self.format


class FilesSource(Source):
    """Documents of `files` (name, path) in order of name, then of line or row. Line and row numbers count from 1."""

    def __init__(
        self,
        name: str,
        files: Sequence[tuple[str, Path]],
        formats: Sequence[Format],
        *,
        field: str,
        separator: str | None,
    ) -> None:
        super().__init__(name)
        self._files, self._formats = list(files), list(formats)
        self._field, self._separator = field, separator
        self._digest: tuple[str, int] | None = None

    def read(self, start: int = 0) -> Iterator[Document]:
        return itertools.islice(self._read_all(), start, None)

    def _read_all(self) -> Iterator[Document]:
        for (name, path), format_ in zip(self._files, self._formats, strict=True):
            if format_ == "text":
                yield from self._read_text(name, path)
            elif format_ == "jsonl":
                yield from self._read_jsonl(name, path)
            else:
                yield from self._read_parquet(name, path)

    def fingerprint(self) -> str:
        return self._measure()[0]

    def facts(self) -> dict[str, Any]:
        sha256, num_bytes = self._measure()
        return {"name": self.name, "sha256": sha256, "files": len(self._files), "bytes": num_bytes}

    def _measure(self) -> tuple[str, int]:
        """Hash of the files as they lie on disk, and of how they are read."""
        if self._digest is None:
            digest, num_bytes = hashlib.sha256(repr((self._field, self._separator)).encode()), 0
            for (name, path), format_ in zip(self._files, self._formats, strict=True):
                try:
                    with path.open("rb") as file:
                        content = hashlib.file_digest(file, "sha256").hexdigest()
                    num_bytes += path.stat().st_size
                except OSError as error:
                    raise _unreadable(path, error) from None
                digest.update(repr((name, format_, content)).encode())
            self._digest = digest.hexdigest(), num_bytes
        return self._digest

    def _read_text(self, name: str, path: Path) -> Iterator[Document]:
        text = check_text(read_bytes(path), str(path))
        if not text.strip():
            raise DataError(f"{path}: is empty; put text in it or leave it out")
        if self._separator is None:
            yield Document(name, text)
            return
        parts = text.split(self._separator.encode())
        yield from (Document(f"{name}:{number}", part) for number, part in enumerate(parts, 1) if part.strip())

    def _read_jsonl(self, name: str, path: Path) -> Iterator[Document]:
        is_empty = True
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        is_empty = False
                        yield Document(f"{name}:{number}", self._parse_line(line, f"{path}:{number}"))
        except OSError as error:
            raise _unreadable(path, error) from None
        if is_empty:
            raise DataError(f"{path}: is empty; put one JSON object a line in it or leave it out")

    def _parse_line(self, line: bytes, where: str) -> bytes:
        try:
            row = json.loads(check_text(line, where))
        except (json.JSONDecodeError, RecursionError) as error:
            cause = "" if line.endswith(b"\n") else ", and the file ends in the middle of this line"
            raise DataError(f"{where}: is not JSON ({error}){cause}; repair or remove the line") from None
        if not isinstance(row, dict) or self._field not in row:
            keys = f"its keys are {', '.join(map(str, row))}" if isinstance(row, dict) else "it is not an object"
            raise DataError(f"{where}: has no field {self._field!r}; {keys}; set `field` to the one with the text")
        return self._encode(row[self._field], where)

    def _encode(self, value: object, where: str) -> bytes:
        if not isinstance(value, str):
            raise DataError(f"{where}: field {self._field!r} holds {value!r:.60}, not text; repair or remove it")
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: character {error.start} of field {self._field!r} is half a surrogate pair; "
                "repair or remove it"
            ) from None

    def _read_parquet(self, name: str, path: Path) -> Iterator[Document]:
        from pyarrow import ArrowException, parquet  # noqa: PLC0415 (0.2 s that no other source should pay)

        try:
            file = parquet.ParquetFile(path)
            columns = file.schema_arrow.names
            if self._field not in columns:
                raise DataError(
                    f"{path}: has no column {self._field!r}; it has {', '.join(columns)}; "
                    "set `field` to the one with the text"
                )
            if not file.metadata.num_rows:
                raise DataError(f"{path}: is empty; leave it out")
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=[self._field]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield Document(f"{name}:{number}", self._encode(value, f"{path}: row {number}"))
        except (ArrowException, OSError, UnicodeDecodeError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"{path}: is not a whole Parquet file ({reason}); write or fetch it again") from None


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions")
