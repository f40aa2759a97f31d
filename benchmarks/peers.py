"""surefoot beside a plain PyTorch loop and other trainers, on the common workload.

    python benchmarks/peers.py --against plain
    python benchmarks/peers.py --against plain,torchtitan,litgpt --rounds 5 --json report.json

Rounds are interleaved (surefoot, plain, surefoot, plain, …), every run is a process of its own, and each waits until the
machine is quiet. A ratio is between two runs of one round; the table shows the median of rounds. Exit code 1 where a bar
is missed. Other trainers are run by the script that SUREFOOT_PEERS_SCRIPT names (see benchmarks/README.md).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import rows  # noqa: E402

DROPPED = 5
"""First steps of a run that do not count: allocators and caches are still filling."""
RATIO, FIRST_STEP, LOADER, IMPORT, HELP = 1.5, 10.0, 0.02, 0.3, 0.7
QUIET, PATIENCE = 0.90, 120.0
"""Idle share of the machine at which a run may start, and the seconds it waits for that."""


@dataclass(frozen=True)
class Result:
    """One run. Seconds are wall-clock; `first_step_seconds` counts from the command; `loader` is a share of the step."""

    name: str
    tokens_per_second: float
    peak_bytes: float
    first_step_seconds: float | None = None
    loader: float | None = None
    was_quiet: bool = True


class UnavailableError(Exception):
    """A trainer cannot be run here; the text says why."""


def median_rate(times: Sequence[float]) -> float:
    """Tokens a second from the times at which steps ended: the median step after the first `DROPPED`."""
    steps = [later - earlier for earlier, later in zip(times[DROPPED - 1 :], times[DROPPED:], strict=False)]
    return rows.BATCH * rows.LENGTH / statistics.median(steps)


def ratios(results: Sequence[Mapping[str, Result]], name: str, other: str) -> list[float]:
    """`name`'s tokens a second over `other`'s, one a round that has both."""
    return [
        found[name].tokens_per_second / found[other].tokens_per_second
        for found in results
        if name in found and other in found
    ]


def run_surefoot(steps: int, threads: int) -> Result:
    """The command as a user types it, with all that it records."""
    with tempfile.TemporaryDirectory(prefix="surefoot-bench-") as folder:
        started = time.time()
        command = ["train", f"{ROOT / 'benchmarks' / 'workload.py'}:common", "--out", f"{folder}/run"]
        command += ["--set", f"train.num_steps={steps}", "--set", f"train.threads={threads}"]
        command += ["--set", f"schedule.warmup={rows.WARMUP_STEPS / steps}"]
        _checked(_surefoot(*command), threads)
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    counted = lines[DROPPED:]
    waited, spent = (sum(line[key] for line in counted) for key in ("data_seconds", "step_seconds"))
    return Result(
        "surefoot",
        median_rate([line["time"] for line in lines]),
        lines[-1]["memory_bytes"],
        lines[0]["time"] - started,
        waited / spent,
    )


def run_plain(steps: int, threads: int) -> Result:
    """`benchmarks/plain.py`."""
    started = time.time()
    text = _checked(
        [sys.executable, str(ROOT / "benchmarks" / "plain.py"), "--steps", str(steps), "--threads", str(threads)],
        threads,
    )
    lines = [json.loads(line) for line in text.splitlines()]
    return Result(
        "plain", median_rate([line["time"] for line in lines]), lines[-1]["memory_bytes"], lines[0]["time"] - started
    )


def run_peer(name: str, steps: int, threads: int) -> Result:
    """Another trainer, through the script of SUREFOOT_PEERS_SCRIPT."""
    script = os.environ.get("SUREFOOT_PEERS_SCRIPT")
    if not script:
        raise UnavailableError("SUREFOOT_PEERS_SCRIPT is not set; see benchmarks/README.md")
    if not Path(script).is_file():
        raise UnavailableError(f"SUREFOOT_PEERS_SCRIPT: {script} is not a file")
    process = subprocess.run(
        [sys.executable, script, name, "--steps", str(steps), "--threads", str(threads)],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        found = json.loads(process.stdout.splitlines()[-1])
        rate, peak = float(found["tokens_per_s_median"]), float(found["peak_rss_mb"]) * 2**20
    except (IndexError, ValueError, KeyError, TypeError):
        text = (process.stderr or process.stdout).strip().splitlines()
        raise UnavailableError(text[-1][:200] if text else f"{script} said nothing") from None
    return Result(name, rate, peak, found.get("startup_s"))


def wait_until_quiet(say: Any) -> bool:
    """Whether the machine became quiet within `PATIENCE` seconds."""
    deadline, has_spoken = time.monotonic() + PATIENCE, False
    while (idle := idle_share(1.0)) < QUIET:
        if time.monotonic() > deadline:
            say(f"  still busy ({idle:.0%} idle) after {PATIENCE:.0f} s: running all the same, marked ~")
            return False
        if not has_spoken:
            say(f"  waiting for a quiet machine ({idle:.0%} idle) ...")
            has_spoken = True
    return True


def idle_share(seconds: float) -> float:
    """The share of all cores' time that was idle during `seconds`; 1 where the system does not tell."""
    try:
        before = _cpu_times()
        time.sleep(seconds)
        after = _cpu_times()
    except OSError:
        return 1.0
    spent = [end - begin for begin, end in zip(before, after, strict=True)]
    return (spent[3] + spent[4]) / max(1, sum(spent[:8]))


def start_up() -> dict[str, float]:
    """Seconds of `import surefoot` and `surefoot --help`, best of three; 1 under "torch" where help imported torch."""
    importing = f"import time; t = time.perf_counter(); import surefoot; print(time.perf_counter() - t)"  # noqa: F541
    times = {"import": min(float(_checked([sys.executable, "-c", importing], 1)) for _ in range(3))}
    took = []
    for _ in range(3):
        started = time.perf_counter()
        _checked(_surefoot("--help"), 1)
        took.append(time.perf_counter() - started)
    times["help"] = min(took)
    probe = (
        "import sys, contextlib, io\nfrom surefoot.cli.main import main\nsys.argv = ['surefoot', '--help']\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n    main()\n"
        "print(int('torch' in sys.modules))"
    )
    times["torch"] = float(_checked([sys.executable, "-c", probe], 1))
    return times


def bars(results: Sequence[Mapping[str, Result]], started: Mapping[str, float]) -> list[tuple[str, str, bool]]:
    """What must hold: a description, the measured value, whether it holds."""
    own = [found["surefoot"] for found in results if "surefoot" in found]
    plain = [found["plain"] for found in results if "plain" in found]
    checks: list[tuple[str, str, bool]] = []
    if plain:
        ratio = statistics.median(ratios(results, "surefoot", "plain"))
        peaks = [statistics.median(run.peak_bytes for run in runs) for runs in (own, plain)]
        checks += [
            (f"tokens/s at least {RATIO} x plain", f"{ratio:.2f}", ratio >= RATIO),
            (
                "peak memory at most plain's",
                f"{peaks[0] / 2**20:.0f} against {peaks[1] / 2**20:.0f} MiB",
                peaks[0] <= peaks[1],
            ),
        ]
    first = statistics.median(run.first_step_seconds or 0.0 for run in own)
    loader = statistics.median(run.loader or 0.0 for run in own)
    checks += [
        (f"first step within {FIRST_STEP:.0f} s of the command", f"{first:.1f} s", first <= FIRST_STEP),
        (f"waiting for data under {LOADER:.0%} of the step", f"{loader:.2%}", loader < LOADER),
        (f"import surefoot under {IMPORT} s", f"{started['import']:.2f} s", started["import"] < IMPORT),
        (f"surefoot --help under {HELP} s", f"{started['help']:.2f} s", started["help"] < HELP),
        ("surefoot --help does not import torch", "no" if not started["torch"] else "it does", not started["torch"]),
    ]
    return checks


def table(results: Sequence[Mapping[str, Result]], names: Sequence[str]) -> str:
    """One line a trainer."""
    lines = [f"{'trainer':14}{'tokens/s':>10}{'surefoot is':>13}{'(range)':>14}{'peak MiB':>10}{'first step':>12}"]
    for name in names:
        runs = [found[name] for found in results if name in found]
        if not runs:
            continue
        rate, peak = (
            statistics.median(getattr(run, key) for run in runs) for key in ("tokens_per_second", "peak_bytes")
        )
        first = [run.first_step_seconds for run in runs if run.first_step_seconds is not None]
        mark = "" if all(run.was_quiet for run in runs) else "~"
        beside, spread = "", ""
        if name != "surefoot" and (paired := ratios(results, "surefoot", name)):
            beside, spread = f"{statistics.median(paired):.2f} x", f"{min(paired):.2f} - {max(paired):.2f}"
        shown = f"{statistics.median(first):.1f} s" if first else ""
        lines.append(f"{name + mark:14}{rate:>10,.0f}{beside:>13}{spread:>14}{peak / 2**20:>10,.0f}{shown:>12}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="plain", help="trainers to run beside surefoot, by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="steps of a run; the first 5 do not count")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every number there too")
    chosen = parser.parse_args(arguments)
    if chosen.rounds < 1 or chosen.threads < 1 or chosen.steps < DROPPED + 5:
        parser.error(f"--rounds and --threads must be at least 1, --steps at least {DROPPED + 5}")
    if chosen.json and not chosen.json.resolve().parent.is_dir():
        parser.error(f"--json {chosen.json}: its folder does not exist")
    others = [name for name in dict.fromkeys(chosen.against.split(",")) if name and name != "surefoot"]

    def say(text: str) -> None:
        print(text, flush=True)

    results, missing = measure(["surefoot", *others], chosen.rounds, chosen.steps, chosen.threads, say)
    started = start_up()
    say("\n" + table(results, ["surefoot", *others]))
    for name, why in missing.items():
        say(f"{name} was not run: {why}")
    checks = bars(results, started)
    say("")
    for what, value, holds in checks:
        say(f"{'pass' if holds else 'FAIL'}  {what}: {value}")
    if chosen.json:
        facts = {
            "machine": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        }
        rounds = [{name: asdict(result) for name, result in found.items()} for found in results]
        content = {
            "facts": facts,
            "steps": chosen.steps,
            "threads": chosen.threads,
            "rounds": rounds,
            "start_up": started,
        }
        chosen.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if all(holds for *_, holds in checks) else 1


def measure(
    names: Sequence[str], num_rounds: int, steps: int, threads: int, say: Any
) -> tuple[list[dict[str, Result]], dict[str, str]]:
    """Every trainer once a round; who could not be run, and why."""
    results: list[dict[str, Result]] = []
    missing: dict[str, str] = {}
    for number in range(num_rounds):
        results.append({})
        for name in names:
            if name in missing:
                continue
            say(f"round {number + 1} of {num_rounds}: {name}")
            was_quiet = wait_until_quiet(say)
            try:
                if name == "surefoot":
                    found = run_surefoot(steps, threads)
                elif name == "plain":
                    found = run_plain(steps, threads)
                else:
                    found = run_peer(name, steps, threads)
            except UnavailableError as error:
                missing[name] = str(error)
                say(f"  {error}")
                continue
            results[-1][name] = Result(**(asdict(found) | {"was_quiet": was_quiet}))
            say(f"  {found.tokens_per_second:,.0f} tokens/s")
    return results, missing


def _surefoot(*arguments: str) -> list[str]:
    installed = Path(sys.executable).with_name("surefoot")
    if installed.exists():
        return [str(installed), *arguments]
    return [shutil.which("surefoot") or "surefoot", *arguments]


def _checked(command: Sequence[str], threads: int) -> str:
    """The standard output of a command; exit with its last line where it failed."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if process.returncode:
        text = (process.stderr or process.stdout).strip().splitlines()
        raise SystemExit(f"peers.py: {' '.join(command)[:120]} failed: {text[-1] if text else process.returncode}")
    return process.stdout


def _cpu_times() -> list[int]:
    return [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]


if __name__ == "__main__":
    sys.exit(main())
