"""Which checkpoints stay: the newest few, the multiples, what is damaged, and always the newest whole one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.checkpoint import save as saving
from surefoot.checkpoint.config import CheckpointConfig
from surefoot.checkpoint.load import latest
from surefoot.checkpoint.manifest import FileRecord, Manifest, step_name
from surefoot.checkpoint.save import retain
from surefoot.config import CheckpointError, Config, ConfigError
from tests.checkpoint.forging import save_small


def make(folder: Path, name: str, step: int, whole: bool = True) -> Path:
    """What `retain` looks at: a manifest and files as long as it says."""
    path = folder / name
    path.mkdir(parents=True)
    files = {"state.json": FileRecord(0, "0"), ".metadata": FileRecord(0 if whole else 1, "0")}
    for file in files:
        (path / file).write_bytes(b"")
    (path / "manifest.json").write_text(Manifest(step, files, {}).text())
    return path


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.iterdir())


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "expected"),
    [
        (1, None, [50]),
        (2, None, [40, 50]),
        (5, None, [10, 20, 30, 40, 50]),
        (99, None, [10, 20, 30, 40, 50]),
        (0, None, [50]),
        (1, 20, [20, 40, 50]),
        (2, 30, [30, 40, 50]),
        (1, 7, [50]),
        (1, 10, [10, 20, 30, 40, 50]),
    ],
)
def test_what_stays(keep_last: int, keep_every: int | None, expected: list[int], tmp_path: Path) -> None:
    for step in (30, 10, 50, 20, 40):
        make(tmp_path, step_name(step), step)
    deleted = retain(tmp_path, keep_last, keep_every)
    assert steps(tmp_path) == expected
    assert sorted(int(path.name[5:]) for path in deleted) == sorted({10, 20, 30, 40, 50} - set(expected))
    assert retain(tmp_path, keep_last, keep_every) == []


def test_what_is_no_checkpoint_is_not_touched(tmp_path: Path) -> None:
    others = {"notes", ".staging-step-00000001-1", "step-1", "best"}
    for name in others:
        (tmp_path / name).mkdir()
    make(tmp_path, "elsewhere/" + step_name(3), 3)
    (tmp_path / step_name(3)).symlink_to(tmp_path / "elsewhere" / step_name(3))
    for step in (1, 2):
        make(tmp_path, step_name(step), step)
    assert [path.name for path in retain(tmp_path, 1, None)] == [step_name(1)]
    assert {path.name for path in tmp_path.iterdir()} == others | {"elsewhere", step_name(2), step_name(3)}


def test_one_under_a_later_name_does_not_push_out_the_real_ones(tmp_path: Path) -> None:
    """`latest` would not open it, so it is not the newest."""
    for step in (1, 2):
        save_small(tmp_path, step)
    shutil.copytree(tmp_path / step_name(1), tmp_path / step_name(9))
    assert [path.name for path in retain(tmp_path, 1, None)] == [step_name(1)]
    found = latest(tmp_path, lambda _text: None)
    assert found is not None
    assert found.step == 2


def test_folders_that_are_not_there_or_cannot_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert retain(tmp_path / "absent", 1, None) == []
    for step in (1, 2):
        make(tmp_path, step_name(step), step)

    def refuse(_path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(saving, "_remove", refuse)
    with pytest.raises(
        CheckpointError, match=r"old checkpoints cannot be deleted \(Permission denied\); make it writable"
    ):
        retain(tmp_path, 1, None)


entries = st.dictionaries(
    st.tuples(st.integers(0, 12), st.sampled_from(["", "~"])),
    st.sampled_from(["whole", "whole", "damaged", "other step"]),
    max_size=10,
)


@settings(max_examples=80, deadline=None, database=None)
@given(entries, st.integers(1, 4), st.none() | st.integers(1, 4))
def test_retention_is_what_it_says(
    tmp_path_factory: pytest.TempPathFactory,
    found: dict[tuple[int, str], str],
    keep_last: int,
    keep_every: int | None,
) -> None:
    folder = tmp_path_factory.mktemp("run")
    for (step, mark), kind in found.items():
        make(folder, step_name(step) + mark, step + 100 * (kind == "other step"), kind != "damaged")
    # Of a step and the one that it replaced, "~", the first whole one counts.
    whole = {step: mark for (step, mark), kind in sorted(found.items(), reverse=True) if kind == "whole"}
    newest = sorted(whole, reverse=True)
    kept = {step for step in newest if step in newest[:keep_last] or (keep_every and step % keep_every == 0)}
    expected = {step_name(step) + mark for step, mark in whole.items() if step in kept}
    unsound = {step_name(step) + mark for (step, mark), kind in found.items() if kind != "whole"}
    deleted = retain(folder, keep_last, keep_every)
    left = {path.name for path in folder.iterdir()}
    assert left == expected | unsound
    assert len(deleted) == len(found) - len(left)
    assert not whole or step_name(max(whole)) + whole[max(whole)] in left
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"every": 0}, "every"),
        ({"every": -5}, "every"),
        ({"every": 1.5}, "every"),
        ({"keep_last": 0}, "keep_last"),
        ({"keep_last": None}, "keep_last"),
        ({"keep_every": 0}, "keep_every"),
        ({"every": None, "keep_every": 10}, "keep_every.*10.*needs `every`: with it null only the last step is saved"),
        ({"every": 20, "keep_every": 30}, "keep_every.*30.*must be a multiple of every = 20"),
        ({"keep": 3}, "keep"),
    ],
)
def test_configurations_that_contradict_themselves(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        CheckpointConfig(**values)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("CheckpointConfig")


def test_configurations_that_do_not() -> None:
    config: Config = CheckpointConfig()
    assert config == CheckpointConfig(every=500, keep_last=2, keep_every=None)
    CheckpointConfig(every=None)
    CheckpointConfig(every=20, keep_every=40)
