"""`surefoot evaluate`: own task files on a small run, and each way in which it cannot be."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Outcome

Command = Callable[..., Outcome]
HAS_LM_EVAL = importlib.util.find_spec("lm_eval") is not None
TASK = """\
task: own_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {questions}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture
def trained(command: Command, saved: Path, tmp_path: Path) -> Path:
    code, _, err = command("train", saved, "--out", tmp_path / "run")
    assert code == 0, err
    return tmp_path / "run"


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    folder = tmp_path / "tasks"
    folder.mkdir()
    questions = folder / "questions.jsonl"
    rows = [{"question": "a b ", "choices": ["c", "the other one"], "answer": number % 2} for number in range(6)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own.yaml").write_text(TASK.format(questions=questions))
    (folder / "broken.yaml").write_text("task: broken\noutput_type: multiple_choice\n")
    return folder


@pytest.mark.skipif(not HAS_LM_EVAL, reason="lm-eval is not installed (extra eval)")
@pytest.mark.filterwarnings("ignore")
def test_own_tasks_are_asked_and_bad_ones_named(command: Command, trained: Path, tasks: Path, tmp_path: Path) -> None:
    ask = ("evaluate", trained, "--task-files", tasks)
    code, out, err = command(*ask, "--tasks", "own_words", "--out", tmp_path / "found.json", "--limit", 4)
    assert code == 0, err
    found = json.loads((tmp_path / "found.json").read_text())
    # The shorter answer is likelier to any model here, and is right every second time.
    assert found["results"]["own_words"]["acc,none"] == 0.5
    assert found["step"] == 2
    row = next(line.split() for line in out.splitlines() if line.startswith("own_words"))
    assert row[1:3] == ["acc", "0.5000"]
    assert row[-1] == "4"
    for arguments, said in (
        (["own_wrods"], "own_words"),
        ([" , "], "names of lm-eval's tasks"),
        (["broken"], "lm-eval cannot run them"),
        (["own_words", "--out", "nowhere/found.json"], "there is no folder nowhere"),
    ):
        code, _, err = command(*ask, "--tasks", *arguments)
        assert code == 2
        assert said in err.splitlines()[-1]
    code, _, err = command("evaluate", trained, "--tasks", "own_words", "--task-files", tmp_path / "none")
    assert code == 2
    assert "--task-files" in err


def test_without_lm_eval_it_says_what_to_install(
    command: Command, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    code, _, err = command("evaluate", trained, "--tasks", "arc_easy")
    assert code == 2
    assert "pip install 'surefoot[eval]'" in err


def test_what_is_no_run_is_named(command: Command, tmp_path: Path) -> None:
    code, _, err = command("evaluate", tmp_path, "--tasks", "arc_easy")
    assert code == 2
    assert "run.json" in err
