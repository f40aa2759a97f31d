import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surefoot.config import DataError
from surefoot.data.cache import cache_directory, entry, open_entry
from surefoot.data.shards import Shards, open_shards, split_of, training_texts
from surefoot.data.source import Document, Source
from surefoot.data.tokenizer import Ids
from surefoot.data.tokenizers.bpe import BPEConfig
from surefoot.data.tokenizers.bytes import BytesConfig, BytesTokenizer


class Given(Source):
    """Documents in hand."""

    def __init__(self, texts: dict[str, str] | Sequence[tuple[str, str]], name: str = "given") -> None:
        super().__init__(name)
        self.texts = list(texts.items()) if isinstance(texts, dict) else list(texts)

    def read(self, start: int = 0) -> Iterator[Document]:
        yield from (Document(name, text.encode()) for name, text in self.texts[start:])

    def fingerprint(self) -> str:
        return repr(self.texts)

    def facts(self) -> dict[str, Any]:
        return {"name": self.name}


TEXTS = {f"file {n}\n\udcff/é": "text é " * (n % 7) + str(n) for n in range(60)}


def make(cache: Path, source: Source | None = None, fraction: float = 0.3) -> Shards:
    return open_shards(source or Given(TEXTS), BytesConfig().build(), fraction, cache)


def only_entry(cache: Path) -> Path:
    [directory] = [path for path in (cache / "shards").iterdir() if path.is_dir()]
    return directory


def test_documents_come_back_between_separators(cache: Path) -> None:
    shards, tokenizer = make(cache), BytesConfig().build()
    found = {}
    for split in shards.splits.values():
        for index, end in enumerate(split.ends):
            ids = split.ids[split.ends[index - 1] if index else 0 : end]
            assert ids[0] == ids[-1] == tokenizer.document
            found[split.names[index]] = tokenizer.decode(ids[1:-1])
    assert found == TEXTS
    assert shards.num_bytes == shards.counted_bytes == sum(len(text.encode()) for text in TEXTS.values())
    assert shards.splits["train"].names[:2] == [shards.splits["train"].names[0], shards.splits["train"].names[1]]


def test_the_split_depends_on_the_name_alone(cache: Path) -> None:
    shards = make(cache)
    for split, content in shards.splits.items():
        assert {split_of(name, 0.3) for name in content.names} == {split}
    fewer = make(cache, Given({name: text + "!" for name, text in list(TEXTS.items())[::2]}))
    assert set(fewer.splits["train"].names) <= set(shards.splits["train"].names)
    held = np.mean([split_of(f"name {n}", 0.05) == "heldout" for n in range(20_000)])
    assert abs(held - 0.05) < 0.006
    assert {split_of(f"name {n}", 0.0) for n in range(100)} == {"train"}


def test_tokenised_once(cache: Path) -> None:
    said: list[str] = []
    first = open_shards(Given(TEXTS), BytesConfig().build(), 0.3, cache, said.append)
    again = open_shards(Given(TEXTS), BytesConfig().build(), 0.3, cache, said.append)
    assert len(said) == 1
    assert "given: tokenising" in said[0]
    assert np.array_equal(first.splits["train"].ids, again.splits["train"].ids)
    assert isinstance(again.splits["train"].ids, np.memmap)
    assert not again.splits["train"].ids.flags.writeable


def test_another_text_tokenizer_or_fraction_is_another_entry(cache: Path) -> None:
    make(cache)
    make(cache, Given({"a": "b"}))
    make(cache, fraction=0.2)
    open_shards(Given(TEXTS), BPEConfig(vocab_size=300).build(TEXTS.values()), 0.3, cache)
    assert len([path for path in (cache / "shards").iterdir() if path.is_dir()]) == 4


def test_the_manifest_says_what_is_needed_to_refuse(cache: Path) -> None:
    make(cache)
    manifest = json.loads((only_entry(cache) / "manifest.json").read_text())
    assert (manifest["dtype"], manifest["vocab_size"], manifest["document"]) == ("<u2", 257, 256)
    assert manifest["tokenizer"] == BytesConfig().build().fingerprint()
    assert {len(file["sha256"]) for file in manifest["files"].values()} == {64}


def test_empty_documents_are_left_out_and_counted(cache: Path) -> None:
    shards = make(cache, Given({"a": "x", "b": "", "c": "y"}), fraction=0.0)
    assert list(shards.splits["train"].names) == ["a", "c"]
    assert shards.manifest["num_empty_documents"] == 1
    assert len(shards.splits["heldout"].ids) == 0


@pytest.mark.parametrize("texts", [{}, {"a": ""}])
def test_no_text_at_all_is_refused(cache: Path, texts: dict[str, str]) -> None:
    with pytest.raises(DataError, match="given: has no text"):
        make(cache, Given(texts))
    assert [path for path in (cache / "shards").iterdir() if path.is_dir()] == []


def test_names_must_be_unique(cache: Path) -> None:
    with pytest.raises(DataError, match="two documents are named 'a'"):
        make(cache, Given([("a", "x"), ("b", "y"), ("a", "z")]))


class WrongIds(BytesTokenizer):
    """Ids that do not belong to its vocabulary, or to the text."""

    def __init__(self, id_: int) -> None:
        super().__init__()
        self.id_ = id_

    def encode_batch(self, texts: Sequence[bytes | str]) -> list[Ids]:
        return [np.array([1, self.id_], np.uint32) for _ in texts]


@pytest.mark.parametrize(
    ("id_", "words"), [(257, "id 257 and the vocabulary only 257"), (256, "holds the document separator")]
)
def test_ids_are_range_checked(cache: Path, id_: int, words: str) -> None:
    with pytest.raises(DataError, match=words):
        open_shards(Given({"a": "x"}), WrongIds(id_), 0.0, cache)


def test_large_vocabularies_take_four_bytes(cache: Path) -> None:
    tokenizer = BytesTokenizer()
    tokenizer.vocab_size = 1 << 17
    tokenizer.byte_lengths = lambda: np.ones(1 << 17)  # type: ignore[method-assign]
    shards = open_shards(Given({"a": "xyz"}), tokenizer, 0.0, cache)
    assert shards.splits["train"].ids.dtype == np.uint32
    assert shards.splits["train"].ids.tolist() == [256, *b"xyz", 256]


# -- damage ------------------------------------------------------------------------------------------------------------

FILES = [f"{split}.{kind}" for split in ("train", "heldout") for kind in ("ids", "ends", "names", "name-ends")]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "delete", "empty"])
def test_damage_is_named_and_nothing_is_changed(cache: Path, name: str, damage: str) -> None:
    make(cache)
    path = only_entry(cache) / name
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    changed = {"flip": bytes(content), "cut": bytes(content[:-1]), "grow": bytes(content) + b"x", "empty": b""}
    path.unlink() if damage == "delete" else path.write_bytes(changed[damage])
    with pytest.raises(DataError) as caught:
        make(cache)
    assert str(path) in str(caught.value)
    assert f"delete {path.parent}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert damage == "delete" or path.read_bytes() == changed[damage]


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 100},
        {"dtype": "<u4"},
        {"document": 3},
        {"tokenizer": "0" * 64},
        {"format": 1},
        {"splits": {}},
        {"splits": {"train": {"documents": "x", "ids": 1}, "heldout": {"documents": 0, "ids": 0}}},
        {"splits": {"train": {"documents": 1, "ids": 1}, "heldout": {"documents": 0, "ids": 0}}},
        {"num_bytes": None},
        {"source": "x"},
        {"files": {}},
        {"files": []},
        {"files": {"train.ids": 3}},
        {"files": {"train.ids": {"bytes": -1, "sha256": ""}}},
        {"files": {"../../secret": {"bytes": 6, "sha256": ""}}},
        {"files": {"/etc/passwd": {"bytes": 6, "sha256": ""}}},
        {"files": {"..": {"bytes": 6, "sha256": ""}}},
        {"files": {"a\\b": {"bytes": 6, "sha256": ""}}},
    ],
    ids=str,
)
def test_a_manifest_that_does_not_fit_is_refused(cache: Path, change: dict[str, Any]) -> None:
    make(cache)
    path = only_entry(cache) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match="so the cache is damaged; delete"):
        make(cache)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 99_999])
def test_a_broken_manifest_is_refused(cache: Path, content: bytes) -> None:
    make(cache)
    (only_entry(cache) / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match=r"manifest\.json: "):
        make(cache)


def test_a_manifest_without_one_of_the_files_is_refused(cache: Path) -> None:
    make(cache)
    path = only_entry(cache) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["files"]["train.ends"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"does not name train\.ends"):
        make(cache)


def test_a_link_out_of_the_directory_is_refused(cache: Path, tmp_path: Path) -> None:
    make(cache)
    path = only_entry(cache) / "train.ids"
    outside = tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(DataError, match="is a link"):
        make(cache)


# -- writers -----------------------------------------------------------------------------------------------------------


def test_a_failed_writer_leaves_nothing(tmp_path: Path) -> None:
    def write(staging: Path) -> dict[str, Any]:
        (staging / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match=r"No space left.*SUREFOOT_CACHE"):
        entry(tmp_path / "c" / "key", write)
    assert [path.name for path in (tmp_path / "c").iterdir()] == [".key.lock"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        entry(tmp_path / "file" / "c" / "key", lambda _: {})


KILLED = """
import sys, time, pathlib
from surefoot.data.cache import entry
def write(staging):
    (staging / "half").write_text("x")
    print("writing", flush=True)
    time.sleep(60)
entry(pathlib.Path(sys.argv[1]), write)
"""


def write_whole(staging: Path) -> dict[str, Any]:
    (staging / "whole").write_text("x")
    return {}


def test_a_killed_writer_leaves_no_entry_and_the_next_one_clears_up(tmp_path: Path) -> None:
    directory = tmp_path / "c" / "key"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(directory)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        os.kill(process.pid, signal.SIGKILL)
    assert not directory.exists()
    assert len([path for path in directory.parent.iterdir() if path.is_dir()]) == 1
    assert set(entry(directory, write_whole)["files"]) == {"whole"}
    assert sorted(path.name for path in directory.parent.iterdir()) == [".key.lock", "key"]


def test_writers_at_once_make_one_entry(tmp_path: Path) -> None:
    calls: list[int] = []

    def write(staging: Path) -> dict[str, Any]:
        calls.append(1)
        time.sleep(0.05)
        return write_whole(staging)

    results: list[dict[str, Any]] = []
    threads = [threading.Thread(target=lambda: results.append(entry(tmp_path / "key", write))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert results == [open_entry(tmp_path / "key")] * 6


def test_without_locks_the_first_to_publish_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_lock(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", no_lock)

    def write(staging: Path) -> dict[str, Any]:
        (staging / "whole").write_text("second")
        other = tmp_path / "other"
        other.mkdir()
        entry(other / "key", write_whole)
        (other / "key").rename(tmp_path / "key")
        return {}

    assert entry(tmp_path / "key", write)["files"]["whole"]["bytes"] == 1
    assert [path for path in tmp_path.glob(".key.*") if path.is_dir()] == []


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "cache"
    monkeypatch.delenv("SUREFOOT_CACHE")
    assert cache_directory() == tmp_path / "xdg" / "surefoot"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == tmp_path / ".cache" / "surefoot"


# -- what a tokenizer learns from --------------------------------------------------------------------------------------


def test_a_tokenizer_never_sees_heldout_text() -> None:
    texts = list(training_texts([Given({name: name for name in map(str, range(500))})], 0.3, 1 << 20))
    assert 300 < len(texts) < 400
    assert {split_of(text, 0.3) for text in texts} == {"train"}


def test_a_tokenizer_reads_a_bounded_part_of_each_source() -> None:
    sources: list[Source] = [Given({f"{n}": "x" * 100 for n in range(50)}, name) for name in ("a", "b")]
    assert len(list(training_texts(sources, 0.0, 950))) == 20
