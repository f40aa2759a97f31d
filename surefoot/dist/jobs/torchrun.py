"""A shell script that every node runs by itself."""

from __future__ import annotations

import shlex

from surefoot.dist.jobs.job import Job, over_lines


def script(job: Job, endpoint: str, directory: str) -> str:
    """Bash text; `endpoint` is HOST:PORT of the node that keeps the rendezvous, `directory` where the command runs."""
    command = over_lines(job.command(shlex.quote(endpoint), shlex.quote(job.name), shlex.quote))
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# {job.name} on {job.num_nodes} x {job.ranks_per_node} ranks: run this on every node.",
            "# Run it again to continue where the newest checkpoint stands.",
            "set -euo pipefail",
            f"cd -- {shlex.quote(directory)}",
            *job.exports(),
            "",
            f"exec {command}",
            "",
        ]
    )
