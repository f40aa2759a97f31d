"""Whatever a user gets wrong is one clear line, exit code 2, no traceback, and nothing left on disk or damaged."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.observe.folder import RunFolder
from surefoot.train.run import Run

Outcome = tuple[int, str, str]
Command = Callable[..., Outcome]


def refused(outcome: Outcome, *parts: str) -> None:
    code, _, error = outcome
    assert code == 2, error
    assert error.startswith("surefoot: ")
    assert error.count("\n") == 1, error
    assert "Traceback" not in error
    for part in parts:
        assert part in error


@pytest.mark.parametrize(
    ("assignment", "parts"),
    [
        ("model.widht=3", ("model.widht", "did you mean model.width?")),
        ("modle.width=3", ("modle", "did you mean model?")),
        ("model.width=0", ("model.width: 0", "greater than 0")),
        ("model.width=-64", ("model.width: -64", "greater than 0")),
        ("model.width=wide", ("model.width: 'wide'", "whole number")),
        ("model.width=33", ("model.width: 33", "nearest is")),
        ("model.depth=1.5", ("model.depth: 1.5", "whole number")),
        ("model.mixer.num_kv_heads=3", ("model.mixer.num_kv_heads: 3", "must divide num_heads")),
        ("model.mixer.head_size=7", ("model.mixer.head_size: 7", "multiple of 2")),
        ("model.residual_init=ones", ("model.residual_init: 'ones'", "'scaled' or 'zero'")),
        ("model.tied=yes", ("model.tied: 'yes'", "true or false")),
        ("model.vocab_size=10", ("model.vocab_size: 10", "is smaller than the tokenizer's")),
        ("model.z_loss=-1", ("model.z_loss: -1", "at least 0")),
        ("optim.lr=fast", ("optim.lr: 'fast'", "must be a number")),
        ("optim.lr=NaN", ("optim.lr: nan", "finite")),
        ("optim.lr=Infinity", ("optim.lr: inf", "finite")),
        ("optim.momentum=1", ("optim.momentum: 1", "less than 1")),
        ("optim.betas=[0.9]", ("optim.betas",)),
        ("optim.type=torch.optim.AdamW", ("optim.type", "--allow torch")),
        ("optim.type=surefoot.optim.schedule.Cosine", ("optim", "is not a kind of OptimizerConfig")),
        ("schedule.warmup=2", ("schedule.warmup: 2", "less than 1")),
        ("train.num_steps=0", ("train.num_steps: 0", "greater than 0")),
        ("train.micro_batch=3", ("train.micro_batch: 3", "must divide train.batch")),
        ("train.device=tpu", ("train.device: 'tpu'",)),
        ("train.device=cuda:7", ("train.device: 'cuda:7'", "use auto or cpu")),
        ("train=5", ("train: 5", "must be an object")),
        ("train.num_steps.x=5", ("train.num_steps", "has no fields")),
        ("precision.compute=int8", ("precision.compute: 'int8'", "'bf16', 'fp32' or 'fp64'")),
        ("data.sequence_length=1000000", ("sequence_length 1000000", "longer")),
        ("data.heldout_fraction=1", ("data.heldout_fraction: 1", "less than 1")),
        ("data.sources=[]", ("data.sources", "at least 1")),
        ("data.sources.0.weight=0", ("data.sources.0.weight: 0", "greater than 0")),
        ("data.sources.4.weight=1", ("data.sources.4", "there is no item 4")),
        ("checkpoint.keep_last=0", ("checkpoint.keep_last: 0", "at least 1")),
        ("name=a/b", ("name: 'a/b'",)),
        ("name=", ("name: ''",)),
        ("model.width", ("is not an assignment",)),
    ],
)
def test_a_bad_value_is_one_line(command: Command, saved: Path, assignment: str, parts: tuple[str, ...]) -> None:
    refused(command("train", saved, "--set", assignment, "--out", "run"), *parts)
    left = sorted(Path("run").rglob("*")) if Path("run").exists() else []
    assert {path.name for path in left} <= {"run.json"}, left


@pytest.mark.parametrize(
    ("recipe", "parts"),
    [
        ("quikstart", ("'quikstart'", "did you mean quickstart?")),
        ("zzz", ("'zzz'", "choose one of deepseek-v3")),
        ("missing.json", ("missing.json", "cannot be read")),
        ("missing.py:f", ("missing.py", "no such file")),
        (".", ("run.json", "cannot be read")),
    ],
)
def test_an_unknown_recipe(command: Command, recipe: str, parts: tuple[str, ...]) -> None:
    refused(command("train", recipe), *parts)
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("source", "name", "part"),
    [
        ("def f():\n    return 3\n", "f", "must return a surefoot.train.run.Run, not int"),
        ("def f(:\n", "f", "cannot be imported"),
        ("import no_such_package\n", "f", "cannot be imported"),
        ("def g():\n    pass\n", "f", "the file defines g"),
    ],
)
def test_a_broken_recipe_file(command: Command, source: str, name: str, part: str) -> None:
    Path("mine.py").write_text(source)
    refused(command("train", f"mine.py:{name}"), part)


def test_a_recipe_from_a_file_trains_and_its_run_can_be_changed(command: Command, saved: Path) -> None:
    Path("mine.py").write_text(
        "from pathlib import Path\nfrom surefoot.config import load_json\nfrom surefoot.train.run import Run\n"
        f"def small() -> Run:\n    return load_json(Path({str(saved)!r}), Run)\n"
    )
    code, out, error = command("train", "mine.py:small", "--set", "train.num_steps=1", "--out", "a")
    assert (code, error) == (0, "")
    assert "report:" in out
    code, out, _ = command("diff", "a", saved)
    assert code == 0
    assert "train.num_steps" in out


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ("text",)),
        (b"\xff\xfe\x00binary", ("bad.txt",)),
        (None, ("bad.txt",)),
    ],
)
def test_bad_text(command: Command, saved: Path, content: bytes | None, parts: tuple[str, ...]) -> None:
    if content is not None:
        Path("bad.txt").write_bytes(content)
    refused(command("train", saved, "--set", 'data.sources.0.source.paths=["bad.txt"]', "--out", "run"), *parts)


def test_an_existing_folder_is_left_alone(command: Command, saved: Path) -> None:
    Path("run").mkdir()
    Path("run/precious").write_text("mine")
    refused(command("train", saved, "--out", "run"), "already exists", "--resume run")
    assert [path.name for path in Path("run").iterdir()] == ["precious"]


def test_a_place_that_cannot_be_written(command: Command, saved: Path) -> None:
    Path("file").write_text("")
    refused(command("train", saved, "--out", "file/run"), "cannot be created")


def test_default_folders_are_numbered(command: Command, saved: Path) -> None:
    for number in (1, 2):
        code, out, _ = command("train", saved)
        assert code == 0
        assert f"runs/tiny-{number}" in out


def test_resume_of_what_is_no_run(command: Command) -> None:
    Path("empty").mkdir()
    refused(command("train", "--resume", "empty"), "is not a run folder")
    refused(command("train", "--resume", "missing"), "is not a run folder")
    refused(command("train"), "RECIPE", "is missing")
    refused(command("report", "empty"), "empty")
    refused(command("generate", "empty"), "run.json")


def test_resume_with_a_change(command: Command, saved: Path) -> None:
    assert command("train", saved, "--out", "run")[0] == 0
    before = Path("run/run.json").read_text()
    refused(command("train", "--resume", "run", "--set", "optim.lr=0.5"), "optim.lr: 0.5 was", "--accept optim.lr")
    refused(command("train", "--resume", "run", "--out", "other"), "--out")
    refused(command("train", saved, "--accept", "optim.lr"), "--accept", "--resume only")
    assert Path("run/run.json").read_text() == before
    code, out, _ = command("train", "--resume", "run", "--set", "train.num_steps=3", "--accept", "train.num_steps")
    assert code == 0
    assert "changed train.num_steps: 2 -> 3 (accepted: no longer the same run)" in out
    assert json.loads(Path("run/run.json").read_text())["train"]["num_steps"] == 3
    assert "train.num_steps" in Path("run/changes.json").read_text()


def test_a_hostile_run_file_runs_nothing(command: Command, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("evil_package.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    monkeypatch.syspath_prepend(Path.cwd())
    data = json.loads(saved.read_text())
    data["optim"]["type"] = "evil_package.Optimizer"
    Path("evil.json").write_text(json.dumps(data))
    refused(command("train", "evil.json"), "optim.type", "--allow evil_package")
    assert not Path("ran").exists()


def test_out_of_space_keeps_the_previous_checkpoint(
    command: Command, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from surefoot.checkpoint import saver

    write_parts = saver.write_parts

    def full_disk(directory: Path, *arguments: object) -> object:
        if "step-00000002" in directory.name:
            return write_parts(directory, *arguments)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            return write_parts(directory, *arguments)

    monkeypatch.setattr(saver, "write_parts", full_disk)
    arguments = ("--set", "train.num_steps=6", "--set", "checkpoint.every=2")
    refused(command("train", saved, *arguments, "--out", "run"), "No space left")
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-00000002"]
    monkeypatch.setattr(saver, "write_parts", write_parts)
    code, out, _ = command("train", "--resume", "run")
    assert code == 0
    assert "resuming from" in out


def test_a_read_only_run_is_refused(tmp_path: Path, tiny: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    from surefoot.config import RunError

    RunFolder.create(tmp_path / "run", tiny())
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(RunError, match="is read-only"):
        RunFolder.open(tmp_path / "run")


def test_generate(command: Command, saved: Path) -> None:
    assert command("train", saved, "--out", "run")[0] == 0
    cached = command("generate", "run", "--prompt", "def ", "--tokens", "12", "--temperature", "0.8", "--seed", "3")
    again = command(
        "generate", "run", "--prompt", "def ", "--tokens", "12", "--temperature", "0.8", "--seed", "3", "--no-cache"
    )
    assert cached[0] == 0
    assert cached[1] == again[1]
    assert cached[1].startswith("def ")
    refused(command("generate", "run", "--top-k", "3"), "top_k", "temperature above 0")
    refused(command("generate", "run", "--temperature", "-1"), "temperature")
    refused(command("generate", "run", "--step", "9"), "--step: 9", "step-00000002")


def test_data_inspect(command: Command, saved: Path) -> None:
    refused(command("data", "inspect", saved), "needs one of --step")
    refused(command("data", "inspect", saved, "--step", "99"), "--step: 99", "2 steps")
    refused(command("data", "inspect", saved, "--document", "no.txt"), "no.txt", "no such document")
    code, out, _ = command("data", "inspect", saved, "--step", "2")
    assert code == 0
    name = next(line.split()[1] for line in out.splitlines() if line.startswith("···"))
    code, out, _ = command("data", "inspect", saved, "--document", name)
    assert code == 0
    assert "2" in out.rpartition(":")[2]


def test_help_and_version_do_not_import_torch() -> None:
    import subprocess

    script = """
import sys
from surefoot.cli.main import app
try:
    app(sys.argv[1:])
except SystemExit:
    pass
print("torch" in sys.modules)
"""
    for argument in ("--help", "--version"):
        done = subprocess.run([sys.executable, "-c", script, argument], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "False"
