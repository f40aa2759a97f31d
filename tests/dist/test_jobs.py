"""Job files carry every word to its place as it is, and say what the targets need to hear."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.dist.jobs import kubernetes, slurm, torchrun
from surefoot.dist.jobs.job import Job
from surefoot.dist.jobs.yaml import to_yaml

HOSTILE = [
    "a b",
    "it's",
    'say "so"',
    "$(touch owned)",
    "`touch owned`",
    "${HOME} $HOME $$ $",
    "two\nlines\n",
    "back\\slash\\",
    "; touch owned; #",
    "* ? [a] ~ ! & | < >",
    "100%j",
    "-rf",
    "",
    "ünï ☃ 𝔘",
    "1e3",
    "no",
    "a: b # c",
    "\x7f\x85\u2028\t",
]


def job(python: str = "python", folder: str = "/runs/one", **changes: Any) -> Job:
    values: dict[str, Any] = {
        "name": "tiny",
        "num_nodes": 3,
        "ranks_per_node": 2,
        "gpus_per_node": 2,
        "cpus_per_rank": 5,
        "python": python,
        "arguments": ("train", "quickstart", *HOSTILE),
        "folder": folder,
        "variables": {"WORDS": "\n".join(HOSTILE)},
        "max_restarts": 4,
        "grace": 120,
    }
    return Job(**(values | changes))


@pytest.fixture
def tell(tmp_path: Path) -> str:
    """A command that writes what it was given to told.json, under a name that needs quotes itself."""
    file = tmp_path / "it's $(a) python"
    said = (
        "{'argv': sys.argv[1:], 'words': os.environ['WORDS'], 'omp': os.environ['OMP_NUM_THREADS'], 'cwd': os.getcwd()}"
    )
    file.write_text(
        f"#!{sys.executable}\nimport json, os, sys\njson.dump({said}, open({str(tmp_path / 'told.json')!r}, 'w'))\n"
    )
    file.chmod(0o755)
    return str(file)


def run(text: str, tmp_path: Path, **environment: str) -> dict[str, Any]:
    """Run a script with bash and read what the command was given."""
    file = tmp_path / "job.sh"
    file.write_text(text)
    subprocess.run(["bash", "-n", str(file)], check=True)
    done = subprocess.run(
        ["bash", str(file)],
        env=os.environ | environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("owned"))
    return dict(json.loads((tmp_path / "told.json").read_text()))


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    place = tmp_path / "a 'b' $(touch owned)\nc"
    place.mkdir()
    return place


def test_torchrun_script_delivers_every_word(tell: str, tmp_path: Path, directory: Path) -> None:
    folder = f"{tmp_path}/r 'u' $(n)\nx"
    told = run(torchrun.script(job(tell, folder), "head:29500", str(directory)), tmp_path)
    assert told["argv"][-len(HOSTILE) :] == HOSTILE
    assert after(told["argv"], "--log-dir") == f"{folder}/logs"
    assert after(told["argv"], "--rdzv-endpoint") == "head:29500"
    assert after(told["argv"], "--nnodes") == "3"
    assert after(told["argv"], "--nproc-per-node") == "2"
    assert after(told["argv"], "--max-restarts") == "4"
    assert told["words"] == "\n".join(HOSTILE)
    assert (told["omp"], told["cwd"]) == ("5", str(directory))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """srun that runs its command here and notes its options, scontrol that names two hosts."""
    place = tmp_path / "bin"
    place.mkdir()
    options = tmp_path / "srun.txt"
    stubs = {
        "srun": f'while [[ $1 == -* ]]; do echo "$1" >> {shlex.quote(str(options))}; shift; done\nexec "$@"\n',
        "scontrol": '[[ "$*" == "show hostnames a[1-2]" ]] && printf "a1\\na2\\n"\n',
    }
    for name, body in stubs.items():
        (place / name).write_text(f"#!/usr/bin/env bash\n{body}")
        (place / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    return options


def test_slurm_script_delivers_every_word(tell: str, tmp_path: Path, directory: Path, cluster: Path) -> None:
    folder = f"{tmp_path}/r 'u' $(n) 50%"
    text = slurm.script(job(tell, folder), str(directory), {"time": "1-00:00:00"})
    told = run(text, tmp_path, SLURM_JOB_ID="123456", SLURM_JOB_NODELIST="a[1-2]")
    assert told["argv"][-len(HOSTILE) :] == HOSTILE
    assert after(told["argv"], "--log-dir") == f"{folder}/logs"
    assert after(told["argv"], "--rdzv-endpoint") == "a1:23456"
    assert after(told["argv"], "--rdzv-id") == "123456"
    assert told["words"] == "\n".join(HOSTILE)
    assert told["cwd"] == str(directory)
    said = cluster.read_text().splitlines()
    assert set(said) >= {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--cpus-per-task=10"}


def directives(text: str) -> dict[str, str]:
    """The #SBATCH options up to the first line that is no comment, as sbatch reads them: quotes off."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if line.startswith("#SBATCH --"):
            name, _, value = line.removeprefix("#SBATCH --").partition("=")
            found[name] = "".join(shlex.split(value))
    return found


def test_slurm_options() -> None:
    options = directives(slurm.script(job(), "/", {"time": "10:00", "partition": "gpu"}))
    assert options == {
        "job-name": "tiny",
        "nodes": "3",
        "ntasks-per-node": "1",
        "cpus-per-task": "10",
        "gpus-per-node": "2",
        "time": "10:00",
        "partition": "gpu",
        "output": "/runs/one/logs/slurm-%j.out",
        "error": "/runs/one/logs/slurm-%j.err",
        "open-mode": "append",
        "signal": "B:USR1@120",
        "requeue": "",
    }
    assert "gpus-per-node" not in directives(slurm.script(job(gpus_per_node=0), "/", {}))
    assert directives(slurm.script(job(folder="/a b/5%"), "/", {}))["output"] == "/a b/5%%/logs/slurm-%j.out"


@pytest.mark.parametrize(("code", "saves", "requeued"), [(0, True, False), (7, True, True), (7, False, False)], ids=str)
def test_slurm_puts_back_only_a_run_that_the_limit_cut(
    tmp_path: Path, cluster: Path, code: int, saves: bool, requeued: bool
) -> None:
    """The step saves or not and ends with `code` after SIGTERM; the batch shell was told of the limit by USR1."""
    calls, ready, folder = tmp_path / "calls.txt", tmp_path / "ready", tmp_path / "a 'run'"
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    last = folder / "checkpoints" / ("step-2" if saves else "step-1")
    (tmp_path / "bin" / "srun").write_text(
        f"#!{sys.executable}\nimport pathlib, signal, sys, time\n"
        f"def stop(*_):\n    pathlib.Path({str(last)!r}).mkdir(exist_ok=True)\n    sys.exit({code})\n"
        f"signal.signal(signal.SIGTERM, stop)\n"
        f"pathlib.Path({str(ready)!r}).touch()\ntime.sleep(60)\n"
    )
    with (tmp_path / "bin" / "scontrol").open("a") as file:
        file.write(f'echo "$*" >> {shlex.quote(str(calls))}\n')
    script = tmp_path / "job.sh"
    script.write_text(slurm.script(job(folder=str(folder)), str(tmp_path), {}))
    environment = os.environ | {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "a[1-2]"}
    process = subprocess.Popen(["bash", str(script)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while not ready.exists():
        assert process.poll() is None
    process.send_signal(signal.SIGUSR1)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == (0 if requeued else code)
    assert ("requeue 5" in calls.read_text().splitlines()) == requeued
    assert (b"not requeued: raise --time" in said) == (not saves)


def test_slurm_passes_a_failure_on(tmp_path: Path, cluster: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(slurm.script(job("false", arguments=()), str(tmp_path), {}))
    environment = os.environ | {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "a[1-2]"}
    assert subprocess.run(["bash", str(script)], env=environment, check=False).returncode == 1


def expand(text: str, variables: dict[str, str]) -> str:
    """What Kubernetes makes of a word: $$ is $, $(NAME) a variable's value where there is one."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)",
        lambda match: "$" if match[0] == "$$" else variables.get(match[1], match[0]),
        text,
    )


PLACE = kubernetes.Place("registry:5000/a/b@sha256:0", "claim", "/work", "team")


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_manifest_delivers_every_word(kind: kubernetes.Kind) -> None:
    variables = {"PET_MASTER_ADDR": "pod", "PET_MASTER_PORT": "29400", "touch owned": "expanded"}
    value = yaml.safe_load(kubernetes.manifest(job(), PLACE, kind))
    container = (
        value["spec"]["trainer"]
        if kind == "trainjob"
        else value["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    )
    words = [expand(word, variables) for word in container["command"]]
    assert words[:3] == ["python", "-m", "torch.distributed.run"]
    assert words[-len(HOSTILE) :] == HOSTILE
    assert after(words, "--nnodes") == "3"
    assert after(words, "--nproc-per-node") == "2"
    endpoint = "pod:29400" if kind == "trainjob" else "tiny-node-0-0.tiny:29400"
    assert after(words, "--rdzv-endpoint") == endpoint
    environment = {item["name"]: expand(item["value"], variables) for item in container["env"]}
    assert environment == {
        "OMP_NUM_THREADS": "5",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "110",
        "WORDS": "\n".join(HOSTILE),
    }
    assert container["image"] == PLACE.image
    assert value["metadata"] == {"name": "tiny", "namespace": "team"}


VOLUMES = [
    {"name": "runs", "persistentVolumeClaim": {"claimName": "claim"}},
    {"name": "shm", "emptyDir": {"medium": "Memory"}},
]
MOUNTS = [{"name": "runs", "mountPath": "/work"}, {"name": "shm", "mountPath": "/dev/shm"}]


def test_train_job_fields() -> None:
    value = yaml.safe_load(kubernetes.manifest(job(), PLACE, "trainjob"))
    assert (value["apiVersion"], value["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    spec = value["spec"]
    assert spec["runtimeRef"] == {"name": "torch-distributed"}
    trainer = spec["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (3, 2)
    assert trainer["resourcesPerNode"] == {"requests": {"cpu": 10}, "limits": {"nvidia.com/gpu": 2}}
    (patch,) = spec["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert (node["name"], pod["volumes"]) == ("node", VOLUMES)
    assert pod["containers"] == [{"name": "node", "volumeMounts": MOUNTS}]


def test_job_set_fields() -> None:
    value = yaml.safe_load(kubernetes.manifest(job(gpus_per_node=0), PLACE, "jobset"))
    assert (value["apiVersion"], value["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert value["spec"]["network"] == {"enableDNSHostnames": True}
    assert value["spec"]["failurePolicy"] == {"maxRestarts": 4}
    (nodes,) = value["spec"]["replicatedJobs"]
    assert (nodes["name"], nodes["replicas"]) == ("node", 1)
    spec = nodes["template"]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["completionMode"]) == (3, 3, "Indexed")
    assert spec["backoffLimit"] == 0
    pod = spec["template"]["spec"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"], pod["volumes"]) == ("Never", 120, VOLUMES)
    (container,) = pod["containers"]
    assert container["resources"] == {"requests": {"cpu": 10}}
    assert container["volumeMounts"] == MOUNTS


@settings(deadline=None)
@given(
    st.recursive(
        st.text() | st.integers() | st.booleans(),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.from_regex(r"key[A-Z]{0,3}", fullmatch=True), inner)
        ),
    ).map(lambda value: {"value": value})
)
def test_yaml_reads_back(value: dict[str, Any]) -> None:
    assert yaml.safe_load(to_yaml(value)) == value
