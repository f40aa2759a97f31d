"""Whatever happens to the bytes or names of a checkpoint is noticed, named, and passed over by `latest`."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from surefoot.checkpoint.load import latest, open_checkpoint
from surefoot.checkpoint.save import save
from surefoot.config import CheckpointError
from tests.checkpoint.forging import DATA, save_small, small

FILES = ["manifest.json", "state.json", ".metadata", DATA]


def refused(path: Path, named: Path) -> str:
    """The error of opening; it is one line and begins with the file to blame."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"{named}: "), text
    return text


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A whole checkpoint and a newer one to damage; afterwards `latest` must pass over the newer one and say so."""
    older = save_small(tmp_path, 1)
    newer = save(tmp_path, 2, small() | {"extra": torch.ones(2)}, {"step": 2})
    yield older, newer
    told: list[str] = []
    checkpoint = latest(tmp_path, told.append)
    assert checkpoint is not None
    assert checkpoint.path == older
    assert len(told) == 1
    assert told[0].startswith(f"passing over a checkpoint: {newer}")


def overwrite(file: Path, position: int, value: int) -> None:
    """Change one byte in place: file systems sync a file that is cut and written anew."""
    with file.open("r+b") as stream:
        stream.seek(position)
        stream.write(bytes([value]))


@pytest.mark.parametrize("name", FILES)
def test_any_changed_byte_is_noticed(name: str, pair: tuple[Path, Path]) -> None:
    file = pair[1] / name
    data = file.read_bytes()
    generator = random.Random(name)
    sampled = range(len(data)) if name == "manifest.json" else generator.sample(range(len(data)), min(80, len(data)))
    for position in [0, *sampled, len(data) - 1]:
        # One bit, another letter's case, and anything.
        for change in {1 << generator.randrange(8), 0x20, generator.randrange(1, 256)}:
            overwrite(file, position, data[position] ^ change)
            refused(pair[1], file)
        overwrite(file, position, data[position])
    overwrite(file, 0, data[0] ^ 1)


@pytest.mark.parametrize("name", FILES)
def test_any_length_but_the_right_one_is_noticed(name: str, pair: tuple[Path, Path]) -> None:
    file = pair[1] / name
    data = file.read_bytes()
    for changed in (b"", data[:1], data[: len(data) // 2], data[:-1], data + b"\n", data + data, b"\n" + data):
        file.write_bytes(changed)
        refused(pair[1], file)


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_gone_or_no_files(name: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    older, newer = pair
    file = newer / name
    kept = tmp_path / "kept"
    file.rename(kept)
    text = refused(newer, newer if name == "manifest.json" else file)
    assert "no manifest" in text or "is missing" in text
    makers: list[Callable[[], object]] = [
        file.mkdir,
        lambda: file.symlink_to(kept),
        lambda: file.symlink_to(older / name),
        lambda: file.symlink_to("/dev/zero"),
        lambda: file.symlink_to("nowhere"),
        lambda: os.mkfifo(file),
    ]
    for make in makers:
        make()
        refused(newer, file)
        if file.is_dir():
            file.rmdir()
        else:
            file.unlink()


@pytest.mark.parametrize("name", FILES)
def test_files_of_another_checkpoint(name: str, pair: tuple[Path, Path]) -> None:
    shutil.copy(pair[0] / name, pair[1] / name)
    # A manifest of another step does not fit the name, and says so before the files are looked at.
    refused(pair[1], pair[1] if name == "manifest.json" else pair[1] / name)


def test_a_checkpoint_under_another_step(tmp_path: Path) -> None:
    save_small(tmp_path, 1)
    wrong = save_small(tmp_path, 2).rename(tmp_path / "step-00000007")
    assert "holds step 2" in refused(wrong, wrong)
    told: list[str] = []
    checkpoint = latest(tmp_path, told.append)
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert "step-00000007" in told[0]


def test_a_checkpoint_may_be_moved_under_any_other_name(tmp_path: Path) -> None:
    moved = save_small(tmp_path, 2).rename(tmp_path / "best")
    assert open_checkpoint(moved).step == 2


def test_a_link_is_followed_only_where_it_is_named(tmp_path: Path) -> None:
    path = save_small(tmp_path / "far", 5)
    folder = tmp_path / "near"
    save_small(folder, 1)
    (folder / path.name).symlink_to(path)
    told: list[str] = []
    checkpoint = latest(folder, told.append)
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert "is a link" in told[0]
    assert open_checkpoint(folder / path.name).step == 5


def test_things_that_only_bear_a_checkpoints_name(tmp_path: Path) -> None:
    for name in ("step-00000001", "step-00000002~"):
        (tmp_path / name).write_text("")
    (tmp_path / "step-00000003").mkdir()
    os.mkfifo(tmp_path / "step-00000004")
    told: list[str] = []
    assert latest(tmp_path, told.append) is None
    assert len(told) == 4
    assert all("\n" not in line for line in told)
    assert "step-00000003: is not a whole checkpoint (no manifest.json)" in told[1]


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    refused(tmp_path / "absent", tmp_path / "absent")
    refused(tmp_path / "absent" / "step-00000001", tmp_path / "absent" / "step-00000001")


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_small(tmp_path)

    def refuse(_self: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be read \(Permission denied\)"):
        latest(tmp_path, pytest.fail)
    assert open_checkpoint(path).step == 1  # a folder need not be listed to open one of it
