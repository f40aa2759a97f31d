"""Checkpoints of several ranks: each writes its parts, any layout reads them, and all agree on what there is."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, state_dict_loader

from surefoot.checkpoint import load, read
from surefoot.checkpoint import saver as saving
from surefoot.checkpoint.config import CheckpointConfig
from surefoot.checkpoint.load import latest, open_checkpoint, read_parts, read_tensors
from surefoot.checkpoint.manifest import read_manifest, step_name
from surefoot.checkpoint.parts import Part, common
from surefoot.checkpoint.saver import Saver
from surefoot.checkpoint.storage import HashedFile, Written
from surefoot.config import CheckpointError
from surefoot.dist.layout import Box, Layout, Place, Split
from surefoot.dist.mesh import AXES, Grid, Mesh, make_all_groups
from surefoot.dist.pool import Pool
from tests.checkpoint.forging import same

Sizes = Mapping[str, int]
FOUR: Sizes = {"shard": 2, "tensor": 2}
KEEP_ALL = CheckpointConfig(keep_last=99)

# By name: shape, what cuts it, and, over pipeline ranks, the stage that holds it.
TENSORS: dict[str, tuple[tuple[int, ...], tuple[Split, ...], int]] = {
    "columns": ((8, 6), (Split(0, ("tensor",)), Split(0, ("shard", "context"))), 0),
    "rows": ((5, 9), (Split(1, ("tensor",)), Split(0, ("shard", "context"))), 1),
    "uneven": ((7,), (Split(0, ("tensor",)), Split(0, ("shard", "context"))), 0),
    "one row": ((1, 4), (Split(0, ("shard", "context")),), 1),
    "tied": ((6, 4), (Split(0, ("tensor",)),), 0),
    "copied": ((3,), (), 1),
    "count": ((), (), 0),
}


def values(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    dtypes = {"rows": torch.bfloat16, "tied": torch.float64, "count": torch.int64}
    return {
        name: (100 * torch.randn(shape, generator=generator)).to(dtypes.get(name, torch.float32))
        for name, (shape, _, _) in TENSORS.items()
    }


class Rank:
    """This rank of a grid, with its parts of `TENSORS`."""

    def __init__(self, sizes: Sizes) -> None:
        make_all_groups(Grid(sizes))
        self.mesh = Mesh(Grid(sizes), dist.get_rank())
        self.is_used = self.mesh.rank < self.mesh.grid.num_ranks
        if not self.is_used:
            return
        self.group = self.mesh.group(*AXES)
        self.places = {
            name: Place(Layout(shape, splits), self.mesh)
            for name, (shape, splits, stage) in TENSORS.items()
            if self.mesh.size("pipeline") == 1 or self.mesh.index("pipeline") == stage
        }

    def parts(self, step: int) -> dict[str, Part]:
        found = values(step)
        return {
            name: Part(place.shape, place.box, found[name][place.box.slices].clone())
            for name, place in self.places.items()
            if place.counts and place.box.num_elements
        }


def job(sizes: Sizes, work: Callable[..., Any], *arguments: Any) -> Any:
    """`work` on the ranks of a grid; None on others."""
    rank = Rank(sizes)
    return work(rank, *arguments) if rank.is_used else None


def refused(action: Callable[[], object]) -> str:
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return ""


def save_steps(rank: Rank, folder: Path, steps: list[int], mode: saving.Mode = "asynchronous", keep: int = 99) -> None:
    saver = Saver(folder, CheckpointConfig(keep_last=keep), rank.group, lambda _text: None)
    with saver:
        for step in steps:
            saver.save(step, rank.parts(step), {"step": step}, mode)
        saver.finish()


def read_own(rank: Rank, folder: Path) -> tuple[int, list[str], set[str], bool]:
    """What all agree to open: its step, what was announced, the names held here, and whether parts are as saved."""
    told: list[str] = []
    checkpoint = latest(folder, told.append, rank.group)
    assert checkpoint is not None
    found = read_parts(checkpoint, {name: place.box for name, place in rank.places.items()})
    wanted = values(checkpoint.step)
    equal = all(same(found[name], wanted[name][place.box.slices]) for name, place in rank.places.items())
    return checkpoint.step, told, set(found), equal


def whole_of(path: Path) -> dict[str, Tensor]:
    return read_tensors(open_checkpoint(path))


def assert_whole(path: Path, step: int) -> None:
    found, wanted = whole_of(path), values(step)
    assert found.keys() == wanted.keys()
    assert all(same(found[name], wanted[name]) for name in wanted)


LAYOUTS: list[Sizes] = [
    {},
    {"tensor": 2},
    {"shard": 2, "context": 2, "tensor": 2},
    {"replicate": 2, "shard": 4},
    {"pipeline": 2, "shard": 2, "tensor": 2},
    {"pipeline": 2, "replicate": 2},
]


@pytest.mark.parametrize("mode", ["asynchronous", "blocking"])
@pytest.mark.parametrize("sizes", [FOUR, *LAYOUTS], ids=str)
def test_any_layout_saves_the_whole(pool: Pool, tmp_path: Path, sizes: Sizes, mode: str) -> None:
    pool.run(job, sizes, save_steps, tmp_path, [3], mode)
    assert_whole(tmp_path / step_name(3), 3)
    assert [entry.name for entry in tmp_path.iterdir()] == [step_name(3)]


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_any_layout_reads_its_parts(pool: Pool, tmp_path: Path, sizes: Sizes) -> None:
    pool.run(job, FOUR, save_steps, tmp_path, [3])
    found = [outcome for outcome in pool.run(job, sizes, read_own, tmp_path) if outcome is not None]
    assert len(found) == Grid(sizes).num_ranks
    assert all((step, told, equal) == (3, [], True) for step, told, _, equal in found)
    assert set.union(*(names for _, _, names, _ in found)) == TENSORS.keys()
    if "pipeline" in sizes:
        assert len({frozenset(names) for _, _, names, _ in found}) == 2, "ranks hold different tensors"


@pytest.mark.parametrize("sizes", [FOUR, {"pipeline": 2, "shard": 2, "tensor": 2}], ids=str)
def test_dcp_reads_what_we_write(pool: Pool, tmp_path: Path, sizes: Sizes) -> None:
    """Torch's own reader, which knows nothing of manifests."""
    pool.run(job, sizes, save_steps, tmp_path, [3])
    found = {name: torch.zeros_like(tensor) for name, tensor in values(3).items()}
    with pytest.warns(UserWarning, match="torch.distributed is"):
        state_dict_loader.load(found, storage_reader=FileSystemReader(tmp_path / step_name(3)), no_dist=True)
    assert all(same(found[name], tensor) for name, tensor in values(3).items())


def test_files_are_the_ranks_and_hold_what_counts(pool: Pool, tmp_path: Path) -> None:
    pool.run(job, {"replicate": 2, "shard": 2, "tensor": 2}, save_steps, tmp_path, [3])
    names = {file.name for file in (tmp_path / step_name(3)).iterdir()}
    # Ranks 4 to 7 are replicas.
    assert names == {".metadata", "manifest.json", "state.json"} | {f"__{rank}_0.distcp" for rank in range(4)}


SIDE = 600


def save_large(rank: Rank, folder: Path) -> int:
    """Save a large matrix; the largest number of entries handed to this rank's writer."""
    layout = Layout((SIDE, SIDE), (Split(1, ("tensor",)), Split(0, ("shard", "context"))))
    place = Place(layout, rank.mesh)
    part = Part(place.shape, place.box, torch.full(place.box.shape, float(rank.mesh.rank)))
    handed: list[int] = []
    write = saving.write_parts

    def spy(directory: Path, number: int, parts: Iterator[tuple[str, Part]]) -> Written:
        kept = list(parts)
        handed.extend(one.tensor.untyped_storage().nbytes() // 4 for _, one in kept)
        return write(directory, number, kept)

    with replaced("write_parts", spy), Saver(folder, KEEP_ALL, rank.group, print) as saver:
        saver.save(1, {"large": part} if place.counts else {}, {}, "asynchronous")
        saver.finish()
    return max(handed, default=0)


@contextmanager
def replaced(name: str, value: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, name, value)
        yield


def test_one_copy_is_written_and_no_rank_writes_it_whole(pool: Pool, tmp_path: Path) -> None:
    handed = pool.run(job, {"replicate": 2, "shard": 2, "tensor": 2}, save_large, tmp_path)
    assert handed == [SIDE * SIDE // 4] * 4 + [0] * 4
    path = tmp_path / step_name(1)
    assert sum(file.stat().st_size for file in path.iterdir()) < 1.02 * 4 * SIDE * SIDE
    half = SIDE // 2
    found = whole_of(path)["large"]
    corners = [found[:half, :half], found[:half, half:], found[half:, :half], found[half:, half:]]
    for rank, corner in enumerate(corners):
        assert (corner == rank).all()


def save_with_a_failure(rank: Rank, folder: Path, victim: int, error: Exception) -> str:
    """The second of three saves fails on one rank."""

    def fail(_self: HashedFile, _data: bytes) -> int:
        raise error

    with Saver(folder, KEEP_ALL, rank.group, print) as saver:
        saver.save(1, rank.parts(1), {}, "asynchronous")
        saver.finish()
        with pytest.MonkeyPatch.context() as patch:
            if rank.mesh.rank == victim:
                patch.setattr(HashedFile, "write", fail)
            saver.save(2, rank.parts(2), {}, "asynchronous")
            said = refused(saver.finish)
        assert [entry.name for entry in folder.iterdir()] == [step_name(1)]
        dist.barrier(group=rank.group)
        saver.save(3, rank.parts(3), {}, "asynchronous")
        saver.finish()
    return said


@pytest.mark.parametrize(
    ("victim", "error", "reason"),
    [
        (0, OSError(errno.ENOSPC, "No space left on device"), "(No space left on device)"),
        (2, OSError(errno.ENOSPC, "No space left on device"), "(rank 2: No space left on device)"),
        (3, MemoryError("too large"), "(rank 3: MemoryError: too large)"),
    ],
    ids=["disk of rank 0", "disk of rank 2", "memory of rank 3"],
)
def test_a_rank_that_fails_to_write(pool: Pool, tmp_path: Path, victim: int, error: Exception, reason: str) -> None:
    said = pool.run(job, FOUR, save_with_a_failure, tmp_path, victim, error)[:4]
    assert len(set(said)) == 1, "all ranks say the same"
    assert f"{step_name(2)}: cannot be saved {reason}; make room or make it writable" in said[0]
    assert_whole(tmp_path / step_name(1), 1)
    assert_whole(tmp_path / step_name(3), 3)


def save_badly(rank: Rank, folder: Path) -> tuple[str, str]:
    """A tensor that cannot be saved, on one rank; and boxes that two ranks claim."""
    with Saver(folder, KEEP_ALL, rank.group, print) as saver:
        parts = rank.parts(1)
        if rank.mesh.rank == 1:
            parts["odd"] = Part((2,), Box.whole((2,)), torch.empty(2, device="meta"))
        first = refused(lambda: saver.save(1, parts, {}, "asynchronous"))
        claimed = {"claimed": Part((4,), Box((0,), (2,)), torch.zeros(2))}
        return first, refused(lambda: saver.save(2, claimed, {}, "blocking"))


def test_what_no_reader_would_take_gets_no_name(pool: Pool, tmp_path: Path) -> None:
    said = pool.run(job, FOUR, save_badly, tmp_path)[:4]
    assert len(set(said)) == 1
    assert "odd (float32) is not a dense tensor of numbers with memory; only such can be saved (rank 1)" in said[0][0]
    assert "the ranks' layout describes" in said[0][1]
    assert list(tmp_path.iterdir()) == []


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "truncated": lambda file: os.truncate(file, file.stat().st_size - 1),
    "flipped": lambda file: file.write_bytes(bytes([*file.read_bytes()[:-1], file.read_bytes()[-1] ^ 1])),
}


@pytest.mark.parametrize("name", ["__3_0.distcp", "__0_0.distcp", ".metadata", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_all_ranks_pass_over_what_one_finds_damaged(pool: Pool, tmp_path: Path, name: str, damage: str) -> None:
    pool.run(job, FOUR, save_steps, tmp_path, [1, 2])
    DAMAGE[damage](tmp_path / step_name(2) / name)
    found = pool.run(job, {"shard": 4}, read_own, tmp_path)[:4]
    assert all((step, equal) == (1, True) for step, _, _, equal in found)
    assert len({tuple(told) for _, told, _, _ in found}) == 1
    (line,) = found[0][1]
    assert line.startswith("passing over a checkpoint")
    assert name in line


def hashed_here(rank: Rank, folder: Path) -> list[str]:
    """The files of tensors whose every byte this rank reads to open a checkpoint."""
    seen: list[str] = []
    check = load.check_hashes

    def spy(directory: Path, manifest: Any, names: Any) -> None:
        seen.extend(names)
        check(directory, manifest, names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "check_hashes", spy)
        open_checkpoint(folder / step_name(1), rank.group)
    return seen


def test_each_file_is_hashed_by_one_rank(pool: Pool, tmp_path: Path) -> None:
    pool.run(job, FOUR, save_steps, tmp_path, [1])
    shares = [share for share in pool.run(job, {"shard": 2}, hashed_here, tmp_path) if share is not None]
    assert sorted(name for share in shares for name in share) == [f"__{rank}_0.distcp" for rank in range(4)]
    assert [len(share) for share in shares] == [2, 2]


def files_opened(rank: Rank, folder: Path) -> set[str]:
    """Files of tensors opened to read this rank's parts, once the checkpoint is open."""
    checkpoint = open_checkpoint(folder / step_name(1), rank.group)
    opened: set[str] = set()
    real = read.open_regular

    def spy(file: Path) -> Any:
        opened.add(file.name)
        return real(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "open_regular", spy)
        read_parts(checkpoint, {"columns": rank.places["columns"].box})
    return opened


def test_a_rank_reads_only_files_that_its_parts_overlap(pool: Pool, tmp_path: Path) -> None:
    pool.run(job, FOUR, save_steps, tmp_path, [1])
    opened = pool.run(job, {"tensor": 2}, files_opened, tmp_path)[:2]
    assert opened == [{"__0_0.distcp", "__2_0.distcp"}, {"__1_0.distcp", "__3_0.distcp"}]


def save_in_own_folders(rank: Rank, folder: Path) -> tuple[str, str]:
    """As on machines that share no disk; saving, then opening."""
    own = folder / str(rank.mesh.rank)
    with Saver(own, KEEP_ALL, rank.group, print) as saver:
        saving_said = refused(lambda: saver.save(1, rank.parts(1), {}, "asynchronous"))
    if rank.mesh.rank == 0:
        saver = Saver(own, KEEP_ALL, None, print)
        saver.save(1, {"x": Part((1,), Box((0,), (1,)), torch.zeros(1))}, {}, "blocking")
    dist.barrier(group=rank.group)
    return saving_said, refused(lambda: latest(own, print, rank.group))


def test_folders_that_are_not_shared_are_said(pool: Pool, tmp_path: Path) -> None:
    said = pool.run(job, FOUR, save_in_own_folders, tmp_path)[:4]
    for at_save, at_open in said:
        assert "does not hold what rank 0 has just made there" in at_save
        assert at_save.endswith("give all ranks one shared folder (rank 1)")
        assert at_open.endswith("rank 0 sees it and rank 1 does not; give all ranks one shared folder")


class Gate:
    """Holds the writer until it is opened."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.write = saving.write_parts

    def write_parts(self, directory: Path, rank: int, parts: Any) -> Written:
        assert self.is_open.wait(30)
        return self.write(directory, rank, parts)


def save_slowly(rank: Rank, folder: Path) -> tuple[bool, list[str], list[str]]:
    """Rank 1 is slow to write step 1; its parts change meanwhile, and step 2 is due."""
    told: list[str] = []
    gate = Gate()
    saver = Saver(folder, KEEP_ALL, rank.group, told.append)
    with saver, pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "_SILENT_SECONDS", 0.05)
        if rank.mesh.rank == 1:
            patch.setattr(saving, "write_parts", gate.write_parts)
        parts = rank.parts(1)
        saver.save(1, parts, {}, "asynchronous")
        was_writing = saver.is_writing
        for part in parts.values():
            part.tensor.zero_()
        seen = [entry.name for entry in folder.iterdir() if not entry.name.startswith(".")]
        dist.barrier(group=rank.group)
        opener = threading.Timer(0.5, gate.is_open.set)
        opener.start()
        saver.save(2, rank.parts(2), {}, "asynchronous")
        saver.finish()
    return was_writing, seen, told


def test_two_saves_in_quick_succession(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(job, FOUR, save_slowly, tmp_path)[:4]
    assert found[1][0], "rank 1 was not held up"
    assert all(seen == [] for _, seen, _ in found), "the first had a name before it was whole"
    for _, _, told in found:
        assert told[0] == f"waiting until {tmp_path / step_name(1)} is written"
        assert len(set(told)) == len(told)
    for step in (1, 2):
        assert_whole(tmp_path / step_name(step), step)


def test_old_ones_go_when_new_ones_are_whole(pool: Pool, tmp_path: Path) -> None:
    pool.run(job, FOUR, save_steps, tmp_path, [1, 2, 3, 4, 5], "asynchronous", 2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [step_name(4), step_name(5)]
    for step in (4, 5):
        assert_whole(tmp_path / step_name(step), step)


def leave(saver: Saver, step: int, parts: Mapping[str, Part], error: BaseException) -> None:
    """An error elsewhere ends the run while a checkpoint is in flight."""
    with saver:
        saver.save(step, parts, {}, "asynchronous")
        raise error


def save_and_give_up(rank: Rank, folder: Path) -> None:
    """The next life saves the same step."""
    with pytest.raises(RuntimeError):
        leave(Saver(folder, KEEP_ALL, rank.group, print), 1, rank.parts(1), RuntimeError())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]
    dist.barrier(group=rank.group)
    save_steps(rank, folder, [1])


def test_a_run_that_ends_in_the_middle_of_a_save(pool: Pool, tmp_path: Path) -> None:
    pool.run(job, FOUR, save_and_give_up, tmp_path)
    assert_whole(tmp_path / step_name(1), 1)
    assert [entry.name for entry in tmp_path.iterdir()] == [step_name(1)]


def test_one_process_completes_what_it_began(tmp_path: Path) -> None:
    part = {"x": Part((2,), Box.whole((2,)), torch.ones(2))}
    with pytest.raises(RuntimeError):
        leave(Saver(tmp_path, KEEP_ALL, None, pytest.fail), 1, part, RuntimeError())
    assert whole_of(tmp_path / step_name(1))["x"].tolist() == [1, 1]
    with pytest.raises(KeyboardInterrupt):
        leave(Saver(tmp_path, KEEP_ALL, None, pytest.fail), 2, part, KeyboardInterrupt())
    assert not (tmp_path / step_name(2)).exists()


def test_memory_is_used_again_no_random_number_is_drawn_and_bytes_are_those_of_a_blocking_save(tmp_path: Path) -> None:
    tensors = values(1)
    parts = {
        name: Part(tuple(tensor.shape), Box.whole(tuple(tensor.shape)), tensor) for name, tensor in tensors.items()
    }
    random = torch.get_rng_state()
    with Saver(tmp_path / "a", KEEP_ALL, None, pytest.fail) as saver:
        saver.save(1, parts, {}, "asynchronous")
        first = {name: buffer.data_ptr() for name, buffer in saver._buffers.items()}
        saver.save(2, parts, {}, "asynchronous")
        assert {name: buffer.data_ptr() for name, buffer in saver._buffers.items()} == first
    with Saver(tmp_path / "b", KEEP_ALL, None, pytest.fail) as saver:
        saver.save(2, parts, {}, "blocking")
        time_of = (tmp_path / "b" / step_name(2) / "manifest.json").stat().st_mtime_ns
        saver.save(2, parts, {}, "blocking")
        assert (tmp_path / "b" / step_name(2) / "manifest.json").stat().st_mtime_ns == time_of, "saved twice"
    assert torch.equal(torch.get_rng_state(), random)
    assert read_manifest(tmp_path / "a" / step_name(2)) == read_manifest(tmp_path / "b" / step_name(2))


def test_common_parts_are_those_of_sets_of_entries() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        numbers = torch.randint(0, 4, (4, 2), generator=generator).tolist()
        box, other = Box(tuple(numbers[0]), tuple(numbers[1])), Box(tuple(numbers[2]), tuple(numbers[3]))
        marks = torch.zeros(8, 8)
        marks[box.slices] += 1
        marks[other.slices] += 1
        found = common(box, other)
        both = torch.zeros(8, 8)
        if found is not None:
            both[found.slices] = 1
        assert torch.equal(both, (marks == 2).float())
    assert common(Box((), ()), Box((), ())) == Box((), ())
