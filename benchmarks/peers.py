"""surefoot beside a plain PyTorch loop and other trainers, on the same rows.

    python benchmarks/peers.py --against plain
    python benchmarks/peers.py --against plain,torchtitan,litgpt --rounds 5 --json report.json
    python benchmarks/peers.py --all --json report.json

Rounds are interleaved (surefoot, plain, surefoot, plain, …), every run is a process of its own, and each waits until the
machine is quiet. A ratio is between two runs of one round; the table shows the median of rounds. `--all` adds larger
models, two ranks, and the parts of `benchmarks/parts.py`. Exit code 1 where a bar is missed. Other trainers are run by the
script that SUREFOOT_PEERS_SCRIPT names (see benchmarks/README.md).
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import rows  # noqa: E402
from benchmarks.rows import Size  # noqa: E402

DROPPED = 5
"""First steps of a run that do not count: allocators and caches are still filling."""
RATIO, FIRST_STEP, LOADER, IMPORT, HELP = 1.5, 10.0, 0.02, 0.3, 0.7
PEER_RATIO, LARGE_RATIO, MFU, RANKS_RATIO = 1.5, 2.0, 0.55, 1.5
QUIET, PATIENCE = 0.90, 120.0
"""Idle share of the machine at which a run may start, and the seconds it waits for that."""

Check = tuple[str, str, bool]
"""What must hold, the measured value, whether it holds."""


def verdict(check: Check) -> str:
    """As one line."""
    what, value, holds = check
    return f"{'pass' if holds else 'FAIL'}  {what}: {value}"


def print_checks(checks: Iterable[Check], *, as_json: bool) -> int:
    """A line each, as it comes; the exit code. Whoever reads JSON sees for himself what fails."""
    is_good = True
    for check in checks:
        is_good &= check[2]
        print(json.dumps(check) if as_json else verdict(check), flush=True)
    return 0 if is_good or as_json else 1


@dataclass(frozen=True)
class Result:
    """One run. Seconds are wall-clock; `first_step_seconds` counts from the command; `loader` is a share of the step, `mfu` of
    the matrix products' ceiling."""

    name: str
    tokens_per_second: float
    peak_bytes: float
    first_step_seconds: float | None = None
    loader: float | None = None
    was_quiet: bool = True
    mfu: float | None = None


@dataclass(frozen=True)
class Contest:
    """Trainers that run the same workload in turn. `recipe` is a function of workload.py."""

    title: str
    recipe: str
    size: str
    others: tuple[str, ...]
    steps: int
    threads: int
    ranks: int = 1


class UnavailableError(Exception):
    """A trainer cannot be run here; the text says why."""


def median_rate(times: Sequence[float], size: Size = rows.COMMON) -> float:
    """Tokens a second from the times at which steps ended: the median step after the first `DROPPED`."""
    steps = [later - earlier for earlier, later in zip(times[DROPPED - 1 :], times[DROPPED:], strict=False)]
    return size.batch * size.length / statistics.median(steps)


def ratios(results: Sequence[Mapping[str, Result]], name: str, other: str) -> list[float]:
    """`name`'s tokens a second over `other`'s, one a round that has both."""
    return [
        found[name].tokens_per_second / found[other].tokens_per_second
        for found in results
        if name in found and other in found
    ]


def run_surefoot(contest: Contest) -> Result:
    """The command as a user types it, with all that it records."""
    with tempfile.TemporaryDirectory(prefix="surefoot-bench-") as folder:
        started = time.time()
        steps, threads = contest.steps, contest.threads
        command = ["train", f"{ROOT / 'benchmarks' / 'workload.py'}:{contest.recipe}", "--out", f"{folder}/run"]
        command += ["--set", f"train.num_steps={steps}", "--set", f"train.threads={threads}"]
        command += ["--set", f"schedule.warmup={min(0.5, rows.WARMUP_STEPS / steps)}"]
        if contest.ranks > 1:
            command += ["--ranks", str(contest.ranks), "--set", f"plan.shard={contest.ranks}"]
        _checked(_surefoot(*command), threads)
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    counted = lines[DROPPED:]
    waited, spent = (sum(line[key] for line in counted) for key in ("data_seconds", "step_seconds"))
    mfus = [line["mfu"] for line in counted if line["mfu"] is not None]
    return Result(
        "surefoot",
        median_rate([line["time"] for line in lines], rows.SIZES[contest.size]),
        lines[-1]["memory_bytes"],
        lines[0]["time"] - started,
        waited / spent,
        mfu=statistics.median(mfus) if mfus else None,
    )


def run_plain(contest: Contest) -> Result:
    """`benchmarks/plain.py`."""
    started = time.time()
    options = ["--size", contest.size, "--steps", str(contest.steps), "--threads", str(contest.threads)]
    text = _checked([sys.executable, str(ROOT / "benchmarks" / "plain.py"), *options], contest.threads)
    lines = [json.loads(line) for line in text.splitlines()]
    rate = median_rate([line["time"] for line in lines], rows.SIZES[contest.size])
    return Result("plain", rate, lines[-1]["memory_bytes"], lines[0]["time"] - started)


def run_peer(name: str, steps: int, threads: int, ranks: int = 1) -> Result:
    """Another trainer, through the script of SUREFOOT_PEERS_SCRIPT."""
    script = os.environ.get("SUREFOOT_PEERS_SCRIPT")
    if not script:
        raise UnavailableError("SUREFOOT_PEERS_SCRIPT is not set; see benchmarks/README.md")
    if not Path(script).is_file():
        raise UnavailableError(f"SUREFOOT_PEERS_SCRIPT: {script} is not a file")
    process = subprocess.run(
        [sys.executable, script, name, "--steps", str(steps), "--threads", str(threads)]
        + (["--ranks", str(ranks)] if ranks > 1 else []),
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


def bars(results: Sequence[Mapping[str, Result]], started: Mapping[str, float]) -> list[Check]:
    """Of the common workload."""
    own = _runs(results, "surefoot")
    checks: list[Check] = []
    if _runs(results, "plain"):
        checks += [_faster(results, "plain", RATIO), _smaller(results, "plain")]
    peers = {name for found in results for name in found} - {"surefoot", "plain"}
    if peers:
        best = max(peers, key=lambda name: statistics.median(run.tokens_per_second for run in _runs(results, name)))
        checks += [_faster(results, best, PEER_RATIO), *(_smaller(results, name) for name in sorted(peers))]
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


def bars_of_large(results: Sequence[Mapping[str, Result]], size: str) -> list[Check]:
    """Of the models with a vocabulary of 32,768."""
    checks = [_faster(results, "plain", LARGE_RATIO)] if _runs(results, "plain") else []
    mfus = [run.mfu for run in _runs(results, "surefoot") if run.mfu is not None]
    if size == "110m" and mfus:
        mfu = statistics.median(mfus)
        checks.append((f"at least {MFU:.0%} of the matrix products' ceiling", f"{mfu:.0%}", mfu >= MFU))
    return checks


def bars_of_ranks(results: Sequence[Mapping[str, Result]]) -> list[Check]:
    """Of two ranks with sharded weights."""
    others = {name for found in results for name in found} - {"surefoot"}
    return [_faster(results, name, RANKS_RATIO) for name in sorted(others)]


def _runs(results: Sequence[Mapping[str, Result]], name: str) -> list[Result]:
    return [found[name] for found in results if name in found]


def _faster(results: Sequence[Mapping[str, Result]], other: str, bar: float) -> Check:
    found = ratios(results, "surefoot", other)
    ratio = statistics.median(found)
    said = f"{ratio:.2f} ({min(found):.2f} - {max(found):.2f})"
    return f"tokens/s at least {bar} x {other}", said, ratio >= bar


def _smaller(results: Sequence[Mapping[str, Result]], other: str) -> Check:
    own, their = (
        statistics.median(run.peak_bytes for run in _runs(results, name)) / 2**20 for name in ("surefoot", other)
    )
    return f"peak memory at most {other}'s", f"{own:.0f} against {their:.0f} MiB", own <= their


def bars_of_parts(threads: int) -> list[Check]:
    """What `benchmarks/parts.py` prints, in a process of its own."""
    text = _checked([sys.executable, str(ROOT / "benchmarks" / "parts.py"), "--json"], threads)
    return [(str(what), str(value), bool(holds)) for what, value, holds in map(json.loads, text.splitlines())]


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


def contests(others: Sequence[str], steps: int, threads: int, *, every: bool) -> list[Contest]:
    """The common workload, and with `every` the larger models and two ranks."""
    found = [Contest("the common workload, 7 M weights", "common", "common", tuple(others), steps, threads)]
    if every:
        found += [
            Contest("30 M weights", "m30", "30m", ("plain",), 12, threads),
            Contest("110 M weights", "m110", "110m", ("plain",), 10, threads),
            Contest(
                "2 ranks, sharded weights", "common", "common", ("torchtitan", "deepspeed-z3"), steps, threads // 2, 2
            ),
        ]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rounds and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", help="trainers to run beside surefoot, by commas")
    parser.add_argument("--all", action="store_true", help="every contest and every part")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="steps of a run; the first 5 do not count")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every number there too")
    chosen = parser.parse_args(arguments)
    if chosen.rounds < 1 or chosen.threads < 1 or chosen.steps < DROPPED + 5:
        parser.error(f"--rounds and --threads must be at least 1, --steps at least {DROPPED + 5}")
    if chosen.all and chosen.threads < 2:
        parser.error("--threads must be at least 2 with --all, which shares them between two ranks")
    if chosen.json and not chosen.json.resolve().parent.is_dir():
        parser.error(f"--json {chosen.json}: its folder does not exist")
    against = chosen.against or ("plain,torchtitan,litgpt" if chosen.all else "plain")
    others = [name for name in dict.fromkeys(against.split(",")) if name and name != "surefoot"]

    def say(text: str) -> None:
        print(text, flush=True)

    started = start_up()
    checks: list[Check] = []
    record: dict[str, Any] = {}
    for contest in contests(others, chosen.steps, chosen.threads, every=chosen.all):
        say(f"\n{contest.title}")
        results, missing = measure(contest, chosen.rounds, say)
        say("\n" + table(results, ["surefoot", *contest.others]))
        for name, why in missing.items():
            say(f"{name} was not run: {why}")
        if contest.ranks > 1:
            found = bars_of_ranks(results)
        elif contest.size == "common":
            found = bars(results, started)
        else:
            found = bars_of_large(results, contest.size)
        checks += [(f"{contest.title}: {what}", value, holds) for what, value, holds in found]
        record[contest.title] = [{name: asdict(result) for name, result in each.items()} for each in results]
    if chosen.all:
        say("\nparts")
        wait_until_quiet(say)
        checks += bars_of_parts(chosen.threads)
    say("")
    for check in checks:
        say(verdict(check))
    if chosen.json:
        facts = {
            "machine": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        }
        content = {
            "facts": facts,
            "steps": chosen.steps,
            "threads": chosen.threads,
            "rounds": record,
            "start_up": started,
            "checks": checks,
        }
        chosen.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if all(holds for *_, holds in checks) else 1


def measure(
    contest: Contest, num_rounds: int, say: Callable[[str], None]
) -> tuple[list[dict[str, Result]], dict[str, str]]:
    """Every trainer once a round; who could not be run, and why."""
    results: list[dict[str, Result]] = []
    missing: dict[str, str] = {}
    for number in range(num_rounds):
        results.append({})
        for name in ("surefoot", *contest.others):
            if name in missing:
                continue
            say(f"round {number + 1} of {num_rounds}: {name}")
            was_quiet = wait_until_quiet(say)
            try:
                if name == "surefoot":
                    found = run_surefoot(contest)
                elif name == "plain":
                    found = run_plain(contest)
                else:
                    found = run_peer(name, contest.steps, contest.threads, contest.ranks)
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
