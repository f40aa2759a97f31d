"""`surefoot launch`: what it refuses, what it writes, and that what it writes trains and continues."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from surefoot.config import to_json
from surefoot.train.run import Run

Command = Callable[..., tuple[int, str, str]]
Stub = Callable[[str, str], Path]

SLURM = ("slurm", "TINY", "--nodes", "2", "--ranks-per-node", "2", "--set", "train.device=cpu")
TORCHRUN = ("torchrun", "TINY", "--nodes", "2", "--ranks-per-node", "2")
KUBERNETES = (
    *("kubernetes", "quickstart", "--nodes", "2", "--ranks-per-node", "2", "--set", "train.device=cuda"),
    *("--image", "registry/a:1", "--volume-claim", "claim"),
)


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """Put a command of our own on PATH, before all others."""
    place = tmp_path / "bin"
    place.mkdir()
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")

    def make(name: str, text: str) -> Path:
        (place / name).write_text(text)
        (place / name).chmod(0o755)
        return place / name

    return make


def everything(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((*SLURM, "--nodes", "0"), ("--nodes: 0", "at least 1")),
        ((*SLURM, "--ranks-per-node", "-1"), ("--ranks-per-node: -1",)),
        ((*SLURM, "--cpus-per-rank", "0"), ("--cpus-per-rank: 0",)),
        ((*SLURM, "--max-restarts", "-1"), ("--max-restarts: -1",)),
        ((*SLURM, "--grace", "1"), ("--grace: 1",)),
        ((*SLURM, "--time", "soon"), ("--time: 'soon'", "HH:MM:SS")),
        ((*SLURM, "--time", "1:2:3:4"), ("--time: '1:2:3:4'",)),
        ((*SLURM, "--time", "0"), ("--time: '0'", "longer than --grace")),
        ((*SLURM, "--time", "00:02:00"), ("--time", "longer than --grace, 120")),
        ((*SLURM, "--partition", "gpu; rm -rf /"), ("--partition: 'gpu; rm -rf /'", "only")),
        ((*SLURM, "--account", "a\n#SBATCH --exclusive"), ("--account",)),
        ((*SLURM, "--account", "-x"), ("--account: '-x'",)),
        ((*SLURM, "--job-name", "a b"), ("--job-name: 'a b'",)),
        ((*SLURM, "--out", 'say "so"'), ("--out", "cannot hold")),
        ((*SLURM, "--out", "two\nlines"), ("--out", "cannot hold")),
        ((*SLURM, "--out", "a\udcff"), ("--out", "not UTF-8")),
        ((*KUBERNETES, "--set", "name=a\udcff"), ("--set", "not UTF-8")),
        ((*SLURM, "--set", "train.device=auto"), ("train.device: 'auto'", "train.device=cuda")),
        ((*SLURM, "--set", "train.device=cuda:1"), ("train.device: 'cuda:1'", "use cuda")),
        ((*SLURM, "--set", "plan.tensor=3"), ("plan", "needs 3 ranks", "divide the 4")),
        ((*SLURM, "--set", "plan.tensor=4"), ("plan.tensor: 4", "must divide")),
        ((*SLURM, "--set", "optim.lrr=1"), ("optim.lrr", "did you mean optim.lr?")),
        ((*SLURM, "--nodes", "4"), ("train.batch: 4", "must divide")),
        (
            (*SLURM, "--nodes", "1", "--ranks-per-node", "1", "--set", "plan.tensor=2"),
            ("--nodes: 1", "the plan needs 2"),
        ),
        ((*SLURM, "--write", "OTHER"), ("--write", "already exists")),
        ((*SLURM, "--write", "no/such/place"), ("--write", "folder does not exist")),
        ((*SLURM, "--out", "FULL"), ("already exists and is no run", "--out")),
        ((*SLURM, "--submit"), ("--submit", "no sbatch here")),
        (("slurm", "nothing", "--nodes", "1", "--ranks-per-node", "1"), ("RECIPE: 'nothing'",)),
        (TORCHRUN, ("--head: None", "HOST")),
        ((*TORCHRUN, "--head", "a b"), ("--head: 'a b'",)),
        ((*TORCHRUN, "--head", "a:99999"), ("--head: 'a:99999'",)),
        ((*TORCHRUN, "--head", "-a"), ("--head: '-a'",)),
        ((*TORCHRUN, "--head", "$(id)"), ("--head",)),
        ((*TORCHRUN, "--head", "a", "--submit"), ("--submit", "every node")),
        ((*KUBERNETES[:8],), ("--image: None", "name a container image")),
        ((*KUBERNETES[:10],), ("--volume-claim: None",)),
        ((*KUBERNETES, "--image", "a b"), ("--image: 'a b'",)),
        ((*KUBERNETES, "--image", "a\n  b: c"), ("--image",)),
        ((*KUBERNETES, "--volume-claim", "Claim"), ("--volume-claim: 'Claim'",)),
        ((*KUBERNETES, "--namespace", "a.b"), ("--namespace: 'a.b'",)),
        ((*KUBERNETES, "--job-name", "Big"), ("--job-name: 'Big'",)),
        ((*KUBERNETES, "--job-name", "a" * 41), ("--job-name",)),
        ((*KUBERNETES, "--kind", "job"), ("--kind: 'job'", "jobset")),
        ((*KUBERNETES, "--mount", "work"), ("--mount: 'work'",)),
        ((*KUBERNETES, "--out", "/tmp/x"), ("--out: '/tmp/x'", "outside the volume")),
        ((*KUBERNETES, "--out", "/surefoot/../x"), ("--out", "outside the volume")),
        ((*KUBERNETES, "--grace", "60"), ("--grace: 60", "jobset")),
        ((*KUBERNETES, "--kind", "jobset", "--grace", "0"), ("--grace: 0", "at least 20")),
        ((*KUBERNETES, "--submit"), ("--submit", "no kubectl here")),
        (("kubernetes", "tiny.json", *KUBERNETES[2:]), ("RECIPE: 'tiny.json'", "absolute path")),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_written(
    command: Command,
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    parts: tuple[str, ...],
) -> None:
    Path("tiny.json").write_text(saved.read_text())
    Path("full").mkdir()
    Path("full/notes.txt").touch()
    monkeypatch.setenv("PATH", "/nowhere")
    before = everything(tmp_path)
    words = {"TINY": str(saved), "OTHER": "tiny.json", "FULL": "full"}
    code, _, error = command("launch", *(words.get(word, word) for word in arguments))
    assert code == 2
    assert error.startswith("surefoot: ")
    assert error.count("\n") == 1
    for part in parts:
        assert part in error
    assert everything(tmp_path) == before


def test_slurm_writes_what_was_asked_for(command: Command, saved: Path, tmp_path: Path) -> None:
    arguments = [str(saved) if word == "TINY" else word for word in SLURM]
    code, out, error = command(
        *("launch", *arguments, "--time", "1-0", "--partition", "a,b", "--account", "me@x", "--set", "train.batch=8"),
        *("--out", "my runs/one", "--allow", "torch"),
    )
    assert code == 0, error
    file = Path("my runs/one.sbatch").absolute()
    assert f"tiny -> {Path('my runs/one').absolute()}: shard 4, ZeRO-3, 2 x 2 ranks" in out
    assert f"wrote {file}" in out
    assert f"submit it with: sbatch {shlex.quote(str(file))}" in out
    assert f"{saved}: every node reads it" in out
    text = file.read_text()
    for line in ("--time=1-0", "--partition=a,b", "--account=me@x", "--job-name=tiny"):
        assert f"#SBATCH {line}\n" in text
    assert f'#SBATCH --output="{Path("my runs/one").absolute()}/logs/slurm-%j.out"' in text
    words = shlex.split(text[text.index("\nsrun") : text.index("&\nstep=")].replace("\\\n", " "))
    train = words[words.index("train") :]
    assert train[:5] == ["train", str(saved), "--out", str(Path("my runs/one").absolute()), "--continue"]
    assert train[5:] == ["--set", "train.device=cpu", "--set", "train.batch=8", "--allow", "torch"]
    assert {path.name for path in Path("my runs/one").iterdir()} == {"logs"}
    assert "already exists" in command("launch", *arguments, "--out", "my runs/one")[2]


def test_a_second_launch_takes_the_next_name(command: Command, saved: Path) -> None:
    arguments = [str(saved) if word == "TINY" else word for word in (*TORCHRUN, "--head", "[::1]:7000")]
    for number in (1, 2):
        assert command("launch", *arguments)[0] == 0
        assert "--rdzv-endpoint '[::1]:7000'" in Path(f"runs/tiny-{number}.sh").read_text()


def test_launching_into_a_run_continues_it_or_refuses_another(command: Command, saved: Path) -> None:
    assert command("train", saved, "--out", "run")[0] == 0
    arguments = [str(saved) if word == "TINY" else word for word in (*SLURM, "--out", "run")]
    code, out, error = command("launch", *arguments)
    assert code == 0, error
    assert f"tiny -> continues {Path('run').absolute()}" in out
    assert "changed plan.shard: 1 -> 4" in out
    code, _, error = command("launch", *arguments, "--write", "other", "--set", "optim.lr=1")
    assert code == 2
    assert "makes another run" in error
    assert not Path("other").exists()


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_kubernetes_writes_what_was_asked_for(command: Command, kind: str) -> None:
    extra = () if kind == "trainjob" else ("--grace", "300")
    code, out, error = command("launch", *KUBERNETES, "--kind", kind, "--mount", "/work", "--write", "a.yaml", *extra)
    assert code == 0, error
    assert "quickstart -> /work/runs/quickstart: shard 4, ZeRO-3, 2 x 2 ranks" in out
    text = Path("a.yaml").read_text()
    value = yaml.safe_load(text)
    assert value["kind"].lower() == kind
    assert "nvidia.com/gpu: 2" in text
    pods = value["spec"]["trainer"] if kind == "trainjob" else value["spec"]["replicatedJobs"][0]["template"]["spec"]
    if kind == "jobset":
        assert pods["template"]["spec"]["terminationGracePeriodSeconds"] == 300
        (pods,) = pods["template"]["spec"]["containers"]
    train = pods["command"][pods["command"].index("train") :]
    assert train[:5] == ["train", "quickstart", "--out", "/work/runs/quickstart", "--continue"]
    assert {"name": "SUREFOOT_CACHE", "value": "/work/cache"} in pods["env"]
    assert not Path("runs").exists()


TELL = f"""#!{sys.executable}
import json, pathlib, sys
pathlib.Path(__file__).with_suffix(".json").write_text(json.dumps(sys.argv[1:]))
print("Submitted batch job 7" if sys.argv[-1] != "fail" else "")
"""


def test_submit_hands_the_file_over(command: Command, saved: Path, stub: Stub) -> None:
    arguments = [str(saved) if word == "TINY" else word for word in (*SLURM, "--submit")]
    told = stub("sbatch", TELL).with_suffix(".json")
    code, out, error = command("launch", *arguments, "--write", "a 'b' $(c).sbatch")
    assert code == 0, error
    assert "Submitted batch job 7" in out
    assert json.loads(told.read_text()) == [str(Path("a 'b' $(c).sbatch").absolute())]
    told = stub("kubectl", TELL).with_suffix(".json")
    assert command("launch", *KUBERNETES, "--submit")[0] == 0
    assert json.loads(told.read_text()) == ["apply", "-f", str(Path("quickstart.yaml").absolute())]
    stub("sbatch", "#!/bin/sh\necho 'invalid partition' >&2\nexit 3\n")
    code, _, error = command("launch", *arguments, "--write", "b.sbatch")
    assert code == 2
    assert "exit code 3: invalid partition" in error
    assert Path("b.sbatch").exists()


# -- what is written trains ------------------------------------------------------------------------------------------

STEPS = 200

SRUN = f"""#!{sys.executable}
'''srun as far as signals go: SIGTERM reaches every process of the step, torchrun and its ranks alike.'''
import os, pathlib, signal, subprocess, sys, time

words = sys.argv[1:]
while words[0].startswith("--"):
    del words[0]
child = subprocess.Popen(words, start_new_session=True)

def parents():
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            yield int(folder.name), int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            pass

def forward(number, frame):
    family, grown = {{child.pid}}, True
    while grown:
        more = {{pid for pid, parent in parents() if parent in family}} - family
        family, grown = family | more, bool(more)
    for pid in family - {{child.pid}}:
        os.kill(pid, number)
    time.sleep(0.05)
    os.kill(child.pid, number)

signal.signal(signal.SIGTERM, forward)
sys.exit(child.wait() if child.returncode is None else child.returncode)
"""

SCONTROL = f"""#!{sys.executable}
import pathlib, socket, sys
with open(pathlib.Path(__file__).with_suffix(".txt"), "a") as file:
    print(*sys.argv[1:], file=file)
if sys.argv[1] == "show":
    print("localhost")
"""


@pytest.fixture
def long_run(tiny: Callable[..., Run], tmp_path: Path) -> Path:
    file = tmp_path / "it's long.json"
    file.write_text(
        to_json(
            tiny(f"train.num_steps={STEPS}", "train.threads=1", "observe.evaluate_every=null", "checkpoint.every=50")
        )
    )
    return file


def lines(run: Path) -> list[dict[str, object]]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def assert_same_stream(command: Command, recipe: Path, run: Path, tmp_path: Path) -> None:
    """Every step once, on the tokens of one process, with its losses up to fp32 rounding."""
    assert command("train", recipe, "--out", tmp_path / "straight")[0] == 0
    straight, found = lines(tmp_path / "straight"), lines(run)
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    for line, wanted in zip(found, straight, strict=True):
        assert line["token_hash"] == wanted["token_hash"]
    assert found[0]["loss"] == pytest.approx(straight[0]["loss"], rel=1e-5)
    assert found[-1]["loss"] == pytest.approx(straight[-1]["loss"], rel=0.05)


def environment() -> dict[str, str]:
    """What Slurm sets, with a job number whose port, 20000 + number, is free."""
    for number in range(os.getpid() % 9000, 10000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", 20000 + number))
            break
    return os.environ | {"SLURM_JOB_ID": str(number), "SLURM_JOB_NODELIST": "localhost", "PYTHONPATH": str(ROOT)}


ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_slurm_script_trains_stops_at_the_limit_and_continues(
    command: Command, long_run: Path, stub: Stub, tmp_path: Path
) -> None:
    stub("srun", SRUN)
    asked = stub("scontrol", SCONTROL).with_suffix(".txt")
    options = ("--nodes", "1", "--ranks-per-node", "2", "--set", "train.device=cpu", "--cpus-per-rank", "1")
    run = Path("my run").absolute()
    code, _, error = command("launch", "slurm", long_run, *options, "--out", run)
    assert code == 0, error
    script = ["bash", f"{run}.sbatch"]
    variables = environment()
    with (tmp_path / "log.txt").open("wb") as log:
        process = subprocess.Popen(script, env=variables, stdout=log, stderr=log)
        deadline = time.monotonic() + 120
        while len(lines(run)) < 5 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR1)
        code = process.wait(timeout=120)
    said = (tmp_path / "log.txt").read_text()
    assert code == 0, said[-3000:]
    assert f"requeue {variables['SLURM_JOB_ID']}" in asked.read_text().splitlines()
    stopped = len(lines(run))
    assert 5 <= stopped < STEPS
    checkpoints = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    assert checkpoints[-1].endswith(f"{stopped:08d}"), (
        "the run was saved where it stopped, not only at a multiple of 50"
    )
    done = subprocess.run(script, env=variables, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"at step {stopped}" in done.stdout
    assert_same_stream(command, long_run, run, tmp_path)
    logs = list((run / "logs").rglob("*/1/stdout.log"))
    assert len(logs) == 2, "each execution has a log of rank 1"


@pytest.mark.long
def test_the_torchrun_script_trains_here(command: Command, long_run: Path, tmp_path: Path) -> None:
    """`--submit` on one node becomes the script; SIGTERM reaches the ranks, and running the file again continues."""
    options = ("--nodes", "1", "--ranks-per-node", "2", "--cpus-per-rank", "1")
    run = tmp_path / "run"
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    words = ["launch", "torchrun", str(long_run), *options, "--out", str(run), "--submit"]
    with (tmp_path / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "surefoot", *words], env=variables, stdout=log, stderr=log, cwd=tmp_path
        )
        deadline = time.monotonic() + 120
        while len(lines(run)) < 5 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=120)
    assert code != 0, (tmp_path / "log.txt").read_text()[-3000:]
    stopped = len(lines(run))
    assert 5 <= stopped < STEPS
    done = subprocess.run(
        ["bash", f"{run}.sh"], env=variables, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"at step {stopped}" in done.stdout
    assert_same_stream(command, long_run, run, tmp_path)
