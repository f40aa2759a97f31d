"""Manifests: a Kubeflow `TrainJob`, or a `JobSet` for clusters without the Trainer. One pod a node.

Fields: trainer.kubeflow.org/v1alpha1 (Kubeflow Trainer 2.2 and later, which has `runtimePatches`) and
jobset.x-k8s.io/v1alpha2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from surefoot.dist.jobs.job import Job
from surefoot.dist.jobs.yaml import to_yaml

PORT = 29400
POD = "node"
"""Name of the replicated job and its container, as the Trainer's torch-distributed runtime has them."""

Kind = Literal["trainjob", "jobset"]


@dataclass(frozen=True)
class Place:
    """Where the pods find what they need: image, claim of the shared volume, and where that is mounted."""

    image: str
    claim: str
    mount: str
    namespace: str | None


def manifest(job: Job, place: Place, kind: Kind) -> str:
    """YAML text for `kubectl apply`."""
    value = _train_job(job, place) if kind == "trainjob" else _job_set(job, place)
    title = f"# {job.name} on {job.num_nodes} x {job.ranks_per_node} ranks. Deleted and applied again, it continues.\n"
    return title + to_yaml(value)


def _train_job(job: Job, place: Place) -> dict[str, Any]:
    # The Trainer itself sets PET_MASTER_ADDR and PET_MASTER_PORT in its pods; Kubernetes puts the values in.
    patch = {"volumes": _volumes(place), "containers": [{"name": POD, "volumeMounts": _mounts(place)}]}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job, place),
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": place.image,
                "numNodes": job.num_nodes,
                "numProcPerNode": job.ranks_per_node,
                "command": _command(job, "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"),
                "env": _environment(job),
                "resourcesPerNode": _resources(job),
            },
            "runtimePatches": [
                {
                    "manager": "surefoot",
                    "trainingRuntimeSpec": {
                        "template": {
                            "spec": {
                                "replicatedJobs": [
                                    {"name": POD, "template": {"spec": {"template": {"spec": patch}}}},
                                ]
                            }
                        }
                    },
                }
            ],
        },
    }


def _job_set(job: Job, place: Place) -> dict[str, Any]:
    container = {
        "name": POD,
        "image": place.image,
        "command": _command(job, f"{job.name}-{POD}-0-0.{job.name}:{PORT}"),
        "env": _environment(job),
        "ports": [{"containerPort": PORT}],
        "resources": _resources(job),
        "volumeMounts": _mounts(place),
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace,
        "containers": [container],
        "volumes": _volumes(place),
    }
    nodes = {
        "parallelism": job.num_nodes,
        "completions": job.num_nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # a lost pod fails the Job, and the set starts all of them again
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job, place),
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {"maxRestarts": job.max_restarts},
            "replicatedJobs": [{"name": POD, "replicas": 1, "template": {"spec": nodes}}],
        },
    }


def _metadata(job: Job, place: Place) -> dict[str, str]:
    return {"name": job.name} | ({"namespace": place.namespace} if place.namespace else {})


def _command(job: Job, endpoint: str) -> list[str]:
    return [word for group in job.command(endpoint, job.name, _literal) for word in group]


def _environment(job: Job) -> list[dict[str, str]]:
    return [{"name": name, "value": _literal(value)} for name, value in job.environment.items()]


def _literal(word: str) -> str:
    """Kubernetes replaces $(NAME) in commands and values; a doubled $ is a $."""
    return word.replace("$", "$$")


def _resources(job: Job) -> dict[str, Any]:
    cpus: dict[str, Any] = {"requests": {"cpu": job.cpus_per_rank * job.ranks_per_node}}
    return cpus | ({"limits": {"nvidia.com/gpu": job.gpus_per_node}} if job.gpus_per_node else {})


def _volumes(place: Place) -> list[dict[str, Any]]:
    return [
        {"name": "runs", "persistentVolumeClaim": {"claimName": place.claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL and gloo exchange through it; the default is 64 MB
    ]


def _mounts(place: Place) -> list[dict[str, str]]:
    return [{"name": "runs", "mountPath": place.mount}, {"name": "shm", "mountPath": "/dev/shm"}]
