"""Does training in narrow numbers end where fp32 ends? The quickstart in each, over several seeds.

    python benchmarks/precision.py [--steps 500] [--seeds 3] [--out runs/precision]

Each run is a run folder: started again, finished runs are read and a broken one goes on. The table says each format's final
held-out bits per byte beside fp32's of the same seed, and whether the mean is within `BAR`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.runs import trained

FORMATS = {
    "fp32": ["precision.compute=fp32"],
    "bf16": [],
    **{name: [f"precision.products={name}"] for name in ("rowwise", "blockwise", "mxfp8")},
}
BAR = 0.005
"""Of bits per byte, relative to fp32."""


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
            common = [f"train.num_steps={options.steps}", f"train.seed={seed}", "observe.prompts=[]"]
            found[name].append(trained("quickstart", folder, [*common, *sets]))
    print(table(found, options.steps))


if __name__ == "__main__":
    main()
