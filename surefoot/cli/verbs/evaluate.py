"""`surefoot evaluate`: lm-eval's tasks on a live checkpoint (extra `eval`)."""

from __future__ import annotations

import difflib
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from surefoot.cli.verbs.generate import checkpoint_of
from surefoot.config import ConfigError, DataError, RunError, load_json
from surefoot.dist.startup import choose_device, set_threads
from surefoot.infer.harness import language_model
from surefoot.train.run import Run
from surefoot.train.state import load_model


def run(
    folder: Path,
    tasks: str,
    task_files: Path | None,
    shots: int | None,
    limit: int | None,
    length: int | None,
    step: int | None,
    out: Path | None,
    allow: list[str],
) -> None:
    """Print a row a task and metric; write all that lm-eval found if there is a file for it."""
    chosen = load_json(folder / "run.json", Run, allow=allow)
    checkpoint = checkpoint_of(folder, step)
    if importlib.util.find_spec("lm_eval") is None:
        raise RunError("surefoot evaluate: needs lm-eval, which is not installed; pip install 'surefoot[eval]'")
    if task_files is not None and not task_files.is_dir():
        raise ConfigError("--task-files", str(task_files), "is no folder; name one that holds task files of lm-eval")
    if out is not None and not out.parent.is_dir():
        raise ConfigError("--out", str(out), f"there is no folder {out.parent}; make it first")
    _say("reading the names of lm-eval's tasks")
    wanted, manager = _tasks(tasks, task_files)
    set_threads(chosen.train.threads)
    device = choose_device("auto")
    tokenizer = chosen.data.build_tokenizer(announce=_say)
    harness = language_model(
        load_model(chosen, checkpoint, device),
        lambda text: tokenizer.encode_batch([text])[0].tolist(),
        tokenizer.decode,
        separator=tokenizer.document,
        length=length or chosen.data.sequence_length,
        vocab_size=tokenizer.vocab_size,
        dtype=torch.float32 if device.type == "cpu" else chosen.precision.compute_dtype,
    )
    found = _evaluated(harness, wanted, manager, shots, limit)
    console = Console(highlight=False)
    console.print(f"{chosen.name}, step {checkpoint.step}: {', '.join(wanted)}")
    console.print(_table(found))
    if out is not None:
        kept = {"run": chosen.name, "step": checkpoint.step, "limit": limit, "length": length} | {
            name: found[name] for name in ("results", "n-shot", "n-samples", "versions") if name in found
        }
        out.write_text(json.dumps(kept, indent=2, default=str) + "\n")
        console.print(f"{out}: written")


def _tasks(tasks: str, task_files: Path | None) -> tuple[list[str], Any]:
    """The names, each of which lm-eval knows, and what it finds them with."""
    from lm_eval.tasks import TaskManager  # noqa: PLC0415 - an extra

    manager = TaskManager(include_path=None if task_files is None else str(task_files))
    wanted = [name.strip() for name in tasks.split(",") if name.strip()]
    if not wanted:
        raise ConfigError("--tasks", tasks, "must be names of lm-eval's tasks, as in arc_easy,lambada_openai")
    for name in wanted:
        if name not in manager.all_tasks:
            near = ", ".join(difflib.get_close_matches(name, manager.all_tasks, 3)) or "see `lm-eval ls tasks`"
            raise ConfigError("--tasks", name, f"is no task of lm-eval; nearest: {near}; own ones come by --task-files")
    return wanted, manager


def _evaluated(
    harness: Any, wanted: Sequence[str], manager: Any, shots: int | None, limit: int | None
) -> Mapping[str, Any]:
    from lm_eval import simple_evaluate  # noqa: PLC0415 - an extra

    try:
        found: Mapping[str, Any] = simple_evaluate(
            harness,
            tasks=list(wanted),
            num_fewshot=shots,
            limit=limit,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=1000,
        )
    except (OSError, ConnectionError) as error:
        raise DataError(
            f"--tasks {','.join(wanted)}: their data cannot be read ({str(error).splitlines()[0]}); it comes from the "
            "Hugging Face hub on first use: connect, or point HF_HOME at a copy"
        ) from error
    except Exception as error:  # of task files, of what they ask of a model, and of lm-eval itself
        raise DataError(
            f"--tasks {','.join(wanted)}: lm-eval cannot run them ({type(error).__name__}: {error}); mend the task file, or "
            "try one task at a time to see which"
        ) from error
    return found


def _table(found: Mapping[str, Any]) -> Table:
    table = Table("task", "metric", box=None, pad_edge=False)
    for title in ("value", "standard error", "questions"):
        table.add_column(title, justify="right")
    for task, row in found["results"].items():
        asked = found.get("n-samples", {}).get(task, {}).get("effective", "-")
        for key, value in row.items():
            metric, _, filtered = key.partition(",")
            if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = row.get(f"{metric}_stderr,{filtered}")
            shown = f"{error:.4f}" if isinstance(error, int | float) else "-"
            name = metric if filtered == "none" else f"{metric} ({filtered})"
            table.add_row(task, name, f"{value:.4f}", shown, str(asked))
    return table


def _say(text: str) -> None:
    print(text, file=sys.stderr)
