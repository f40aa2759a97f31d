"""What is saved comes back bit for bit, in the same bytes every time, and into nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta

from surefoot.checkpoint.archive import DTYPES
from surefoot.checkpoint.load import latest, load_into, open_checkpoint, read_tensors
from surefoot.checkpoint.manifest import step_name
from surefoot.checkpoint.save import save
from surefoot.config import CheckpointError
from tests.checkpoint.forging import bits, same, save_small, small

ALL_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
EXPECTED = "float32 float64 bfloat16 float16 int8 int16 int32 int64 uint8 bool complex64 complex128 float8_e4m3fn"


def random_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    """Every pattern of bits, infinities and NaNs with their payloads among them."""
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape[:-1], shape[-1] * dtype.itemsize))
    return raw.to(torch.uint8).view(dtype).reshape(shape)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:ComplexHalf support")
@pytest.mark.parametrize("name", ALL_DTYPES)
def test_every_dtype_comes_back_or_is_refused(name: str, tmp_path: Path) -> None:
    dtype = ALL_DTYPES[name]
    short = name.removeprefix("torch.")
    if short not in DTYPES:
        assert short not in EXPECTED.split()
        with pytest.raises(CheckpointError, match=r"x \(.*\) is not a dense tensor of numbers"):
            save(tmp_path, 1, {"x": torch.empty(2, dtype=dtype)}, {})
        assert not list(tmp_path.iterdir())
        return
    tensors = {
        "x": random_bits(dtype, 3, 7),
        "scalar": random_bits(dtype, 1)[0],
        "empty": torch.empty(2, 0, dtype=dtype),
    }
    checkpoint = open_checkpoint(save(tmp_path, 1, tensors, {}))
    found = read_tensors(checkpoint)
    assert found.keys() == tensors.keys()
    assert all(same(found[key], tensors[key]) for key in tensors)
    targets = {key: torch.ones_like(tensor) for key, tensor in tensors.items()}
    load_into(checkpoint, targets)
    assert all(same(targets[key], tensors[key]) for key in tensors)


def test_every_shape_and_view_comes_back(tmp_path: Path) -> None:
    base = torch.arange(120.0).reshape(4, 5, 6)
    complex_base = torch.randn(3, 4, dtype=torch.complex64)
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0),
        "empty/in the middle": torch.empty(3, 0, 2),
        "one": torch.ones(1, 1, 1),
        "transposed": base.permute(2, 0, 1),
        "strided": base[::2, 1::3, ::5],
        "offset": base[2, 3],
        "expanded": torch.tensor([1.0, 2.0]).expand(5, 2),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "shared": base,
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "conjugate": complex_base.conj(),
        "imaginary of conjugate": complex_base.conj().imag,
        "strange name ../é\n\"'": torch.ones(2),
    }
    checkpoint = open_checkpoint(save(tmp_path, 3, tensors, {}))
    found = read_tensors(checkpoint)
    assert list(found) == sorted(tensors)
    for name, tensor in tensors.items():
        assert same(found[name], tensor), name
        assert type(found[name]) is Tensor
    # A view costs its own elements, not those of what it looks at.
    assert sum(file.stat().st_size for file in checkpoint.path.iterdir()) < 60_000
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    targets["transposed"] = torch.zeros(4, 6, 5).permute(1, 0, 2)
    targets["strided"] = torch.zeros(8, 8, 8)[::4, ::5, ::5]
    load_into(checkpoint, targets)
    assert all(same(targets[name], tensor) for name, tensor in tensors.items())


def test_targets_that_want_gradients_are_filled_in_place(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {"w": torch.arange(4.0)}, {})
    weight = torch.nn.Parameter(torch.zeros(4))
    address = weight.data_ptr()
    load_into(open_checkpoint(path), {"w": weight})
    assert weight.tolist() == [0, 1, 2, 3]
    assert (weight.data_ptr(), weight.requires_grad, weight.grad_fn) == (address, True, None)


def test_state_and_step_come_back(tmp_path: Path) -> None:
    state = {"step": 9, "loss": 1e-300, "text": "é\n", "nested": {"a": [1, None, True]}, "big": 1 << 80}
    checkpoint = open_checkpoint(save(tmp_path, 9, small(), state))
    assert checkpoint.state == state
    assert checkpoint.step == 9
    assert {name: str(record) for name, record in checkpoint.tensors.items()} == {
        "model/matrix": "float32[3, 5]",
        "model/half": "bfloat16[4]",
        "step": "int64[]",
    }


def test_no_tensors_at_all(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path, 1, {}, {}))
    assert read_tensors(checkpoint) == {}
    load_into(checkpoint, {})


def test_a_prefix_selects_and_is_taken_off(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_small(tmp_path))
    assert sorted(read_tensors(checkpoint, "model/")) == ["half", "matrix"]
    assert read_tensors(checkpoint, "optim/") == {}
    assert sorted(read_tensors(checkpoint)) == sorted(small())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"step": None}, "holds 'step' for which there is no place"),
        ({"step": None, "model/half": None}, r"holds 'model/half' \(and 1 more\)"),
        ({"new": torch.zeros(2)}, "lacks 'new'"),
        ({"step": None, "new": torch.zeros(2)}, "lacks 'new' and holds 'step'"),
        ({"step": torch.zeros(1, dtype=torch.int64)}, r"step is int64\[\], not int64\[1\]"),
        ({"step": torch.tensor(1.0)}, r"step is int64\[\], not float32\[\]"),
        ({"model/matrix": torch.zeros(5, 3)}, r"model/matrix is float32\[3, 5\], not float32\[5, 3\]"),
        ({"model/matrix": torch.zeros(15)}, r"model/matrix is float32\[3, 5\], not float32\[15\]"),
        ({"model/half": torch.zeros(4, dtype=torch.float16)}, r"model/half is bfloat16\[4\], not float16\[4\]"),
    ],
)
def test_nothing_is_filled_unless_everything_fits(change: dict[str, Tensor | None], text: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_small(tmp_path))
    targets = {name: torch.zeros_like(tensor) for name, tensor in small().items()}
    for name, tensor in change.items():
        if tensor is None:
            del targets[name]
        else:
            targets[name] = tensor
    before = {name: bits(tensor) for name, tensor in targets.items()}
    with pytest.raises(CheckpointError, match=text) as caught:
        load_into(checkpoint, targets)
    assert "\n" not in str(caught.value)
    assert {name: bits(tensor) for name, tensor in targets.items()} == before


def test_the_same_tensors_give_the_same_bytes(tmp_path: Path) -> None:
    one = save(tmp_path / "one", 5, small(), {"b": 1, "a": 2})
    shifted = {name: torch.stack([tensor, tensor])[1] for name, tensor in small().items()}
    two = save(tmp_path / "a longer name", 5, shifted, {"b": 1, "a": 2})
    files = sorted(file.name for file in one.iterdir())
    assert files == [".metadata", "__0_0.distcp", "manifest.json", "state.json"]
    assert files == sorted(file.name for file in two.iterdir())
    for name in files:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


class PlainWriter(FileSystemWriter):
    """DCP's own, without the path and the random number that it puts into its metadata."""

    def storage_meta(self) -> StorageMeta | None:
        return None


def test_one_process_writes_what_dcp_writes(tmp_path: Path) -> None:
    base = torch.randn(8, 9)
    tensors = small() | {"a": base.t(), "b": base[:, ::2].clone(), "empty": torch.empty(2, 0), "c": base}
    path = save(tmp_path, 5, tensors, {})
    with pytest.warns(UserWarning, match="torch.distributed is"):
        state_dict_saver.save(
            dict(tensors),
            storage_writer=PlainWriter(tmp_path / "dcp"),
            planner=DefaultSavePlanner(flatten_state_dict=False),
            no_dist=True,
        )
    for name in (".metadata", "__0_0.distcp"):
        assert (path / name).read_bytes() == (tmp_path / "dcp" / name).read_bytes(), name


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    nest: list[object] = []
    for _ in range(100_000):
        nest = [nest]
    for state in ({"a": float("nan")}, {"a": {1, 2}}, {"a": torch.zeros(1)}, {"a": nest}):
        with pytest.raises(CheckpointError, match="state cannot be written as JSON") as caught:
            save(folder, 1, small(), state)
        assert "\n" not in str(caught.value)
    for tensor in (torch.zeros(2, device="meta"), torch.eye(3).to_sparse()):
        with pytest.raises(CheckpointError, match=r"weight .* is not a dense tensor"):
            save(folder, 1, {"weight": tensor}, {})
    assert not folder.exists()
    with pytest.raises(ValueError, match="no memory to load into"):
        load_into(
            open_checkpoint(save(folder, 1, {"weight": torch.zeros(2)}, {})), {"weight": torch.zeros(2, device="meta")}
        )


def test_latest_goes_by_step_whatever_else_is_in_the_folder(tmp_path: Path) -> None:
    told: list[str] = []
    assert latest(tmp_path / "absent", told.append) is None
    assert latest(tmp_path, told.append) is None
    for step in (99, 100_000_000, 20):
        save_small(tmp_path, step)
    for name in (
        "step-5",
        "step-0999999999x",
        "notes",
        ".staging-step-999999999-1",
        "step-٠٠٠٠٠٩٩٩",
        "step-0999999999",
    ):
        (tmp_path / name).mkdir()
    found = latest(tmp_path, told.append)
    assert found is not None
    assert found.path.name == "step-100000000"
    assert told == []


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    path = save_small(tmp_path, 4)
    for value in (1.0, 2.0):
        assert save(tmp_path, 4, {"x": torch.tensor(value)}, {"value": value}) == path
        checkpoint = open_checkpoint(path)
        assert checkpoint.state == {"value": value}
        assert read_tensors(checkpoint)["x"].item() == value
        assert [entry.name for entry in tmp_path.iterdir()] == [step_name(4)]


def test_files_that_change_after_opening_are_noticed(tmp_path: Path) -> None:
    path = save_small(tmp_path)
    checkpoint = open_checkpoint(path)
    (path / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: cannot be read"):
        read_tensors(checkpoint)


def test_the_manifest_is_plain_json(tmp_path: Path) -> None:
    content = json.loads((save_small(tmp_path) / "manifest.json").read_text())
    assert content["format"] == 1
    assert content["tensors"]["model/matrix"] == {"dtype": "float32", "shape": [3, 5]}
    assert set(content["files"]) == {".metadata", "__0_0.distcp", "state.json"}
