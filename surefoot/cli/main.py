"""The `surefoot` command: what each verb takes. The work is in `cli.verbs`, imported only when a verb runs.

This is the one file that imports lazily from its own package: `surefoot --help` must answer without importing torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, NoReturn

import typer

import surefoot
from surefoot.config.errors import SurefootError

app = typer.Typer(
    name="surefoot",
    help="Train foundation models from scratch, and have the run explain itself.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
data_app = typer.Typer(help="Look into the data of a recipe or a run.", no_args_is_help=True)
app.add_typer(data_app, name="data")

Recipe = Annotated[
    str, typer.Argument(help="A shipped name (see `surefoot recipes`), file.py:function, a run.json or a run folder.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Change one value of the recipe, e.g. optim.lr=3e-4. Repeat for more."
    ),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow", metavar="PACKAGE", help="Trust the Config classes of this package when reading a saved run."
    ),
]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"surefoot {surefoot.__version__}")
        raise typer.Exit


@app.command()
def train(
    recipe: Annotated[
        str | None,
        typer.Argument(help="A shipped name (see `surefoot recipes`), file.py:function, a run.json or a run folder."),
    ] = None,
    sets: Sets = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The run folder to make; runs/NAME-1, -2, … by default.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Continue the run in this folder, bitwise where it stopped.")
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option("--accept", metavar="PATH", help="With --resume: accept a change here that makes it another run."),
    ] = None,
    allow: Allow = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, help="Train as this many processes on this machine; see plan.* for the layout."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Start nothing: print what a rank of --ranks N would hold and send in a step."),
    ] = False,
    device_memory: Annotated[
        str | None,
        typer.Option(
            "--device-memory", metavar="SIZE", help="With --dry-run: say whether it fits, e.g. 80GiB or h100."
        ),
    ] = None,
) -> None:
    """Train a recipe, or continue a run."""
    if dry_run or device_memory is not None:
        only = {"--out": out, "--resume": resume, "--accept": accept} if dry_run else {"--device-memory": device_memory}
        raise typer.Exit(_verb("dry").run(recipe, sets or [], allow or [], ranks, device_memory, only))
    raise typer.Exit(_verb("train").run(recipe, sets or [], out, resume, accept or [], allow or [], ranks))


@app.command()
def verify(
    recipe: Recipe,
    plans: Annotated[
        list[str] | None,
        typer.Option("--plan", metavar="AXIS=SIZE,…", help="A layout, e.g. shard=2,tensor=2. Repeatable."),
    ] = None,
    check_all: Annotated[bool, typer.Option("--all", help="Every layout that the recipe allows.")] = False,
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Processes at most.")] = 8,
    sets: Sets = None,
    allow: Allow = None,
) -> None:
    """Prove that layouts train the same model as one process, on this machine's CPU."""
    raise typer.Exit(_verb("verify").run(recipe, plans or [], check_all, ranks, sets or [], allow or []))


@app.command()
def recipes() -> None:
    """List the shipped recipes with their size, cost and expected time on this machine."""
    _verb("recipes").run()


@app.command()
def diff(left: Recipe, right: Recipe, allow: Allow = None) -> None:
    """Print what differs between two runs or recipes."""
    _verb("diff").run(left, right, allow or [])


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="One run folder, or several to overlay.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="The page to write; report.html in the first run by default.")
    ] = None,
) -> None:
    """Write one self-contained HTML page about a run, or several overlaid."""
    _verb("report").run(runs, out)


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    prompt: Annotated[str, typer.Option("--prompt", help="Text to continue.")] = "",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="New tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option("--top-k", help="Draw from the k likeliest only.")] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="Draw from the smallest set that holds this share.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the drawing.")] = 0,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Read the whole text again for every token (same tokens, slower).")
    ] = False,
    step: Annotated[int | None, typer.Option("--step", help="Which checkpoint; the newest by default.")] = None,
    allow: Allow = None,
) -> None:
    """Continue a prompt with a trained run."""
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    _verb("generate").run(run, prompt, tokens, sampling, not no_cache, step, allow or [])


@data_app.command("inspect")
def data_inspect(
    recipe: Recipe,
    step: Annotated[int | None, typer.Option("--step", min=1, help="Show what this step trains on, decoded.")] = None,
    document: Annotated[
        str | None, typer.Option("--document", help="Name the steps that train on this document.")
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Samples of the step to show.")] = 4,
    sets: Sets = None,
    allow: Allow = None,
) -> None:
    """Decode any step's batch, or name the steps that see a document."""
    _verb("data").inspect(recipe, sets or [], step, document, rows, allow or [])


def _verb(name: str) -> ModuleType:
    # OpenMP threads spin at every barrier; when another process takes a core, the others spin through its whole time
    # slice and a step takes 20 times as long (measured: 0.5 s to 11 s). A short spin costs nothing on a quiet machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    return importlib.import_module(f"surefoot.cli.verbs.{name}")


def main() -> NoReturn:
    """Run the command line; an error the user can mend is one line on stderr and exit code 2."""
    try:
        app()
    except SurefootError as error:
        _fail(str(error))
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # so that closing stdout at exit does not complain
        sys.exit(141)
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        _fail(f"{error.filename or 'output'}: {error.strerror or error}; nothing already saved was damaged")
    sys.exit(0)


def _fail(line: str) -> NoReturn:
    print("surefoot: " + " ".join(line.split()), file=sys.stderr)
    sys.exit(2)
