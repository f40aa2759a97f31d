"""Parts of a step against their bars: the loss, recomputation, and what recording costs.

    python benchmarks/parts.py [loss] [recompute] [recording] [--json]

Legend: T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.peers import Check, print_checks  # noqa: E402
from benchmarks.runs import train  # noqa: E402
from benchmarks.workload import common  # noqa: E402
from surefoot.dist.startup import tune_allocator  # noqa: E402
from surefoot.observe.folder import RunFolder  # noqa: E402
from surefoot.ops.loss import linear_cross_entropy  # noqa: E402
from surefoot.optim.schedule import progress_of  # noqa: E402
from surefoot.train.step import take_step  # noqa: E402
from surefoot.train.trainer import Trainer  # noqa: E402

TOKENS, WIDTH, VOCABULARY = 2048, 768, 50_304
LOSS_SECONDS, LOSS_SHARE = 0.45, 1 / 8
BUDGET, OFF = 96 << 20, 0.1
"""Bytes asked for, and by what share of them the kept ones may be off."""
RECORDING = 0.03
PAIRS = 30


def loss() -> Iterator[Check]:
    """Linear cross-entropy beside logits held whole, which runs with the allocator as it comes."""
    text = subprocess.run([sys.executable, __file__, "--eager-loss"], capture_output=True, text=True, check=True).stdout
    eager = json.loads(text)
    tune_allocator()
    seconds, extra = _timed(lambda x, weight, targets: linear_cross_entropy(x, weight, targets)[0] / TOKENS)
    whole = 4 * TOKENS * VOCABULARY
    yield (
        f"linear cross-entropy of {TOKENS} x {WIDTH} x {VOCABULARY} within {1000 * LOSS_SECONDS:.0f} ms",
        f"{1000 * seconds:.0f} ms, {eager['seconds'] / seconds:.2f} x as fast as eager's {1000 * eager['seconds']:.0f}",
        seconds <= LOSS_SECONDS,
    )
    yield (
        f"its memory at most {LOSS_SHARE:.1%} of full fp32 logits",
        f"{extra / whole:.1%} ({extra / 2**20:.0f} MiB beside inputs and gradients; eager {eager['extra'] / 2**20:.0f})",
        extra <= LOSS_SHARE * whole,
    )


def _eager(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    return F.cross_entropy((x_TD @ weight_VD.t()).float(), targets_T)


def _timed(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[float, int]:
    """Median seconds of five passes forward and backward, and the bytes that one needs beside inputs and gradients."""
    torch.manual_seed(0)
    x_TD = torch.randn(TOKENS, WIDTH).bfloat16().requires_grad_()
    weight_VD = (0.02 * torch.randn(VOCABULARY, WIDTH)).bfloat16().requires_grad_()
    targets_T = torch.randint(VOCABULARY, (TOKENS,))

    def once() -> float:
        x_TD.grad = weight_VD.grad = None
        started = time.perf_counter()
        function(x_TD, weight_VD, targets_T).backward()
        return time.perf_counter() - started

    # A new process's first pass: little that an earlier one left can serve it. What making the inputs took does not count.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = _status("VmRSS")
    once()
    extra = _status("VmHWM") - before - x_TD.nbytes - weight_VD.nbytes
    return statistics.median(once() for _ in range(5)), extra


def _status(key: str) -> int:
    """Bytes of this process as Linux counts them."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def recompute() -> Iterator[Check]:
    """Modes of recomputation against none: the same bits, how many bytes are kept, and how much longer a step takes."""
    modes = {
        "none": [],
        "selective": ["plan.recompute.mode=selective"],
        "full": ["plan.recompute.mode=full"],
        "budget": ["plan.recompute.mode=budget", f"plan.recompute.budget={BUDGET >> 20}MiB"],
    }
    found = {}
    with tempfile.TemporaryDirectory(prefix="surefoot-bench-") as folder:
        for mode, sets in modes.items():
            out = Path(folder, mode)
            recipe = f"{ROOT / 'benchmarks' / 'workload.py'}:common"
            train(recipe, out, ["train.num_steps=20", *sets], is_quiet=True)
            facts = json.loads((out / "facts.json").read_text(encoding="utf-8"))
            lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            found[mode] = (
                facts["result"]["weights_sha256"],
                facts.get("recomputation", {}),
                statistics.median(line["step_seconds"] for line in lines[5:]),
            )
    weights, _, plain = found.pop("none")
    for mode, (other, kept, seconds) in found.items():
        num_bytes = kept["kept_bytes"]
        said = f"{num_bytes / 2**20:.1f} MiB of layers kept, a step takes {seconds / plain:.2f} x as long"
        yield f"{mode} recomputation: weights after 20 steps bitwise those of none", said, other == weights
    num_bytes = found["budget"][1]["kept_bytes"]
    yield (
        f"recomputation's budget of {BUDGET >> 20} MiB met within {OFF:.0%}",
        f"{num_bytes / 2**20:.1f} MiB",
        abs(num_bytes - BUDGET) <= OFF * BUDGET,
    )


def recording() -> Iterator[Check]:
    """Steps with all that is recorded by default beside bare ones, in turn."""
    with tempfile.TemporaryDirectory(prefix="surefoot-bench-") as folder:
        run = common(2 * PAIRS + 10)
        trainer = Trainer(run, RunFolder.create(Path(folder, "run"), run))
        trainer._set_up()
        ratios = []
        with trainer.saver, trainer._loader() as loader, trainer.clock:

            def bare() -> None:
                take_step(
                    trainer.laid,
                    trainer.ranks,
                    trainer.params,
                    trainer.optimizer,
                    (batch := next(loader)),
                    num_tokens=batch.num_tokens,
                    scale=run.schedule(progress_of(trainer.progress.step, run.train.num_steps)),
                    micro_batch=run.micro_batch,
                    max_gradient_norm=run.train.max_gradient_norm,
                    device=trainer.device,
                    dtype=trainer.dtype,
                )

            for pair in range(PAIRS + 3):
                took = {}
                order = ("recorded", "bare") if pair % 2 else ("bare", "recorded")
                for kind in order:
                    started = time.perf_counter()
                    if kind == "recorded":
                        trainer._step(loader)
                    else:
                        bare()
                    took[kind] = time.perf_counter() - started
                if pair >= 3:
                    ratios.append(took["recorded"] / took["bare"])
        for hook in trainer.hooks:
            hook.close()
    cost = statistics.median(ratios) - 1
    quarters = statistics.quantiles(ratios, n=4)
    yield (
        f"what is recorded by default costs at most {RECORDING:.0%} of a step",
        f"{cost:+.1%} (middle half {quarters[0] - 1:+.1%} to {quarters[2] - 1:+.1%})",
        cost <= RECORDING,
    )


PARTS: dict[str, Callable[[], Iterator[Check]]] = {"loss": loss, "recompute": recompute, "recording": recording}


def main() -> int:
    """Measure what is named, or everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--json", action="store_true", help="one JSON list a bar")
    parser.add_argument("--eager-loss", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.eager_loss:
        seconds, extra = _timed(_eager)
        print(json.dumps({"seconds": seconds, "extra": extra}))
        return 0
    for name in chosen.parts:
        if name not in PARTS:
            parser.error(f"{name}: is none of {', '.join(PARTS)}")
    return print_checks((check for name in chosen.parts or PARTS for check in PARTS[name]()), as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
