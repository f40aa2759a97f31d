"""An sbatch script: one torchrun a node, a checkpoint before the time limit, and the queue again after it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from surefoot.dist.jobs.job import Job, over_lines

FORBIDDEN = '"\\\n\r'
"""Characters that a path in an #SBATCH line cannot hold."""

# Slurm warns the batch shell alone (B:). Passed on as SIGTERM, it reaches torchrun and every rank on every node.
_BODY = """\
step=
at_limit=no
saved() { ls -1 @CHECKPOINTS@ 2>/dev/null || true; }
before=$(saved)
stop() { [[ -z $step ]] || kill -TERM "$step" 2>/dev/null || true; }
# USR1: the time limit is near. TERM: cancelled or preempted; whether that means the queue again is Slurm's decision.
trap 'at_limit=yes; stop' USR1
trap stop TERM

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
endpoint="${hosts[0]}:$((20000 + SLURM_JOB_ID % 10000))"

# One node ends before another has written the checkpoint: it must not take that one along (kill-on-bad-exit).
@COMMAND@ &
step=$!

code=0
wait "$step" || code=$?
while kill -0 "$step" 2>/dev/null; do # a signal ended the wait, not the step
  code=0
  wait "$step" || code=$?
done
if [[ $at_limit == yes && $code -ne 0 ]]; then
  if [[ $(saved) == "$before" ]]; then
    echo "surefoot: no checkpoint came of this time, and none would of the same again; not requeued: raise --time" >&2
    exit "$code"
  fi
  echo "surefoot: stopped before the time limit; back to the queue to continue"
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
fi
exit "$code"
"""


def script(job: Job, directory: str, options: Mapping[str, str]) -> str:
    """Bash text for sbatch; `options` are further ones by their long names (time, partition, account)."""
    cpus = job.cpus_per_rank * job.ranks_per_node
    directives = {
        "job-name": job.name,
        "nodes": str(job.num_nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(cpus),
        **({"gpus-per-node": str(job.gpus_per_node)} if job.gpus_per_node else {}),
        **options,
        "output": _log_path(f"{job.folder}/logs/slurm-", ".out"),
        "error": _log_path(f"{job.folder}/logs/slurm-", ".err"),
        "open-mode": "append",
        "signal": f"B:USR1@{job.grace}",
    }
    step = [
        ["srun", f"--nodes={job.num_nodes}", f"--ntasks={job.num_nodes}", "--ntasks-per-node=1"],
        # Slurm 22.05 and later no longer hand cpus-per-task on to srun.
        [f"--cpus-per-task={cpus}", "--kill-on-bad-exit=0"],
        *job.command('"$endpoint"', '"$SLURM_JOB_ID"', shlex.quote),
    ]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *(f"#SBATCH --{name}={value}" for name, value in directives.items()),
            "#SBATCH --requeue",
            f"# {job.name} on {job.num_nodes} x {job.ranks_per_node} ranks. Starting it again continues the run.",
            "set -euo pipefail",
            f"cd -- {shlex.quote(directory)}",
            *job.exports(),
            "",
            _BODY.replace("@CHECKPOINTS@", shlex.quote(f"{job.folder}/checkpoints")).replace(
                "@COMMAND@", over_lines(step)
            ),
        ]
    )


def _log_path(start: str, end: str) -> str:
    """A path with the job's number in the middle, as an #SBATCH line takes it: quoted, and % doubled."""
    path = start.replace("%", "%%") + "%j" + end
    return path if re.fullmatch(r"[\w./%+-]+", path, re.ASCII) else f'"{path}"'
