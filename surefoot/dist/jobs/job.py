"""`Job`: what every target needs to know, and the torchrun command that all of them run on each node."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

MARGIN = 10
"""Seconds of the grace that are left for torchrun itself, after it has given up on its ranks."""

RENDEZVOUS = "join_timeout=1800,read_timeout=600"
"""Seconds in which all nodes must have come, and the one that keeps the store: pulling an image takes minutes."""


@dataclass(frozen=True)
class Job:
    """A run over `num_nodes` x `ranks_per_node` ranks, one torchrun a node. Paths are as the nodes see them."""

    name: str
    num_nodes: int
    ranks_per_node: int
    gpus_per_node: int
    cpus_per_rank: int
    python: str
    arguments: tuple[str, ...]
    """Of `surefoot`, without the command's name."""
    folder: str
    variables: Mapping[str, str]
    """Environment variables beside those of `environment`."""
    max_restarts: int
    grace: int
    """Seconds between the signal to stop and the end: time for the step and a checkpoint."""

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of the job."""
        return {
            "OMP_NUM_THREADS": str(self.cpus_per_rank),
            # torchrun kills its ranks this long after it passed SIGTERM on; from torch 2.12 on, before always 30
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(self.grace - MARGIN),
            **self.variables,
        }

    def command(self, endpoint: str, identity: str, quote: Callable[[str], str]) -> list[list[str]]:
        """torchrun and the run, in groups of words that belong together.

        `quote` writes a word so that it arrives as it is; `endpoint` and `identity` are taken as written.
        """
        return [
            [quote(self.python), "-m", "torch.distributed.run"],
            ["--nnodes", str(self.num_nodes), "--nproc-per-node", str(self.ranks_per_node)],
            ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", identity],
            ["--rdzv-conf", RENDEZVOUS],
            ["--max-restarts", str(self.max_restarts)],
            ["--log-dir", quote(f"{self.folder}/logs"), "--redirects", "3", "--tee", "0:3"],
            ["-m", "surefoot", *(quote(word) for word in self.arguments)],
        ]

    def exports(self) -> list[str]:
        """Shell lines that set the environment."""
        return [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]


def over_lines(groups: Sequence[Sequence[str]]) -> str:
    """A shell command over several lines."""
    return " \\\n    ".join(" ".join(group) for group in groups)
