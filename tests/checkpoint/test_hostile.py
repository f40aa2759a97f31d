"""Files made by someone who means harm, hashed and sealed as they should be: nothing runs, nothing hangs, one line says no."""

from __future__ import annotations

import copyreg
import enum
import faulthandler
import functools
import io
import itertools
import json
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

from surefoot.checkpoint.archive import read_tensor
from surefoot.checkpoint.inert import ForeignError
from surefoot.checkpoint.load import open_checkpoint, read_tensors
from surefoot.checkpoint.manifest import MANIFEST, METADATA, FileRecord, Manifest, TensorRecord, read_manifest
from surefoot.config import CheckpointError
from tests.checkpoint.forging import (
    DATA,
    change_metadata,
    put,
    put_record,
    refusal,
    reseal,
    same,
    save_small,
    save_small_by_ranks,
    small,
)


class Gadget:
    """Unpickles to a call."""

    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


def archive_of(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def legacy(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


@pytest.fixture(autouse=True)
def end_hangs() -> Iterator[None]:
    """A test that hangs ends the run with a traceback, also where no signal handler gets to run."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(params=[save_small, save_small_by_ranks], ids=["one rank", "four ranks"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    made: Path = request.param(tmp_path / "run")
    return made


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """A file that must never be."""
    file = tmp_path / "executed"
    yield file
    assert not file.exists(), "code from a checkpoint was run"


def harmful(marker: Path) -> dict[str, bytes]:
    """Pickles that make the marker wherever an ordinary unpickler reads them."""
    touch = f"touch {marker}"
    text = f"S'{touch}'\n".encode()
    binary = b"\x8c" + bytes([len(touch)]) + touch.encode()
    system = b"\x8c\x05posix\x8c\x06system\x93"
    code = f"open({str(marker)!r}, 'w').close()"
    found = {
        f"reduce, protocol {protocol}": pickle.dumps(Gadget(os.system, touch), protocol) for protocol in range(6)
    } | {
        "inst": b"(" + text + b"iposix\nsystem\n.",
        "obj": b"(cposix\nsystem\n" + text + b"o.",
        "extension": b"\x80\x02\x82\x70" + b"(" + text + b"tR.",
        "newobj_ex": b"\x80\x04cfunctools\npartial\n(" + system + binary + b"t}\x92)R.",
        "partial with a state": b"\x80\x04cfunctools\npartial\n"
        + system
        + b"\x85R("
        + system
        + b"("
        + binary
        + b"t}Ntb)R.",
        "dotted name in a known module": b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.system\x93"
        + binary
        + b"\x85R.",
        "code object": pickle.dumps(Gadget(exec, code)),
        "eval": pickle.dumps(Gadget(eval, code)),
        "getattr": b"\x80\x04cbuiltins\ngetattr\ncposix\nsystem\n\x8c\x08__call__\x86R" + binary + b"\x85R.",
        "import": b"\x80\x04cbuiltins\n__import__\n\x8c\x02os\x85R.",
        "mkdir": pickle.dumps(Gadget(os.mkdir, str(marker))),
        "map": pickle.dumps(Gadget(list, Gadget(map, os.system, [touch]))),
        "torch.load of bytes": pickle.dumps(Gadget(torch.storage._load_from_bytes, legacy(Gadget(os.system, touch)))),
        "torch.save to a file": pickle.dumps(Gadget(torch.save, 1, str(marker))),
        "partial": pickle.dumps(Gadget(functools.partial, os.system, touch)),
        "persistent ids in persistent ids": pickle.dumps(0)[:2] + binary + b"QQQ.",
        "persistent id as text": b"Pcposix\nsystem\n.",
        "after another value": pickle.dumps(Gadget(list, ())) + pickle.dumps(Gadget(os.system, touch)),
        "popped again": b"cposix\nsystem\n" + text + b"\x85R0N.",
    }
    return found


@pytest.fixture
def extension() -> Iterator[None]:
    """os.system under a number, as a careless program may have registered it."""
    copyreg.add_extension("posix", "system", 0x70)
    yield
    copyreg.remove_extension("posix", "system", 0x70)
    copyreg.clear_extension_cache()


HARMFUL = list(harmful(Path("x")))
# These end in something harmless, or need an unpickler that resolves persistent ids.
HARMLESS_ALONE = {
    "import",
    "partial",
    "persistent ids in persistent ids",
    "persistent id as text",
    "after another value",
}


@pytest.mark.parametrize("name", HARMFUL)
def test_the_harmful_are_harmful(name: str, tmp_path: Path, extension: None) -> None:
    """An ordinary unpickler runs them: the tests below are about something."""
    file = tmp_path / "executed"
    if name not in HARMLESS_ALONE:
        pickle.loads(harmful(file)[name])
        assert file.exists()


@pytest.mark.parametrize("name", HARMFUL)
def test_metadata_that_calls_something(name: str, path: Path, marker: Path, extension: None) -> None:
    put(path, METADATA, harmful(marker)[name])
    assert METADATA in refusal(path)


@pytest.mark.parametrize("name", HARMFUL)
def test_tensor_files_that_call_something(name: str, path: Path, marker: Path, extension: None) -> None:
    data = harmful(marker)[name]
    put_record(path, "step", data + b"\0" * 100)
    assert DATA in refusal(path)
    archive = io.BytesIO()
    torch.save(torch.tensor(7), archive)
    put_record(path, "step", replaced(archive.getvalue(), "data.pkl", data))
    assert DATA in refusal(path)


def replaced(archive: bytes, member: str, content: bytes | None, compression: int = zipfile.ZIP_STORED) -> bytes:
    """A tensor's archive with one member replaced (or left out), written by Python."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            if info.filename.partition("/")[2] != member:
                new.writestr(info.filename, old.read(info))
            elif content is not None:
                new.writestr(info.filename, content, compression)
    return out.getvalue()


PLACES: dict[str, Callable[[Metadata, Any], object]] = {
    "planner data": lambda metadata, gadget: setattr(metadata, "planner_data", gadget),
    "storage meta": lambda metadata, gadget: setattr(metadata, "storage_meta", gadget),
    "version": lambda metadata, gadget: setattr(metadata, "version", gadget),
    "a tensor": lambda metadata, gadget: metadata.state_dict_metadata.update(step=gadget),
    "a tensor's name": lambda metadata, gadget: metadata.state_dict_metadata.update({gadget: 1}),
    "properties": lambda metadata, gadget: setattr(metadata.state_dict_metadata["step"], "properties", gadget),
    "a size": lambda metadata, gadget: setattr(metadata.state_dict_metadata["step"], "size", gadget),
    "chunks": lambda metadata, gadget: setattr(metadata.state_dict_metadata["step"], "chunks", [gadget]),
    "a path": lambda metadata, gadget: setattr(first_info(metadata), "relative_path", gadget),
    "transforms": lambda metadata, gadget: setattr(first_info(metadata), "transform_descriptors", [gadget]),
}


def first_info(metadata: Metadata) -> Any:
    return next(iter(metadata.storage_data.values()))


@pytest.mark.parametrize("place", PLACES)
def test_a_call_inside_metadata(place: str, path: Path, marker: Path) -> None:
    data = pickle.loads((path / METADATA).read_bytes())
    PLACES[place](data, Gadget(os.system, f"touch {marker}"))
    put(path, METADATA, pickle.dumps(data))
    assert "names 'posix.system'" in refusal(path)


def nested_pairs(count: int) -> bytes:
    """A tuple of 2**count leaves in a few bytes."""
    return b"N" + b"".join(b"\x94h" + bytes([number]) + b"\x86" for number in range(count))


LAYOUT = b"\x80\x04ctorch.serialization\n_get_layout\n"
BOMBS = {
    "pairs as a key": b"\x80\x04}" + nested_pairs(80) + b"Ns.",
    "pairs as one of many keys": b"\x80\x04}(" + nested_pairs(80) + b"Nu.",
    "pairs in a set": b"\x80\x04\x8f(" + nested_pairs(80) + b"\x90.",
    "pairs in a frozen set": b"\x80\x04(" + nested_pairs(80) + b"\x91.",
    "pairs made to text": LAYOUT + nested_pairs(80) + b"\x85R.",
    "a far place in the memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "a far place in the memo, as text": b"Np99999999999999999999\n.",
    "eight exabytes": b"\x80\x05\x8e" + struct.pack("<q", 1 << 62) + b".",
    "a text of 4 GB": b"\x80\x04X\xff\xff\xff\xff.",
    "a byte array": b"\x80\x04cbuiltins\nbytearray\n\x8a\x06\0\0\0\0\0\x10\x85R.",
    "a deep list": b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "a deep tuple": b"\x80\x04)" + b"\x85" * 200_000 + b".",
    "marks": b"\x80\x04" + b"(" * 200_000,
    "a list that holds itself": b"\x80\x04]\x94h\0a.",
    "a long number": b"\x80\x04\x8b\xff\xff\xff\x7f" + b"\x7f" * 1000 + b".",
    "a number as text": b"I" + b"9" * 1_000_000 + b"\n.",
    "nothing": b"",
    "only an end": b".",
    "an empty stack": b"\x80\x040.",
    "a taken mark": b"\x80\x04N(a.",
    "a name of newlines": b"\x80\x04\x8c\x03a\nb\x8c\x03c\nd\x93.",
    "a name of something else": b"\x80\x04NN\x93.",
    "state for a name": LAYOUT + b"}\x8c\x01ahsb.",
    "state for a size": b"\x80\x04ctorch\nSize\n}b.",
    "another version": b"\x80\xff.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_metadata_that_is_more_than_it_looks(name: str, path: Path) -> None:
    put(path, METADATA, BOMBS[name])
    assert METADATA in refusal(path)
    archive = io.BytesIO()
    torch.save(torch.tensor(7), archive)
    with pytest.raises(ForeignError):
        read_tensor(replaced(archive.getvalue(), "data.pkl", BOMBS[name]))


def chunk(offsets: list[int], sizes: list[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def set_chunks(*parts: tuple[list[int], list[int]]) -> Callable[[Metadata], None]:
    """Cut model/matrix, which is 3 by 5, into parts that all have their bytes."""

    def change(metadata: Metadata) -> None:
        matrix: Any = metadata.state_dict_metadata["model/matrix"]
        matrix.chunks = [chunk(*part) for part in parts]
        place = next(info for index, info in metadata.storage_data.items() if index.fqn == "model/matrix")
        for number, (offsets, _) in enumerate(parts):
            own = type(place)(place.relative_path, place.offset + number, place.length)
            metadata.storage_data[MetadataIndex("model/matrix", offsets)] = own

    return change


def set_info(**values: object) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for name, value in values.items():
            setattr(first_info(metadata), name, value)

    return change


def set_tensor(**values: object) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for name, value in values.items():
            setattr(metadata.state_dict_metadata["model/matrix"], name, value)

    return change


def swap_names(metadata: Metadata) -> None:
    tensors: Any = metadata.state_dict_metadata
    tensors["step"], tensors["model/half"] = tensors["model/half"], tensors["step"]


def share_bytes(metadata: Metadata) -> None:
    half, matrix = (
        next(info for index, info in metadata.storage_data.items() if index.fqn == name)
        for name in ("model/half", "model/matrix")
    )
    half.offset, half.length = matrix.offset, matrix.length


LIES: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "a path upwards": (set_info(relative_path="../other"), "is not a file of the checkpoint"),
    "an absolute path": (set_info(relative_path="/etc/passwd"), "is not a file of the checkpoint"),
    "the manifest": (set_info(relative_path=MANIFEST), "is not a file of the checkpoint"),
    "a long path of newlines": (set_info(relative_path="\n\x1b[2J" * 10_000), "is not a file of the checkpoint"),
    "an offset beyond the end": (set_info(offset=1 << 40), "points beyond the end"),
    "a length beyond the end": (set_info(length=1 << 40), "points beyond the end"),
    "a negative offset": (set_info(offset=-1), "where a count belongs"),
    "an offset that is a truth": (set_info(offset=True), "where a count belongs"),
    "an offset beyond any file": (set_info(offset=1 << 200), "where a count belongs"),
    "too few bytes": (set_info(length=3), "does not say where"),
    "transforms": (set_info(transform_descriptors=["zstd"]), "asks for a transformation"),
    "bytes of two tensors": (share_bytes, "from the same bytes"),
    "another shape": (set_tensor(size=torch.Size([5, 3])), "other tensors than the manifest"),
    "a shape of text": (set_tensor(size="35"), "where a Size belongs"),
    "an endless shape": (set_tensor(size=torch.Size([1] * 1000)), "larger than any"),
    "a pickled object": (
        lambda metadata: metadata.state_dict_metadata.update(step=BytesStorageMetadata()),
        "a pickled object beside the tensors",
    ),
    "one tensor less": (lambda metadata: metadata.state_dict_metadata.pop("step"), "other tensors than the manifest"),
    "swapped names": (swap_names, "other tensors than the manifest"),
    "no place": (lambda metadata: metadata.storage_data.clear(), "more parts of tensors than"),
    "no chunks": (set_tensor(chunks=[]), "do not make up the whole"),
    "one part": (set_chunks(([0, 0], [2, 5])), "do not make up the whole"),
    "a part beyond the end": (set_chunks(([0, 0], [4, 5])), "does not say where|do not make up"),
    "parts that overlap and leave a gap": (set_chunks(([0, 0], [2, 5]), ([1, 0], [1, 5])), "do not make up the whole"),
    "a grid with a hole": (
        set_chunks(([0, 0], [1, 3]), ([0, 3], [1, 2]), ([1, 0], [2, 3])),
        "do not make up the whole",
    ),
    "two parts of one place": (
        set_chunks(([0, 0], [1, 5]), ([0, 0], [2, 5])),
        "more parts of tensors than|do not make up the whole",
    ),
    "parts in a wheel": (
        set_chunks(([0, 0], [1, 4]), ([0, 4], [2, 1]), ([2, 1], [1, 4]), ([1, 0], [2, 1]), ([1, 1], [1, 3])),
        "do not make up the whole",
    ),
    "parts of too few dims": (set_chunks(([0], [15])), "do not make up the whole"),
    "a part of nothing": (set_chunks(([0, 0], [0, 5])), "do not make up the whole"),
    "a hundred thousand parts": (
        set_tensor(chunks=[chunk([0, 0], [3, 5])] * 100_000),
        "more parts of tensors than",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_metadata_that_lies(name: str, path: Path) -> None:
    change, text = LIES[name]
    change_metadata(path, change)
    with pytest.raises(CheckpointError, match=text):
        open_checkpoint(path)
    assert METADATA in refusal(path)


def test_files_of_ranks_that_are_swapped_or_left_out(tmp_path: Path) -> None:
    """Hashed and sealed as they lie."""
    path = save_small_by_ranks(tmp_path / "swapped")
    files = [path / f"__{rank}_0.distcp" for rank in range(4)]
    contents = [file.read_bytes() for file in files]
    for first, second in itertools.combinations(range(4), 2):
        put(path, files[first].name, contents[second])
        put(path, files[second].name, contents[first])
        refusal(path)
        put(path, files[first].name, contents[first])
        put(path, files[second].name, contents[second])
    assert read_tensors(open_checkpoint(path)).keys() == small().keys()
    files[2].unlink()
    reseal(path)
    assert "points at '__2_0.distcp', which is not a file of the checkpoint" in refusal(path)


def test_parts_that_make_up_the_whole_are_read(tmp_path: Path) -> None:
    """As a save of several ranks would lay them: a 2 by 2 grid of a 3 by 5 tensor, and an empty part."""
    path = save_small(tmp_path)
    matrix = read_tensors(open_checkpoint(path))["model/matrix"]
    file = path / DATA
    parts: list[tuple[list[int], list[int]]] = [
        ([0, 0], [2, 3]),
        ([0, 3], [2, 2]),
        ([2, 0], [1, 3]),
        ([2, 3], [1, 2]),
        ([3, 0], [0, 3]),
    ]
    places = []
    for (row, column), (height, width) in parts:
        stream = io.BytesIO()
        torch.save(matrix[row : row + height, column : column + width].clone(), stream)
        places.append((file.stat().st_size, len(stream.getvalue())))
        file.write_bytes(file.read_bytes() + stream.getvalue())

    def change(metadata: Metadata) -> None:
        described: Any = metadata.state_dict_metadata["model/matrix"]
        described.chunks = [chunk(*part) for part in parts]
        index, info = next((i, info) for i, info in metadata.storage_data.items() if i.fqn == "model/matrix")
        del metadata.storage_data[index]
        for (offsets, _), (offset, length) in zip(parts, places, strict=True):
            metadata.storage_data[MetadataIndex("model/matrix", offsets)] = type(info)(DATA, offset, length)

    change_metadata(path, change)
    assert same(read_tensors(open_checkpoint(path))["model/matrix"], matrix)


def test_both_ways_in_which_python_pickles_enumerations(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By value, or by name through getattr, which is read and not called."""
    for way in (lambda self, _protocol: (type(self), (self.value,)), enum.pickle_by_enum_name):
        monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", way)
        change_metadata(path, lambda _metadata: None)
        assert (b"getattr" in (path / METADATA).read_bytes()) == (way is enum.pickle_by_enum_name)
        assert read_tensors(open_checkpoint(path)).keys() == small().keys()


@pytest.mark.parametrize("shape", [[1 << 50], [1 << 40, 1 << 40], [0, 1 << 61, 1 << 61], [1] * 65])
def test_shapes_larger_than_any_memory(shape: list[int], path: Path) -> None:
    change_metadata(path, set_tensor(size=torch.Size(shape), chunks=[chunk([0] * len(shape), shape)]))
    reseal(path, dict(read_manifest(path).tensors) | {"model/matrix": TensorRecord(tuple(shape), "float32")})
    text = refusal(path)
    assert "larger than any" in text or "does not say where" in text


def pickled_tensor(arguments: bytes, version: int = 2, extra: bytes = b"") -> bytes:
    """The pickle of a tensor with other arguments after its storage."""
    storage = b"(\x8c\x07storagectorch\nLongStorage\n\x8c\x010\x8c\x03cpuK\x01tQ"
    hooks = b"\x89ccollections\nOrderedDict\n)R"
    call = b"\x80\x04ctorch._utils\n_rebuild_tensor_v%d\n(" % version
    return call + storage + arguments + hooks + extra + b"tR."


STEP = archive_of(torch.tensor(7))
WRONG_RECORDS = {
    "another dtype": archive_of(torch.tensor(7.0, dtype=torch.float64)),
    "another shape": archive_of(torch.tensor([7])),
    "a parameter": archive_of(torch.nn.Parameter(torch.tensor(7.0))),
    "a sparse tensor": archive_of(torch.eye(2).to_sparse()),
    "a meta tensor": archive_of(torch.empty((), dtype=torch.int64, device="meta")),
    "a conjugate": archive_of(torch.tensor(1j).conj()),
    "a list": archive_of([torch.tensor(7)]),
    "a dictionary": archive_of({"a": torch.tensor(7)}),
    "a number": archive_of(7),
    "a whole module": archive_of(torch.nn.Linear(1, 1)),
    "torch's older format": legacy(torch.tensor(7)),
    "compressed": replaced(STEP, "data/0", b"\0" * 1_000_000, zipfile.ZIP_DEFLATED),
    "compressed to less": replaced(STEP, "data/0", b"\0" * 8, zipfile.ZIP_DEFLATED) + b"\0" * 100,
    "no elements": replaced(STEP, "data/0", None),
    "too few elements": replaced(STEP, "data/0", b"\0" * 4),
    "no pickle": replaced(STEP, "data.pkl", None),
    "no order of bytes": replaced(STEP, "byteorder", None),
    "another order of bytes": replaced(STEP, "byteorder", b"big"),
    "cut": STEP[: len(STEP) // 2],
    "no archive": b"\0" * 1000,
    "an offset": replaced(STEP, "data.pkl", pickled_tensor(b"K\x05))")),
    "a negative offset": replaced(STEP, "data.pkl", pickled_tensor(b"J\xff\xff\xff\xff))")),
    "a huge size by stride 0": replaced(STEP, "data.pkl", pickled_tensor(b"K\0\x8a\x06\0\0\0\0\0\x10\x85K\0\x85")),
    "a negative stride": replaced(STEP, "data.pkl", pickled_tensor(b"K\0K\x01\x85J\xff\xff\xff\xff\x85")),
    "sizes of text": replaced(STEP, "data.pkl", pickled_tensor(b"K\0\x8c\x01a\x85K\0\x85")),
    "no storage": replaced(STEP, "data.pkl", b"\x80\x04ctorch._utils\n_rebuild_tensor_v2\n(NK\0)))NtR."),
    "more than elements": replaced(STEP, "data.pkl", pickled_tensor(b"K\0))", extra=b"}\x8c\x04conj\x88s")),
    "the third way without a dtype": replaced(STEP, "data.pkl", pickled_tensor(b"K\0))", 3)),
    "the third way with a storage of the second": replaced(
        STEP, "data.pkl", pickled_tensor(b"K\0))", 3, b"ctorch\nint64\n")
    ),
}


@pytest.mark.parametrize("name", WRONG_RECORDS)
def test_tensor_files_that_hold_something_else(name: str, path: Path) -> None:
    put_record(path, "step", WRONG_RECORDS[name])
    assert DATA in refusal(path)


def test_a_pickled_tensor_of_ours_is_read(path: Path) -> None:
    """The pieces of the test above make a tensor where nothing is wrong with them."""
    put_record(path, "step", replaced(STEP, "data.pkl", pickled_tensor(b"K\0))")))
    assert read_tensors(open_checkpoint(path))["step"].item() == 7


@pytest.mark.parametrize(
    "name",
    ["../step-00000002/x", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "c:x", "a\nb", "a\0b", "\x1b[2J", "x" * 300],
)
def test_manifests_that_name_other_files(name: str, path: Path) -> None:
    manifest = read_manifest(path)
    files = dict(manifest.files) | {name: FileRecord(0, "0")}
    (path / MANIFEST).write_text(Manifest(1, files, manifest.tensors).text())
    assert "is not the name of a file" in refusal(path) or len(name) == 300


@pytest.mark.parametrize("kind", ["link", "outside link", "device", "fifo", "folder"])
def test_files_that_lead_elsewhere(kind: str, path: Path, tmp_path: Path) -> None:
    """With the length that `stat` gives, and in a place where only a hash would tell."""
    file = path / DATA
    kept = tmp_path / "kept"
    file.rename(kept)
    makers: dict[str, Callable[[], object]] = {
        "link": lambda: file.symlink_to(kept),
        "outside link": lambda: file.symlink_to("/etc/passwd"),
        "device": lambda: file.symlink_to("/dev/zero"),
        "fifo": lambda: os.mkfifo(file),
        "folder": file.mkdir,
    }
    makers[kind]()
    manifest = read_manifest(path)
    files = dict(manifest.files) | {DATA: FileRecord(0 if kind == "fifo" else file.stat().st_size, "0")}
    (path / MANIFEST).write_text(Manifest(1, files, manifest.tensors).text())
    assert "is a link or no file at all" in refusal(path)


def manifest_with(path: Path, change: Callable[[dict[str, Any]], object]) -> str:
    """A manifest altered as JSON; its seal is then that of the text as we would write it, if we would."""
    content = json.loads((path / MANIFEST).read_text())
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "3",
        '"text"',
        "{}",
        "NaN",
        "[" * 1_000_000,
        '{"a":' * 100_000,
        "\ufeff{}",
        "1" * 100_000,
        '{"format": 1}',
        '{"format": true, "step": 1, "files": {}, "tensors": {}}',
        '{"format": "1"}',
        '{"format": 1, "step": -1, "files": {}, "tensors": {}}',
        '{"format": 1, "step": 1e3, "files": {}, "tensors": {}}',
        '{"format": 1, "step": 1, "files": [], "tensors": {}}',
        '{"format": 1, "step": 1, "files": {"a": []}, "tensors": {}}',
        '{"format": 1, "step": 1, "files": {"a": {"bytes": "1", "sha256": ""}}, "tensors": {}}',
        '{"format": 1, "step": 1, "files": {"a": {"bytes": 1, "sha256": 5}}, "tensors": {}}',
        '{"format": 1, "step": 1, "files": {}, "tensors": {"a": null}}',
        '{"format": 1, "step": 1, "files": {}, "tensors": {"a": {"shape": 1, "dtype": "x"}}}',
        '{"format": 1, "step": 1, "files": {}, "tensors": {"a": {"shape": [null], "dtype": "x"}}}',
        '{"format": 1, "step": 1, "files": {}, "tensors": {"a": {"shape": [], "dtype": {}}}}',
        '{"format": 2}',
        '{"format": ' + "9" * 4000 + "}",
    ],
)
def test_manifests_that_are_none(text: str, path: Path) -> None:
    (path / MANIFEST).write_text(text)
    assert MANIFEST in refusal(path)


def test_a_later_format_is_told_from_damage(path: Path) -> None:
    (path / MANIFEST).write_text(manifest_with(path, lambda content: content.update(format=2)))
    assert "has format 2, this surefoot reads format 1; use the version that wrote it" in refusal(path)


def test_a_manifest_that_lists_itself_or_too_little(path: Path) -> None:
    manifest = read_manifest(path)
    for files in (
        dict(manifest.files) | {MANIFEST: FileRecord(0, "0")},
        {name: record for name, record in manifest.files.items() if name != METADATA},
        {name: record for name, record in manifest.files.items() if name != "state.json"},
        {},
    ):
        (path / MANIFEST).write_text(Manifest(1, files, manifest.tensors).text())
        assert "does not list the files of a checkpoint" in refusal(path)


@pytest.mark.parametrize("dtype", ["float64", "qint8", "no such", "load", "\x1b[2J\n", "x" * 10_000])
def test_manifests_with_other_dtypes(dtype: str, path: Path) -> None:
    tensors = dict(read_manifest(path).tensors) | {"step": TensorRecord((), dtype)}
    reseal(path, tensors)
    assert "other tensors than the manifest" in refusal(path)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"3", b"\xff", b"{", b"[" * 1_000_000, b'{"a": ' + b"9" * 10_000 + b"}", b"{}{}"]
)
def test_states_that_are_none(data: bytes, path: Path) -> None:
    put(path, "state.json", data)
    assert "state.json" in refusal(path)


def outcome(action: Callable[[], object]) -> str:
    """What became of it; an exception of any other kind comes through."""
    try:
        action()
    except (CheckpointError, ForeignError) as error:
        return "refused" if str(error).isprintable() else str(error)
    return "taken"


def test_metadata_with_random_changes(path: Path) -> None:
    """Any change is refused or gives tensors of the manifest's shapes and dtypes; nothing else is ever raised."""
    data = (path / METADATA).read_bytes()
    generator = random.Random(0)
    outcomes = []
    for _ in range(600):
        changed = bytearray(data)
        for _ in range(generator.choice([1, 1, 2, 8])):
            position = generator.randrange(len(changed))
            choice = generator.randrange(3)
            if choice == 0:
                changed[position] = generator.randrange(256)
            elif choice == 1:
                del changed[position : position + generator.randrange(1, 9)]
            else:
                start = generator.randrange(len(changed))
                changed[position:position] = changed[start : start + generator.randrange(1, 30)]
        put(path, METADATA, bytes(changed))

        def read() -> None:
            found = read_tensors(open_checkpoint(path))
            assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == {
                name: (tensor.shape, tensor.dtype) for name, tensor in small().items()
            }

        outcomes.append(outcome(read))
    assert {"refused", "taken"} == set(outcomes)


def test_tensor_archives_with_any_byte_changed() -> None:
    generator = random.Random(0)
    outcomes = set()
    for position in range(len(STEP)):
        for value in (generator.randrange(256), 0, 255):
            changed = STEP[:position] + bytes([value]) + STEP[position + 1 :]
            outcomes.add(outcome(functools.partial(read_tensor, changed)))
    for end in range(0, len(STEP), 7):
        outcomes.add(outcome(functools.partial(read_tensor, STEP[:end])))
    assert outcomes == {"refused", "taken"}
