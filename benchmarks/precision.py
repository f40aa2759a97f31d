"""Does training in narrow numbers end where fp32 ends? The quickstart in each, over several seeds.

    python benchmarks/precision.py [--steps 500] [--seeds 3] [--out runs/precision]

Each run is a run folder: started again, finished runs are read and a broken one goes on. The table says each format's final
held-out bits per byte beside fp32's of the same seed, and whether the mean is within `BAR`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

FORMATS = {
    "fp32": ["precision.compute=fp32"],
    "bf16": [],
    **{name: [f"precision.products={name}"] for name in ("rowwise", "blockwise", "mxfp8")},
}
BAR = 0.005
"""Of bits per byte, relative to fp32."""


def result(folder: Path) -> float | None:
    """Final held-out bits per byte of a finished run."""
    facts = folder / "facts.json"
    if not facts.is_file():
        return None
    value = json.loads(facts.read_text(encoding="utf-8")).get("result", {}).get("heldout_bits_per_byte")
    return None if value is None else float(value)


def train(folder: Path, steps: int, seed: int, sets: list[str]) -> float:
    """Start or continue one run to its end."""
    assignments = [f"train.num_steps={steps}", f"train.seed={seed}", "observe.prompts=[]", *sets]
    options = [option for assignment in assignments for option in ("--set", assignment)]
    command = "from surefoot.cli.main import main; main()"
    subprocess.run(
        [sys.executable, "-c", command, "train", "quickstart", "--continue", "--out", str(folder), *options], check=True
    )
    found = result(folder)
    if found is None:
        raise SystemExit(f"{folder} was stopped; run this again to go on")
    return found


def table(found: dict[str, list[float]], steps: int) -> str:
    """One row a format, as Markdown."""
    seeds = len(found["fp32"])
    lines = [
        f"quickstart, {steps} steps, held-out bits per byte; difference from fp32 of the same seed, mean of {seeds}",
        "",
        "| format | " + " | ".join(f"seed {seed}" for seed in range(seeds)) + f" | from fp32 | within {BAR:.1%} |",
        "|---" * (seeds + 3) + "|",
    ]
    for name, values in found.items():
        off = statistics.fmean(value / exact - 1 for value, exact in zip(values, found["fp32"], strict=True))
        cells = [name, *(f"{value:.4f}" for value in values), f"{off:+.2%}", "yes" if off <= BAR else "NO"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, one after another, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/precision"))
    options = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in FORMATS}
    for seed in range(options.seeds):
        for name, sets in FORMATS.items():
            folder = options.out / f"{name}-{options.steps}-{seed}"
            known = result(folder)
            found[name].append(train(folder, options.steps, seed, sets) if known is None else known)
    print(table(found, options.steps))


if __name__ == "__main__":
    main()
