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
launch_app = typer.Typer(help="Write the job file of a run over several nodes, and submit it.", no_args_is_help=True)
app.add_typer(launch_app, name="launch")
bench_app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

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
Nodes = Annotated[int, typer.Option("--nodes", help="Machines.")]
RanksPerNode = Annotated[int, typer.Option("--ranks-per-node", help="Processes a machine; as many as it has GPUs.")]
RunOut = Annotated[
    Path | None, typer.Option("--out", help="The run folder, to start or to continue; on a disk that all nodes share.")
]
JobName = Annotated[str | None, typer.Option("--job-name", help="The recipe's name by default.")]
Write = Annotated[Path | None, typer.Option("--write", metavar="FILE", help="The file; beside the run by default.")]
Submit = Annotated[bool, typer.Option("--submit", help="Hand the file over as well.")]
MaxRestarts = Annotated[int, typer.Option("--max-restarts", help="How often failed ranks are started again.")]
CpusPerRank = Annotated[int, typer.Option("--cpus-per-rank", help="CPUs, and compute threads, of each process.")]
Grace = Annotated[int, typer.Option("--grace", metavar="SECONDS", help="From the signal to stop to the end.")]


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
    goes_on: Annotated[
        bool,
        typer.Option("--continue", help="With --out: start the run, or continue it where the folder holds it already."),
    ] = False,
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
        only: dict[str, object] = {"--out": out, "--resume": resume, "--accept": accept, "--continue": goes_on or None}
        if not dry_run:
            only = {"--device-memory": device_memory}
        raise typer.Exit(_verb("dry").run(recipe, sets or [], allow or [], ranks, device_memory, only))
    raise typer.Exit(_verb("train").run(recipe, sets or [], out, resume, accept or [], allow or [], ranks, goes_on))


@app.command()
def verify(
    recipe: Annotated[
        str | None,
        typer.Argument(help="As for `train`; with --blocks, the one block to check."),
    ] = None,
    plans: Annotated[
        list[str] | None,
        typer.Option("--plan", metavar="AXIS=SIZE,…", help="A layout, e.g. shard=2,tensor=2. Repeatable."),
    ] = None,
    check_all: Annotated[bool, typer.Option("--all", help="Every layout that the recipe allows.")] = False,
    blocks: Annotated[
        bool, typer.Option("--blocks", help="Instead of layouts: every contract of every block, as one table.")
    ] = False,
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Processes at most.")] = 8,
    compute: Annotated[
        str, typer.Option("--compute", help="fp64: to the last digits; bf16: as far from fp64 as one process is.")
    ] = "fp64",
    sets: Sets = None,
    allow: Allow = None,
) -> None:
    """Prove that layouts train the same model as one process, or that blocks keep their contracts, on this machine's CPU."""
    if blocks:
        raise typer.Exit(_verb("contracts").run(recipe))
    if recipe is None:
        raise typer.BadParameter("give a recipe, or --blocks", param_hint="RECIPE")
    raise typer.Exit(_verb("verify").run(recipe, plans or [], check_all, ranks, sets or [], allow or [], compute))


@app.command()
def precision(
    recipe: Recipe,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format", metavar="NAME", help="bf16, or what precision.products may be. Repeat; all by default."
        ),
    ] = None,
    sets: Sets = None,
    allow: Allow = None,
) -> None:
    """Say what each number format does to every product of a model and to its loss, on this machine's CPU."""
    _verb("precision").run(recipe, formats or [], sets or [], allow or [])


@app.command()
def profile(
    recipe: Recipe,
    steps: Annotated[int, typer.Option("--steps", help="Steps timed whole, and as many by part.")] = 5,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="One more step as a Chrome trace (chrome://tracing).")
    ] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", min=1, help="As for `train`; rank 0 speaks.")] = None,
    sets: Sets = None,
    allow: Allow = None,
) -> None:
    """Show where a training step goes, by phase, part and layer, against what this machine can do."""
    raise typer.Exit(_verb("profile").run(recipe, steps, trace, ranks, sets or [], allow or []))


@app.command()
def recipes() -> None:
    """List the shipped recipes with their size, cost and expected time on this machine."""
    _verb("recipes").run()


@app.command()
def cost(
    recipes: Annotated[
        list[str] | None, typer.Argument(metavar="RECIPE…", help="Recipes or run folders, side by side.")
    ] = None,
    context: Annotated[
        str, typer.Option("--context", metavar="N,…", help="Positions that a sequence holds; 4k is 4,096.")
    ] = "4k,32k,128k",
    batch: Annotated[str, typer.Option("--batch", metavar="N,…", help="Sequences decoded together.")] = "1,16,64",
    device: Annotated[
        str, typer.Option("--device", help="a100, h100, h200, b200, l40s, mi300x, or memory,FLOP/s,bytes/s.")
    ] = "h100",
    devices: Annotated[int, typer.Option("--devices", min=1, help="Devices that share weights and states.")] = 1,
    dtype: Annotated[str, typer.Option("--dtype", help="Of weights and states: bf16, fp16, fp32 or fp8.")] = "bf16",
    runs: Annotated[
        list[Path] | None, typer.Option("--runs", metavar="RUN", help="A run folder: its loss stands beside its cost.")
    ] = None,
    allow: Allow = None,
) -> None:
    """What models cost to serve: state bytes, the largest batch, prefill and decode times."""
    _verb("cost").run(recipes or [], context, batch, device, devices, dtype, runs or [], allow or [])


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


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    tasks: Annotated[str, typer.Option("--tasks", help="Names of lm-eval's tasks, as in arc_easy,lambada_openai.")],
    task_files: Annotated[
        Path | None, typer.Option("--task-files", metavar="DIR", help="A folder of own task files of lm-eval.")
    ] = None,
    shots: Annotated[int | None, typer.Option("--shots", min=0, help="Examples before each question.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Questions a task at most.")] = None,
    length: Annotated[
        int | None, typer.Option("--length", min=2, help="Tokens in sight; those it was trained on by default.")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="Which checkpoint; the newest by default.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write all results here as JSON.")] = None,
    allow: Allow = None,
) -> None:
    """Ask a trained run lm-eval's questions (extra eval), without an export."""
    _verb("evaluate").run(run, tasks, task_files, shots, limit, length, step, out, allow or [])


@app.command("import")
def import_(
    source: Annotated[
        str, typer.Argument(metavar="DIR|ID", help="A folder as the Hugging Face hub has it, or a name there.")
    ],
    out: Annotated[Path | None, typer.Option("--out", help="The run folder to make; runs/NAME by default.")] = None,
    sets: Sets = None,
) -> None:
    """Turn a published model into a run: to generate with, or to fine-tune with train --resume."""
    _verb("import_").run(source, out, sets or [])


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", help="A run folder, or one of its checkpoints.")],
    to: Annotated[str, typer.Option("--to", help="hf (transformers, vLLM) or gguf (llama.cpp).")],
    out: Annotated[Path | None, typer.Option("--out", help="The folder to make; RUN/exported/TO by default.")] = None,
    family: Annotated[
        str | None, typer.Option("--family", help="The architecture there; found by what the model is by default.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, or what an imported model was saved in, by default.")
    ] = None,
    allow: Allow = None,
) -> None:
    """Write a model for other programs, and check that it is the same there."""
    _verb("export").run(run, to, out, family, dtype, allow or [])


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


@bench_app.command("decode")
def bench_decode(
    recipe: Recipe,
    context: Annotated[
        str, typer.Option("--context", metavar="N,…", help="Positions before the first step; 4k is 4,096.")
    ] = "256,1k,4k",
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences decoded together.")] = 1,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Tokens decoded after each context.")] = 32,
    dtype: Annotated[str, typer.Option("--dtype", help="Of weights and states: bf16, fp16 or fp32.")] = "fp32",
    allow: Allow = None,
) -> None:
    """Milliseconds a token and bytes held against the context."""
    _verb("bench").decode(recipe, context, batch, steps, dtype, allow or [])


@bench_app.command("cache")
def bench_cache(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    samples: Annotated[int, typer.Option("--samples", min=1, help="Held-out sequences to read.")] = 32,
    step: Annotated[int | None, typer.Option("--step", help="Which checkpoint; the newest by default.")] = None,
    allow: Allow = None,
) -> None:
    """What keys and values in int8 or fp8 change of a trained run's loss, and the bytes they save."""
    _verb("bench").cache(run, samples, step, allow or [])


@launch_app.command("slurm")
def launch_slurm(
    recipe: Recipe,
    nodes: Nodes,
    ranks_per_node: RanksPerNode,
    sets: Sets = None,
    allow: Allow = None,
    out: RunOut = None,
    job_name: JobName = None,
    write: Write = None,
    submit: Submit = False,
    max_restarts: MaxRestarts = 3,
    cpus_per_rank: CpusPerRank = 4,
    grace: Grace = 120,
    time: Annotated[str | None, typer.Option("--time", metavar="HH:MM:SS", help="The time limit.")] = None,
    partition: Annotated[str | None, typer.Option("--partition", help="As sbatch has it.")] = None,
    account: Annotated[str | None, typer.Option("--account", help="As sbatch has it.")] = None,
) -> None:
    """An sbatch script: torchrun on each node, a checkpoint before the time limit, then the queue again."""
    _verb("launch").slurm(**locals())


@launch_app.command("kubernetes")
def launch_kubernetes(
    recipe: Recipe,
    nodes: Nodes,
    ranks_per_node: RanksPerNode,
    sets: Sets = None,
    allow: Allow = None,
    out: RunOut = None,
    job_name: JobName = None,
    write: Write = None,
    submit: Submit = False,
    max_restarts: MaxRestarts = 3,
    cpus_per_rank: CpusPerRank = 4,
    grace: Annotated[
        int | None, typer.Option("--grace", metavar="SECONDS", help="JobSet: from SIGTERM to the end.")
    ] = None,
    image: Annotated[str | None, typer.Option("--image", help="Has python and surefoot.")] = None,
    volume_claim: Annotated[
        str | None, typer.Option("--volume-claim", metavar="PVC", help="Holds run folders and cache.")
    ] = None,
    kind: Annotated[str, typer.Option("--kind", help="trainjob (Kubeflow Trainer) or jobset.")] = "trainjob",
    namespace: Annotated[str | None, typer.Option("--namespace", help="Of the job.")] = None,
    mount: Annotated[str, typer.Option("--mount", help="Where the pods see the volume.")] = "/surefoot",
) -> None:
    """A manifest: a Kubeflow TrainJob or a JobSet, one pod a node."""
    _verb("launch").kubernetes(**locals())


@launch_app.command("torchrun")
def launch_torchrun(
    recipe: Recipe,
    nodes: Nodes,
    ranks_per_node: RanksPerNode,
    sets: Sets = None,
    allow: Allow = None,
    out: RunOut = None,
    job_name: JobName = None,
    write: Write = None,
    submit: Submit = False,
    max_restarts: MaxRestarts = 3,
    cpus_per_rank: CpusPerRank = 4,
    grace: Grace = 120,
    head: Annotated[
        str | None, typer.Option("--head", metavar="HOST[:PORT]", help="The node at which the others meet.")
    ] = None,
) -> None:
    """A shell script to run on each node; with one node, --submit runs it here."""
    _verb("launch").torchrun(**locals())


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
