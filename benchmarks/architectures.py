"""Quality beside the cost of serving: the quickstart's architectures at equal FLOPs a token, over several seeds.

    python benchmarks/architectures.py [--steps 200] [--seeds 2] [--out runs/architectures] [--report FILE.md]

Each run is a run folder: started again, finished runs are read and a broken one goes on. The table has held-out bits per byte
(mean, and half the range over seeds), the bytes of a sequence's state after 4,096 tokens and what one more adds, and the measured
milliseconds of a decoded token after 1,024.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from surefoot.infer.decode import measure
from surefoot.models.count import build_meta, flops_per_token
from surefoot.planner.serving import Serving
from surefoot.recipes.find import shipped

NAMES = (
    "quickstart",
    "quickstart-window",
    "quickstart-mamba2",
    "quickstart-delta",
    "quickstart-mla",
    "quickstart-moe",
    "quickstart-moe-sigmoid",
    "quickstart-moe-sinkhorn",
)
CONTEXT, DECODED_AFTER = 4096, 1024


def result(folder: Path) -> float | None:
    """Final held-out bits per byte of a finished run."""
    facts = folder / "facts.json"
    if not facts.is_file():
        return None
    value = json.loads(facts.read_text(encoding="utf-8")).get("result", {}).get("heldout_bits_per_byte")
    return None if value is None else float(value)


def train(name: str, folder: Path, steps: int, seed: int) -> float:
    """Start or continue one run to its end."""
    sets = [f"train.num_steps={steps}", f"train.seed={seed}", "observe.prompts=[]", f"observe.evaluate_every={steps}"]
    options = [option for assignment in sets for option in ("--set", assignment)]
    command = "from surefoot.cli.main import main; main()"
    subprocess.run(
        [sys.executable, "-c", command, "train", name, "--continue", "--out", str(folder), *options], check=True
    )
    found = result(folder)
    if found is None:
        raise SystemExit(f"{folder} was stopped; run this again to go on")
    return found


def row(name: str, losses: list[float]) -> list[str]:
    """The cells of one architecture."""
    run = shipped()[name]()
    serving = Serving(run.model, torch.bfloat16)
    flops = flops_per_token(build_meta(run.model), run.data.sequence_length)["causal"]
    cpu = torch.device("cpu")
    (decoded,) = measure(run.model, [DECODED_AFTER], 1, 64, dtype=torch.float32, device=cpu, announce=lambda _: None)
    half = (max(losses) - min(losses)) / 2
    return [
        name,
        f"{statistics.fmean(losses):.4f} ± {half:.4f}",
        f"{flops:.3g}",
        f"{serving.parameters['total']:,}",
        f"{serving.parameters['active']:,}",
        f"{serving.state_bytes(CONTEXT):,}",
        f"{serving.state_slope(CONTEXT):,.0f}",
        f"{1e3 * decoded.seconds:.2f}",
    ]


def table(found: dict[str, list[float]], steps: int) -> str:
    """One row an architecture, as Markdown."""
    seeds = len(next(iter(found.values())))
    titles = [
        "recipe",
        "held-out bits per byte",
        "training FLOPs a token",
        "parameters",
        "active",
        f"state bytes at {CONTEXT:,} (bf16)",
        "a token",
        f"decode ms after {DECODED_AFTER:,} (fp32)",
    ]
    lines = [
        f"{steps} steps of 4,096 tokens, {seeds} seeds",
        "",
        f"| {' | '.join(titles)} |",
        "|---" * len(titles) + "|",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(row(name, losses))} |" for name, losses in found.items())])


def main() -> None:
    """Run what is missing, one after another, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/architectures"))
    parser.add_argument("--report", type=Path, help="write the table there too")
    options = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    for seed in range(options.seeds):
        for name in NAMES:
            folder = options.out / f"{name}-{options.steps}-{seed}"
            known = result(folder)
            found[name].append(train(name, folder, options.steps, seed) if known is None else known)
    text = table(found, options.steps)
    print(text)
    if options.report is not None:
        options.report.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
