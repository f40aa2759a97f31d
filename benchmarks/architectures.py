"""Quality beside the cost of serving: the quickstart's architectures at equal FLOPs a token, over several seeds.

    python benchmarks/architectures.py [--steps 200] [--seeds 2] [--out runs/architectures] [--report FILE.md]

Each run is a run folder: started again, finished runs are read and a broken one goes on. The table has held-out bits per byte
(mean, and half the range over seeds), the bytes of a sequence's state after 4,096 tokens and what one more adds, and the measured
milliseconds of a decoded token after 1,024.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch

from surefoot.infer.decode import measure
from surefoot.models.count import build_meta, flops_per_token
from surefoot.planner.serving import Serving
from surefoot.recipes.find import shipped

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.runs import trained

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
            sets = [f"train.num_steps={options.steps}", f"train.seed={seed}"]
            sets += ["observe.prompts=[]", f"observe.evaluate_every={options.steps}"]
            found[name].append(trained(name, folder, sets))
    text = table(found, options.steps)
    print(text)
    if options.report is not None:
        options.report.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
