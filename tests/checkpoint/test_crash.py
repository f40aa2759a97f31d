"""A save that dies, or whose disk fails, at any moment: a whole checkpoint is found, and the next save clears up."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from surefoot.checkpoint import storage
from surefoot.checkpoint.config import CheckpointConfig
from surefoot.checkpoint.load import Checkpoint, latest, open_checkpoint, read_tensors
from surefoot.checkpoint.manifest import candidates
from surefoot.checkpoint.parts import whole
from surefoot.checkpoint.save import retain, save
from surefoot.checkpoint.saver import Saver
from surefoot.config import CheckpointError
from tests.checkpoint.forging import save_small

EXIT = 77
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}


class Moments:
    """Counts what a save asks of the system inside one folder, and does something just before the n-th time."""

    def __init__(self) -> None:
        self.folder = ""
        self.count = 0
        self.act: Callable[[int, str], None] = lambda _number, _what: None

    def hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.folder or threading.get_ident() not in {self.thread, *self.writers()}:
            return
        if event == "open":
            if str(arguments[0]).startswith(self.folder) and isinstance(arguments[2], int):
                self.happen("create" if arguments[2] & os.O_CREAT else "open")
        elif event in CHANGES and (str(arguments[0]).startswith(self.folder) or event in {"os.remove", "os.rmdir"}):
            self.happen(event)

    @staticmethod
    def writers() -> set[int | None]:
        return {thread.ident for thread in threading.enumerate() if thread.name.startswith("checkpoint of")}

    def happen(self, what: str) -> None:
        if self.folder:
            self.count += 1
            self.act(self.count, what)

    @contextmanager
    def during(self, folder: Path, act: Callable[[int, str], None]) -> Iterator[None]:
        self.folder, self.count, self.act, self.thread = str(folder), 0, act, threading.get_ident()
        try:
            yield
        finally:
            self.folder = ""


MOMENTS = Moments()


@pytest.fixture(scope="module", autouse=True)
def hooks() -> Iterator[None]:
    """Audit events for what changes names; writes and syncs have none, so they are wrapped.

    Syncs are only counted: a process that dies takes nothing with it that the system was given, and disks are slow.
    """
    sys.addaudithook(MOMENTS.hear)
    write = storage.HashedFile.write

    def counted_write(self: storage.HashedFile, data: bytes) -> int:
        with self._remembering_failure():
            MOMENTS.happen("write")
        return write(self, data)

    def counted_sync(descriptor: int) -> None:
        MOMENTS.happen("fsync")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.HashedFile, "write", counted_write)
        patch.setattr(os, "fsync", counted_sync)
        yield


def in_child(action: Callable[[], None]) -> int:
    """Run `action` in a forked process and return its exit status."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def found(folder: Path) -> Checkpoint:
    """The latest checkpoint; whatever else bears a checkpoint's name is whole, too."""
    for _, path in candidates(folder):
        open_checkpoint(path)
    told: list[str] = []
    checkpoint = latest(folder, told.append)
    assert checkpoint is not None
    assert told == []
    return checkpoint


def value_of(checkpoint: Checkpoint) -> float:
    tensors = read_tensors(checkpoint)
    assert checkpoint.state["value"] == tensors["value"].item()
    return tensors["value"].item()


def save_value(folder: Path, step: int, value: float) -> None:
    save(folder, step, {"value": torch.tensor(value)}, {"value": value})


def save_and_delete(folder: Path) -> None:
    save_value(folder, 2, 2.0)
    retain(folder, 1, None)


def save_in_the_background(folder: Path) -> None:
    """In the thread of a `Saver`, which this thread awaits."""
    saver = Saver(folder, CheckpointConfig(keep_last=5), None, pytest.fail)
    with saver:
        saver.save(2, {"value": whole(torch.tensor(2.0))}, {"value": 2.0}, "asynchronous")
        saver.finish()


SCENES: dict[str, Callable[[Path], None]] = {
    "a new step": lambda folder: save_value(folder, 2, 2.0),
    "the same step": lambda folder: save_value(folder, 1, 2.0),
    "a new step, then deletion": save_and_delete,
    "a new step in the background": save_in_the_background,
}


def count_moments(folder: Path, scene: Callable[[Path], None]) -> list[str]:
    names: list[str] = []
    save_value(folder, 1, 1.0)
    with MOMENTS.during(folder, lambda _number, what: names.append(what)):
        scene(folder)
    return names


def moments_of(names: list[str]) -> list[int]:
    """The number of every moment but most of the writes, which come in long runs: each tenth, and what follows."""
    return [
        number
        for number, what in enumerate(names, 1)
        if what != "write"
        or number % 10 == 0
        or names[number - 2] != "write"
        or names[number : number + 1] != ["write"]
    ]


@pytest.mark.parametrize("name", SCENES)
def test_a_process_killed_at_any_moment_of_a_save(name: str, tmp_path: Path) -> None:
    scene = SCENES[name]
    names = count_moments(tmp_path / "count", scene)
    assert {"create", "write", "fsync", "os.mkdir", "os.rename"} <= set(names)
    assert len(names) > 30
    values = []
    for moment in moments_of(names):
        folder = tmp_path / f"{moment}"
        save_value(folder, 1, 1.0)

        def die(number: int, _what: str, moment: int = moment) -> None:
            if number == moment:
                os._exit(EXIT)

        def action(folder: Path = folder, die: Callable[[int, str], None] = die) -> None:
            with MOMENTS.during(folder, die):
                scene(folder)

        assert in_child(action) == EXIT
        values.append(value_of(found(folder)))
        retain(folder, 5, None)
        assert value_of(found(folder)) == values[-1]
        save_value(folder, 1, 3.0)
        save_value(folder, 3, 4.0)
        assert value_of(found(folder)) == 4.0
        assert {entry.name for entry in folder.iterdir()} <= {f"step-0000000{step}" for step in (1, 2, 3)}
    # First the old one, from some moment on the new one.
    assert set(values) == {1.0, 2.0}
    assert values == sorted(values)


def test_processes_killed_at_random_moments(tmp_path: Path) -> None:
    """A loop of saves and deletions is killed 25 times; what it reported as saved is there, or something newer."""
    generator = random.Random(3)
    tensors = {"a": torch.arange(200_000.0), "b": torch.ones(300, 300)}
    reported = 0
    for _ in range(25):
        receive, send = os.pipe()

        def forever(start: int = reported + 1, send: int = send) -> None:
            for step in range(start, start + 1_000_000):
                save(tmp_path, step, tensors | {"step": torch.tensor(step)}, {"step": step})
                retain(tmp_path, 2, None)
                os.write(send, step.to_bytes(8, "big"))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            try:
                forever()
            finally:
                os._exit(1)
        os.close(send)
        if not reported:
            reported = int.from_bytes(os.read(receive, 8), "big")
        time.sleep(generator.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        while message := os.read(receive, 8):
            reported = int.from_bytes(message, "big")
        os.close(receive)
        checkpoint = found(tmp_path)
        assert reported <= checkpoint.step <= reported + 1
        assert read_tensors(checkpoint)["step"].item() == checkpoint.step == checkpoint.state["step"]
        reported = checkpoint.step
    assert reported > 0
    save(tmp_path, reported + 1, tensors, {})
    assert all(entry.name.startswith("step-") for entry in tmp_path.iterdir())
    retain(tmp_path, 2, None)  # on a busy machine several in a row may have died before theirs
    assert len(list(tmp_path.iterdir())) == 2


def failing(first: int, code: int, lasting: bool, kinds: set[str]) -> Callable[[int, str], None]:
    """Raise from the `first` moment on, once or for as long as it lasts, in calls of some kinds."""
    failed = False

    def act(number: int, what: str) -> None:
        nonlocal failed
        if number >= first and what in kinds and (lasting or not failed):
            failed = True
            raise OSError(code, os.strerror(code))

    return act


NEEDS_ROOM = {"create", "write", "fsync", "os.mkdir"}


@pytest.mark.parametrize("name", ["a new step", "the same step", "a new step in the background"])
@pytest.mark.parametrize(
    ("code", "lasting", "kinds"),
    [
        (errno.ENOSPC, True, NEEDS_ROOM),
        (errno.EIO, False, NEEDS_ROOM | {"os.rename", "open"}),
        (errno.EROFS, True, NEEDS_ROOM | {"os.rename", "os.remove", "os.rmdir"}),
    ],
    ids=["no space", "one failure", "read-only from then on"],
)
def test_a_disk_that_fails_at_any_moment(
    name: str, code: int, lasting: bool, kinds: set[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    scene = SCENES[name]
    names = count_moments(tmp_path / "count", scene)
    renames = [number for number, what in enumerate(names, 1) if what == "os.rename"]
    published = renames[-2 if name == "the same step" else -1]
    # The folder is there already: to fail once to make it does not matter.
    matter = [number for number in range(1, published + 1) if names[number - 1] in kinds]
    if not lasting:
        matter.remove(next(number for number in matter if names[number - 1] == "os.mkdir"))
    for moment in moments_of(names):
        folder = tmp_path / f"{moment}"
        save_value(folder, 1, 1.0)
        with MOMENTS.during(folder, failing(moment, code, lasting, kinds)):
            try:
                scene(folder)
            except CheckpointError as error:
                failure = str(error)
                assert os.strerror(code) in failure
                assert str(folder) in failure
                assert "\n" not in failure
            else:
                failure = ""
        assert failure or moment not in matter, f"{names[moment - 1]} failed unnoticed"
        value = value_of(found(folder))
        assert value == 2.0 if not failure else value in (1.0, 2.0)
        if code != errno.EROFS:
            left = {entry.name for entry in folder.iterdir()}
            assert not any(entry.startswith(".staging-step") for entry in left)
            assert value == 2.0 or left == {"step-00000001"}
        save_value(folder, 3, 3.0)
        assert all(entry.name.rstrip("~").startswith("step-") for entry in folder.iterdir())
        assert value_of(found(folder)) == 3.0
    assert capfd.readouterr().out == ""


def test_a_limit_on_the_length_of_files(tmp_path: Path) -> None:
    """The system itself refuses, in the middle of a large write."""
    path = save_small(tmp_path)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
        with pytest.raises(
            CheckpointError, match=r"step-00000002: cannot be saved .*File too large.*make room"
        ) as caught:
            save(tmp_path, 2, {"a": torch.zeros(1000), "b": torch.zeros(100_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="cannot be saved"):
            save_small(folder)


def test_an_interrupt_is_not_swallowed(tmp_path: Path) -> None:
    save_value(tmp_path, 1, 1.0)

    def interrupt(number: int, what: str) -> None:
        if what == "write" and number > 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), MOMENTS.during(tmp_path, interrupt):
        save_value(tmp_path, 2, 2.0)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]
    assert value_of(found(tmp_path)) == 1.0


def test_only_dead_processes_are_cleared_after(tmp_path: Path) -> None:
    gone = 2**22 + 1  # beyond the largest process number Linux hands out
    keep = [f".staging-step-00000009-{os.getppid()}", ".staging-notes", "other"]
    stale = [
        f".staging-step-00000009-{gone}",
        f".staging-step-00000009-{10**30}",
        f".staging-step-00000009-{os.getpid()}",
        f".staging-removed-step-00000001-{gone}",
        f".staging-removed-step-00000001~-{gone}",
    ]
    for name in keep + stale:
        (tmp_path / name / "inside").mkdir(parents=True)
    target = tmp_path / "other" / "inside"
    (tmp_path / f".staging-link-{gone}").symlink_to(target)
    save_small(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([*keep, "step-00000001"])
    assert target.is_dir()


def test_the_old_one_stays_whole_while_the_new_one_grows(tmp_path: Path) -> None:
    save_value(tmp_path, 1, 1.0)
    seen = []

    def look(_number: int, what: str) -> None:
        if what == "fsync":
            MOMENTS.folder = ""
            seen.append(value_of(found(tmp_path)))
            MOMENTS.folder = str(tmp_path)

    with MOMENTS.during(tmp_path, look):
        save_value(tmp_path, 1, 2.0)
    assert seen[:4] == [1.0] * 4
    assert seen[-1] == 2.0
    assert seen == sorted(seen)


def test_bytes_are_on_the_disk_before_the_name_is(tmp_path: Path) -> None:
    """Every file is synced, then the directory, then comes the name, then the folder is synced."""
    names = count_moments(tmp_path, SCENES["a new step"])
    created = names.count("create")
    assert created == 4
    last = len(names) - names[::-1].index("os.rename") - 1
    assert names[:last].count("fsync") == created + 1
    assert names[last + 1 :].count("fsync") == 1
