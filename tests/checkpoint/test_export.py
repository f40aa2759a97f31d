"""Weights for other programs: equal bits, and a file that is whole or as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from surefoot.checkpoint import export
from surefoot.checkpoint.export import export_safetensors
from surefoot.checkpoint.load import Checkpoint, open_checkpoint
from surefoot.checkpoint.save import save
from surefoot.config import CheckpointError
from tests.checkpoint.forging import DATA, same

TENSORS = {
    "model/embedding": torch.randn(7, 3),
    "model/half": torch.randn(5).bfloat16(),
    "model/transposed": torch.arange(6.0).reshape(2, 3).t(),
    "model/scalar": torch.tensor(2.0, dtype=torch.float64),
    "model/empty": torch.empty(0, 4),
    "model/mask": torch.tensor([True, False]),
    "model/eight": torch.randn(4).to(torch.float8_e4m3fn),
    "optim/embedding/m": torch.randn(7, 3),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(save(tmp_path / "run", 3, TENSORS, {}))


def test_other_programs_read_equal_bits(checkpoint: Checkpoint, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    assert export_safetensors(checkpoint, file) == file
    found = safetensors.torch.load_file(file)
    expected = {name.removeprefix("model/"): tensor for name, tensor in TENSORS.items() if name.startswith("model/")}
    assert found.keys() == expected.keys()
    assert all(same(found[name], expected[name]) for name in found)
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert {path.name for path in tmp_path.iterdir()} == {"run", "model.safetensors"}


def test_another_prefix_and_an_existing_file(checkpoint: Checkpoint, tmp_path: Path) -> None:
    file = tmp_path / "moments.safetensors"
    file.write_text("something older")
    export_safetensors(checkpoint, file, "optim/")
    assert list(safetensors.torch.load_file(file)) == ["embedding/m"]


def test_the_same_checkpoint_gives_the_same_file(checkpoint: Checkpoint, tmp_path: Path) -> None:
    one, two = (export_safetensors(checkpoint, tmp_path / name).read_bytes() for name in ("one", "two"))
    assert one == two


@pytest.mark.parametrize(
    "failure", [OSError(28, "No space left on device"), SafetensorError("two\nlines"), ValueError(), KeyError("x")]
)
def test_an_existing_file_stays_on_failure(
    failure: Exception, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("something older")

    def fail(_tensors: object, target: Path, metadata: object) -> None:
        target.write_text("half of it")
        raise failure

    monkeypatch.setattr(export, "save_file", fail)
    with pytest.raises(CheckpointError, match="cannot be written") as caught:
        export_safetensors(checkpoint, file)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{file}: ")
    assert file.read_text() == "something older"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "model.safetensors"}


def test_an_existing_file_stays_until_the_new_one_takes_its_name(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("something older")

    def refuse(_self: Path, _target: Path) -> Path:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be written \(Operation not permitted\)"):
        export_safetensors(checkpoint, file)
    assert file.read_text() == "something older"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "model.safetensors"}


def test_what_cannot_be_exported_is_refused_in_one_line(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "folder", tmp_path / "absent" / "x", tmp_path / "file" / "x"):
        with pytest.raises(CheckpointError, match="cannot be written") as caught:
            export_safetensors(checkpoint, target)
        assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="holds no tensor under 'ema/'") as caught:
        export_safetensors(checkpoint, tmp_path / "x", "ema/")
    (checkpoint.path / DATA).write_bytes(b"")
    with pytest.raises(CheckpointError, match=DATA):
        export_safetensors(checkpoint, tmp_path / "x")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "folder", "file"}
    assert list((tmp_path / "folder").iterdir()) == []


def test_dtypes_that_safetensors_does_not_know(tmp_path: Path) -> None:
    path = save(tmp_path / "run", 1, {"model/z": torch.ones(2, dtype=torch.complex128)}, {})
    with pytest.raises(CheckpointError, match="x: cannot be written") as caught:
        export_safetensors(open_checkpoint(path), tmp_path / "x")
    assert "\n" not in str(caught.value)
    assert {entry.name for entry in tmp_path.iterdir()} == {"run"}
