"""`surefoot launch`: check a run over nodes as `surefoot train` would, write its job file, and hand that over on request."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, cast

from surefoot.cli.verbs.train import Choice, choose, numbered
from surefoot.config import ConfigError, RunError, override
from surefoot.dist.jobs import kubernetes as kubernetes_job
from surefoot.dist.jobs import slurm as slurm_job
from surefoot.dist.jobs import torchrun as torchrun_job
from surefoot.dist.jobs.job import MARGIN, Job
from surefoot.parallel.apply import check
from surefoot.recipes.find import find_recipe

PORT = 29500
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"


@dataclass(frozen=True)
class Request:
    """What all targets take from the command line."""

    recipe: str
    sets: list[str]
    allow: list[str]
    nodes: int
    ranks_per_node: int
    out: Path | None
    job_name: str | None
    write: Path | None
    submit: bool
    max_restarts: int
    cpus_per_rank: int
    grace: int

    def __post_init__(self) -> None:
        for flag, value, least, remedy in (
            ("--nodes", self.nodes, 1, "a run needs at least one node"),
            ("--ranks-per-node", self.ranks_per_node, 1, "a node needs at least one rank"),
            ("--cpus-per-rank", self.cpus_per_rank, 1, "a rank needs at least one CPU"),
            ("--max-restarts", self.max_restarts, 0, "0 means that a failed rank ends the job"),
            ("--grace", self.grace, 2 * MARGIN, "a step and a checkpoint must fit into these seconds"),
        ):
            if value < least:
                raise ConfigError(flag, value, f"must be at least {least}: {remedy}")
        words = {"RECIPE": [self.recipe], "--set": self.sets, "--allow": self.allow}
        for flag, texts in (words | {"--out": [str(self.out)], "--write": [str(self.write)]}).items():
            for text in texts:
                if not text.isascii() and text != text.encode(errors="replace").decode():
                    raise ConfigError(flag, text, "is not UTF-8, which a job file is written in")

    @property
    def num_ranks(self) -> int:
        """Ranks on all nodes."""
        return self.nodes * self.ranks_per_node


def slurm(*, time: str | None, partition: str | None, account: str | None, **options: Any) -> None:
    """Write an sbatch script and submit it on request."""
    request = _request(options)
    further = {}
    if time is not None:
        if _seconds(time) <= request.grace:
            raise ConfigError("--time", time, f"must be longer than --grace, {request.grace} seconds")
        further["time"] = time
    for name, value in (("partition", partition), ("account", account)):
        if value is not None:
            further[name] = _named(f"--{name}", value, r"[\w.@:+,-]+", "letters, digits and . _ - @ : + ,")
    choice = _choose(request, request.out and request.out.absolute(), ".sbatch")
    if bad := next((character for character in slurm_job.FORBIDDEN if character in str(choice.path)), None):
        raise ConfigError("--out", str(choice.path), f"a path of Slurm's logs cannot hold {bad!r}; choose another")
    name = _shell_name(request, choice)
    job = _job(request, name, str(choice.path), sys.executable, _gpus(request, choice))
    text = slurm_job.script(job, str(Path.cwd()), further)
    file = _output(request, Path(f"{choice.path}.sbatch"))
    _require(request, "sbatch")
    _announce(request, choice, choice.path)
    _write(file, text, choice.path / "logs")
    _submit(request, ["sbatch", str(file)])


def kubernetes(
    *,
    image: str | None,
    volume_claim: str | None,
    kind: str,
    namespace: str | None,
    mount: str,
    **options: Any,
) -> None:
    """Write a manifest and apply it on request."""
    if kind == "trainjob" and options["grace"] is not None:
        raise ConfigError(
            "--grace",
            options["grace"],
            "cannot be set by a TrainJob, only by its runtime; drop it or use --kind jobset",
        )
    # What Kubernetes gives a pod where nothing else is said, and what is said for a JobSet.
    if options["grace"] is None:
        options["grace"] = 30 if kind == "trainjob" else 120
    request = _request(options)
    if kind not in {"trainjob", "jobset"}:
        raise ConfigError("--kind", kind, "must be trainjob (Kubeflow Trainer) or jobset")
    if image is None:
        raise ConfigError("--image", None, "is missing; name a container image that has python and surefoot")
    if volume_claim is None:
        raise ConfigError(
            "--volume-claim", None, "is missing; name a PersistentVolumeClaim that all pods can write (ReadWriteMany)"
        )
    _named("--image", image, r"[^\s\x00-\x1f\x7f]+", "characters other than spaces and control characters")
    _named("--volume-claim", volume_claim, rf"{_LABEL}(\.{_LABEL})*", "lower-case letters, digits, - and .")
    if namespace is not None:
        _named("--namespace", namespace, _LABEL, "lower-case letters, digits and -")
    if (
        not mount.startswith("/")
        or ":" in mount
        or ".." in PurePosixPath(mount).parts
        or PurePosixPath(mount) == PurePosixPath("/")
    ):
        raise ConfigError("--mount", mount, "must be an absolute path without : and .. for the volume in the pods")
    found = override(find_recipe(request.recipe, request.allow), request.sets)
    name = request.job_name or re.sub(r"[^a-z0-9]+", "-", found.name.lower()).strip("-")[:40].strip("-")
    # Pods are called NAME-node-0-17-x7k2p, in 63 characters.
    _named(
        "--job-name", name, r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", "40 lower-case letters, digits and -, a letter first"
    )
    folder = PurePosixPath(request.out or PurePosixPath(mount) / "runs" / name)
    if not folder.is_relative_to(mount) or folder == PurePosixPath(mount) or ".." in folder.parts:
        raise ConfigError(
            "--out",
            str(folder),
            f"is outside the volume at {mount} and would be lost with its pod; choose a path in it",
        )
    if _is_file(request.recipe) and not request.recipe.startswith("/"):
        raise ConfigError(
            "RECIPE", request.recipe, "the pods have no such folder; give the absolute path it has in the image"
        )
    # The folder lies in the volume, which cannot be seen from here; the job itself refuses to continue another run.
    choice = choose(
        request.recipe,
        request.sets,
        None,
        None,
        [],
        request.allow,
        _ranks(request, found.plan.num_ranks),
        goes_on=False,
    )
    check(choice.run.plan, choice.run.model, choice.run.data.sequence_length, choice.run.precision)
    cache = f"{mount.rstrip('/')}/cache"
    job = _job(request, name, str(folder), "python", _gpus(request, choice), SUREFOOT_CACHE=cache)
    place = kubernetes_job.Place(image, volume_claim, mount, namespace)
    text = kubernetes_job.manifest(job, place, cast(kubernetes_job.Kind, kind))
    file = _output(request, Path(f"{name}.yaml"))
    _require(request, "kubectl")
    _announce(request, choice, folder)
    if kind == "trainjob":
        print(
            "needs Kubeflow Trainer 2.2 or later and its runtime torch-distributed; lost pods are its runtime's matter"
        )
    _write(file, text, None)
    _submit(request, ["kubectl", "apply", "-f", str(file)])


def torchrun(*, head: str | None, **options: Any) -> None:
    """Write a script for each node, and run it here on request where there is one node."""
    request = _request(options)
    if head is None and request.nodes > 1:
        raise ConfigError("--head", None, "is missing; name the node at which the others meet, HOST or HOST:PORT")
    endpoint = "localhost:0" if head is None else _endpoint(head)
    if request.submit and request.nodes > 1:
        raise ConfigError("--submit", True, "starts one node, this one; run the written script on every node instead")
    choice = _choose(request, request.out and request.out.absolute(), ".sh")
    job = _job(request, _shell_name(request, choice), str(choice.path), sys.executable, gpus=0)
    text = torchrun_job.script(job, endpoint, str(Path.cwd()))
    file = _output(request, Path(f"{choice.path}.sh"))
    _require(request, "bash")
    _announce(request, choice, choice.path)
    _write(file, text, choice.path / "logs")
    command = ["bash", str(file)]
    if request.submit:
        _become(command)
    where = "this node" if request.nodes == 1 else f"each of the {request.nodes} nodes"
    print(f"run it on {where}: {shlex.join(command)}")


# -- before anything is written --------------------------------------------------------------------------------------


def _request(options: Mapping[str, Any]) -> Request:
    """What the command line gave; a list that was not given is empty."""
    return Request(**{**options, "sets": options["sets"] or [], "allow": options["allow"] or []})


def _choose(request: Request, out: Path | None, suffix: str) -> Choice:
    """The run as the job will find it, checked, and a folder whose name and whose file's name are free."""
    found = override(find_recipe(request.recipe, request.allow), request.sets)
    if out is None:
        paths = numbered(found.name)
        out = next(path for path in paths if not path.exists() and not Path(f"{path}{suffix}").exists()).absolute()
    ranks = _ranks(request, found.plan.num_ranks)
    choice = choose(request.recipe, request.sets, out, None, [], request.allow, ranks, goes_on=True)
    check(choice.run.plan, choice.run.model, choice.run.data.sequence_length, choice.run.precision)
    if choice.is_new and out.exists() and (not out.is_dir() or {entry.name for entry in out.iterdir()} - {"logs"}):
        raise RunError(f"{out}: already exists and is no run; give --out another name")
    return choice


def _ranks(request: Request, needed: int) -> int:
    if request.num_ranks == 1 and needed > 1:
        raise ConfigError("--nodes", request.nodes, f"x --ranks-per-node 1 is one rank, and the plan needs {needed}")
    return request.num_ranks


def _gpus(request: Request, choice: Choice) -> int:
    """GPUs to ask for on each node."""
    device = choice.run.train.device
    if device == "auto":
        raise ConfigError(
            "train.device", device, "a job file says what to ask for; add --set train.device=cuda or =cpu"
        )
    if ":" in device and request.ranks_per_node > 1:
        raise ConfigError("train.device", device, "is one device for all ranks of a node; use cuda")
    return request.ranks_per_node if device.startswith("cuda") else 0


def _job(request: Request, name: str, folder: str, python: str, gpus: int, **variables: str) -> Job:
    if cache := os.environ.get("SUREFOOT_CACHE"):
        variables = {"SUREFOOT_CACHE": str(Path(cache).expanduser().absolute())} | variables
    recipe = request.recipe
    if _is_file(recipe):
        file, colon, function = recipe.rpartition(":") if not Path(recipe).exists() else (recipe, "", "")
        recipe = f"{Path(file).absolute()}{colon}{function}"
    arguments = ["train", recipe, "--out", folder, "--continue"]
    arguments += [word for assignment in request.sets for word in ("--set", assignment)]
    arguments += [word for package in request.allow for word in ("--allow", package)]
    return Job(
        name=name,
        num_nodes=request.nodes,
        ranks_per_node=request.ranks_per_node,
        gpus_per_node=gpus,
        cpus_per_rank=request.cpus_per_rank,
        python=python,
        arguments=tuple(arguments),
        folder=folder,
        variables=variables,
        max_restarts=request.max_restarts,
        grace=request.grace,
    )


def _is_file(recipe: str) -> bool:
    """Whether a recipe is read from a path: a folder, a run.json or file.py:function."""
    return Path(recipe).is_dir() or Path(recipe).suffix == ".json" or ".py:" in recipe


def _shell_name(request: Request, choice: Choice) -> str:
    return _named("--job-name", request.job_name or choice.run.name, r"[\w.-]+", "letters, digits and . _ -")


def _named(flag: str, value: str, pattern: str, remedy: str) -> str:
    if not re.fullmatch(pattern, value, re.ASCII) or value.startswith("-"):
        raise ConfigError(flag, value, f"takes {remedy} only")
    return value


def _seconds(time: str) -> int:
    """Seconds of M, M:S, H:M:S, D-H, D-H:M or D-H:M:S, as sbatch reads them."""
    match = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?", time, re.ASCII)
    if match is None:
        raise ConfigError("--time", time, "is no time limit of Slurm; write HH:MM:SS or DAYS-HH:MM:SS")
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    units = (3600, 60, 1) if days is not None else {1: (60, 0, 0), 2: (60, 1, 0), 3: (3600, 60, 1)}[len(numbers)]
    return int(days or 0) * 86400 + sum(number * unit for number, unit in zip(numbers, units, strict=False))


def _endpoint(head: str) -> str:
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?", head, re.ASCII)
    if match is None or head.startswith("-") or not 0 < int(match[2] or PORT) < 65536:
        raise ConfigError("--head", head, "must be HOST or HOST:PORT; [ADDRESS]:PORT for IPv6")
    return f"{match[1]}:{match[2] or PORT}"


def _require(request: Request, command: str) -> None:
    if request.submit and shutil.which(command) is None:
        raise ConfigError(
            "--submit", True, f"there is no {command} here; drop --submit and hand the file over where there is one"
        )


def _output(request: Request, default: Path) -> Path:
    file = (request.write or default).absolute()
    if file.exists():
        raise ConfigError("--write", str(file), "already exists; name another file, or delete it")
    if not file.parent.is_dir() and request.write is not None:
        raise ConfigError("--write", str(file), "its folder does not exist; make it first")
    return file


# -- writing and handing over ----------------------------------------------------------------------------------------


def _announce(request: Request, choice: Choice, folder: Path | PurePosixPath) -> None:
    verb = "" if choice.is_new else "continues "
    layout = choice.run.plan.describe()
    print(f"{choice.run.name} -> {verb}{folder}: {layout}, {request.nodes} x {request.ranks_per_node} ranks")
    for line in choice.changes:
        print(line)
    if _is_file(request.recipe):
        print(f"{request.recipe}: every node reads it and must find it at its absolute path")


def _write(file: Path, text: str, logs: Path | None) -> None:
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)  # Slurm drops a job's output where the folder is not there
    with file.open("x", encoding="utf-8", newline="\n") as stream:
        stream.write(text)
    print(f"wrote {file}")


def _submit(request: Request, command: list[str]) -> None:
    if not request.submit:
        print(f"submit it with: {shlex.join(command)}")
        return
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or "it said nothing"
        raise RunError(
            f"{' '.join(command)}: exit code {done.returncode}: {said}; the file is written, try again with it"
        )
    print(done.stdout.strip())


def _become(command: list[str]) -> NoReturn:
    """Be that command from here on, so that signals reach it."""
    sys.stdout.flush()
    os.execvp(command[0], command)
