"""Does surefoot compute on this GPU what it computes on a CPU, and how fast? One Markdown table within a time budget.

    python benchmarks/gpu_check.py --report report.md
    python benchmarks/gpu_check.py --device cpu --tiny       # the same path on any machine; its times say nothing

First parity: tiny models of some mixers in fp64 on the CPU against fp32 on the device, by loss, gradients and the loss after one
optimizer step. Then step times beside a plain PyTorch loop and the measured matmul ceiling. Rows that the budget leaves no time
for are listed as skipped, a row that fails or runs out of it says so, and the exit code is 1 where parity fails.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from surefoot.blocks.ffn.moe import MoEConfig
from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.blocks.mixers.delta_net import GatedDeltaNetConfig
from surefoot.blocks.mixers.mamba2 import Mamba2Config
from surefoot.dist.mesh import Mesh
from surefoot.models.decoder import DecoderConfig
from surefoot.optim.adamw import AdamWConfig
from surefoot.optim.base import gradients_of
from surefoot.optim.clip import clip_, global_norm
from surefoot.parallel import compiled
from surefoot.parallel.apply import Laid, lay_out
from surefoot.parallel.plan import Plan
from surefoot.parallel.recompute import RecomputeConfig
from surefoot.precision.policy import PrecisionConfig
from surefoot.train.agree import Ranks
from surefoot.train.state import laid_params

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import plain
from benchmarks.rows import CLIP, LEARNING_RATE, NORM_EPS, ROPE_THETA, Size

MODELS = {
    "160M": Size(768, 12, 12, 12, 3072, length=2048, batch=8),
    "410M": Size(1024, 24, 16, 8, 3584, length=2048, batch=8),
    "1B": Size(2048, 16, 16, 8, 6656, length=2048, batch=4),
}
TINY = Size(32, 2, 2, 2, 64, vocabulary=64, length=32, batch=2)
STEPS, WARM_UP = 8, 3
TOLERANCE = 1e-3
"""Relative, of fp32 on a device against fp64."""

Recompute = Literal["none", "selective", "full"]
Numbers = Literal["bf16", "fp8"]


@dataclass(frozen=True)
class Row:
    """One measurement to make; `recompute` is None of the plain loop."""

    model: str
    recompute: Recompute | None
    numbers: Numbers
    compiles: bool

    @property
    def name(self) -> str:
        """In a few words."""
        who = "plain loop" if self.recompute is None else f"surefoot, {self.recompute} recomputation"
        return f"{self.model} {who}, {self.numbers}, {'compiled' if self.compiles else 'eager'}"


@dataclass(frozen=True)
class Found:
    """Seconds of the median step, peak bytes (None on a CPU) and the last loss."""

    seconds: float
    peak_bytes: int | None
    loss: float


def rows() -> list[Row]:
    """All measurements, those that matter most first: eager before compiled, within that small models before large."""
    found = []
    for compiles, model in itertools.product((False, True), MODELS):
        found.append(Row(model, None, "bf16", compiles))
        each: tuple[tuple[Numbers, Recompute], ...] = tuple(
            itertools.product(("bf16", "fp8"), ("none", "selective", "full"))
        )
        found += [Row(model, recompute, numbers, compiles) for numbers, recompute in each]
    return found


# -- parity ------------------------------------------------------------------------------------------------------------


def tiny_models() -> dict[str, DecoderConfig]:
    """Models of two layers by what they show."""
    base = DecoderConfig(
        vocab_size=61,
        width=32,
        depth=2,
        mixer=AttentionConfig(num_heads=2, num_kv_heads=2),
        ffn=SwiGLUConfig(hidden=64),
    )
    changes: dict[str, dict[str, Any]] = {
        "attention": {},
        "window": {"mixer": AttentionConfig(num_heads=2, num_kv_heads=1, window=8)},
        "experts": {"ffn": MoEConfig(num_experts=4, top_k=2, hidden=32)},
        "mamba2": {"mixer": Mamba2Config(num_heads=2, head_size=16, state_size=16)},
        "delta": {"mixer": GatedDeltaNetConfig(num_heads=2, key_size=16)},
    }
    return {name: base.model_copy(update=change) for name, change in changes.items()}


def parity(config: DecoderConfig, device: torch.device) -> dict[str, float]:
    """Relative differences of the device in fp32 from the CPU in fp64: loss, worst gradient, loss after a step of AdamW."""
    generator = torch.Generator().manual_seed(1)
    tokens_BL, targets_BL = (torch.randint(config.vocab_size, (4, 32), generator=generator) for _ in range(2))
    docs_BL = (torch.rand(4, 32, generator=generator) < 0.1).long().cumsum(1)

    def passed(on: torch.device, dtype: torch.dtype) -> tuple[float, dict[str, Tensor], float]:
        batch = (tokens_BL.to(on), targets_BL.to(on), docs_BL.to(on))
        laid = _laid(
            config, Plan(), 32, PrecisionConfig(compute="fp64" if dtype is torch.float64 else "fp32"), dtype, on
        )
        loss, _ = laid.accumulate([batch], tokens_BL.numel(), dtype)
        params = laid_params(laid)
        gradients = {param.name: param.tensor.grad.double().cpu() for param in params if param.tensor.grad is not None}
        AdamWConfig(lr=1e-3).build(params).step(1.0)
        laid.after_step()
        return loss, gradients, laid.evaluate([batch], dtype)

    exact, ours = passed(torch.device("cpu"), torch.float64), passed(device, torch.float32)
    worst = max(float((ours[1][name] - true).norm() / true.norm().clamp_min(1e-9)) for name, true in exact[1].items())
    return {
        "loss": abs(ours[0] / exact[0] - 1),
        "gradients": worst,
        "loss after a step": abs(ours[2] / exact[2] - 1),
    }


# -- speed -------------------------------------------------------------------------------------------------------------


def ceiling(device: torch.device, size: int) -> float:
    """FLOP/s of the best of some square bf16 products."""
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    best = 0.0
    for _ in range(10):
        start = _now(device)
        torch.mm(left, right)
        best = max(best, 2 * size**3 / (_now(device) - start))
    return best


def flops_per_token(size: Size) -> float:
    """Of forward and backward without recomputation: 6 a weight of a product, and causal attention."""
    head_size = size.width // size.heads
    attention = 2 * size.width * size.width + 2 * size.width * size.kv_heads * head_size
    weights = size.depth * (attention + 3 * size.width * size.ffn) + size.width * size.vocabulary
    return 6.0 * weights + 6.0 * size.depth * size.width * size.length


def measured(row: Row, size: Size, device: torch.device, backend: str) -> Found:
    """A few steps on random tokens."""
    torch.manual_seed(0)
    tokens_BL, targets_BL = (torch.randint(size.vocabulary, (size.batch, size.length), device=device) for _ in range(2))
    step = (
        _plain_step(size, device, row.compiles, backend)
        if row.recompute is None
        else _surefoot_step(row, size, device, backend)
    )
    times, loss = [], 0.0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(WARM_UP + STEPS):
        start = _now(device)
        loss = step(tokens_BL, targets_BL)
        times.append(_now(device) - start)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Found(statistics.median(times[WARM_UP:]), peak, loss)


Step = Callable[[Tensor, Tensor], float]


def _plain_step(size: Size, device: torch.device, compiles: bool, backend: str) -> Step:
    model = plain.Llama(size).to(device)
    adamw = plain.optimizer(model)
    if compiles:
        for layer in model.layers:
            layer.compile(backend=backend)

    def step(tokens_BL: Tensor, targets_BL: Tensor) -> float:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(tokens_BL, targets_BL)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adamw.step()
        adamw.zero_grad()
        found: float = loss.item()
        return found

    return step


def _surefoot_step(row: Row, size: Size, device: torch.device, backend: str) -> Step:
    assert row.recompute is not None
    config = DecoderConfig(
        vocab_size=size.vocabulary,
        width=size.width,
        depth=size.depth,
        mixer=AttentionConfig(
            num_heads=size.heads, num_kv_heads=size.kv_heads, qk_norm="none", norm_eps=NORM_EPS, rope_theta=ROPE_THETA
        ),
        ffn=SwiGLUConfig(hidden=size.ffn),
        norm_eps=NORM_EPS,
        z_loss=0.0,
    )
    kept = 0 if size.depth < 3 else None
    precision = PrecisionConfig()
    if row.numbers == "fp8":
        precision = PrecisionConfig(products="rowwise", keep_first=kept, keep_last=kept)
    compiled.BACKEND = backend
    plan = Plan(recompute=RecomputeConfig(mode=row.recompute), compile="layers" if row.compiles else "none")
    laid = _laid(config, plan, size.length, precision, torch.float32, device)
    params, ranks = laid_params(laid), Ranks(laid.mesh, device)
    optimizer = AdamWConfig(lr=LEARNING_RATE).build(params)

    def step(tokens_BL: Tensor, targets_BL: Tensor) -> float:
        optimizer.zero_grad()
        num_tokens = targets_BL.numel()
        nll, _ = laid.accumulate([(tokens_BL, targets_BL, torch.zeros_like(tokens_BL))], num_tokens, torch.bfloat16)
        clip_(gradients_of(params), global_norm(params, ranks.group), CLIP)
        if laid.meter is not None:
            ranks.end_step(laid.meter)
        optimizer.step(1.0)
        laid.after_step()
        return nll / num_tokens

    return step


def _laid(
    config: DecoderConfig,
    plan: Plan,
    length: int,
    precision: PrecisionConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> Laid:
    return lay_out(
        plan,
        config,
        Mesh(plan.grid),
        sequence_length=length,
        dtype=dtype,
        device=device,
        seed=0,
        precision=precision,
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# -- the budget and the table ------------------------------------------------------------------------------------------


@contextmanager
def no_longer_than(seconds: float) -> Iterator[None]:
    """`TimeoutError` in the body once that time is over, as soon as Python runs again."""

    def stop(*_: object) -> None:
        raise TimeoutError("the time budget is over")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check(device: torch.device, budget: float, *, tiny: bool, wanted: Sequence[Row]) -> tuple[list[str], bool]:
    """Lines of the report, and whether parity holds."""
    end = time.monotonic() + budget
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    lines = [
        f"# surefoot on {name}",
        "",
        f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, budget {budget:.0f} s",
    ]
    lines += [
        "",
        "| parity, fp32 against fp64 on the CPU | loss | gradients | loss after a step | |",
        "|---|---|---|---|---|",
    ]
    holds = True
    for model, config in tiny_models().items():
        off = parity(config, device)
        is_close = all(value < TOLERANCE for value in off.values())
        holds &= is_close
        cells = [model, *(f"{value:.0e}" for value in off.values()), "same" if is_close else "DIFFERS"]
        lines.append(f"| {' | '.join(cells)} |")
    best = ceiling(device, 256 if tiny else 8192)
    lines += [
        "",
        f"Matmul ceiling (bf16): {best / 1e12:.2f} TFLOP/s. fp8 is rowwise, emulated around bf16 products.",
        "",
    ]
    lines += ["| row | step ms | tokens/s | of the ceiling | peak GiB | last loss |", "|---|---|---|---|---|---|"]
    skipped = []
    for row in wanted:
        left = end - time.monotonic()
        if left <= 0:
            skipped.append(row.name)
            continue
        size = replace(TINY) if tiny else MODELS[row.model]
        try:
            with no_longer_than(left):
                found = measured(row, size, device, "eager" if tiny else "inductor")
        except Exception as error:  # a row that cannot be had is a result
            said = " ".join(str(error).split())[:90].replace("|", "/")
            lines.append(f"| {row.name} | {type(error).__name__}: {said} | | | | |")
        else:
            rate = size.batch * size.length / found.seconds
            peak = "-" if found.peak_bytes is None else f"{found.peak_bytes / 2**30:.2f}"
            share = rate * flops_per_token(size) / best
            cells = [row.name, f"{found.seconds * 1e3:.1f}", f"{rate:,.0f}", f"{share:.0%}", peak, f"{found.loss:.4f}"]
            lines.append(f"| {' | '.join(cells)} |")
        if device.type == "cuda":
            torch.cuda.empty_cache()
        torch.compiler.reset()
    if skipped:
        lines += ["", f"Skipped for want of time: {'; '.join(skipped)}."]
    return lines, holds


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; 1 where parity fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="models of a few thousand weights, compile without code generation"
    )
    parser.add_argument("--budget", type=float, default=450.0, help="seconds, parity included")
    parser.add_argument("--report", type=Path, help="also write the table here")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU that torch can use; try --device cpu --tiny", file=sys.stderr)
        return 2
    lines, holds = check(torch.device(options.device), options.budget, tiny=options.tiny, wanted=rows())
    text = "\n".join(lines) + "\n"
    print(text)
    if options.report is not None:
        options.report.write_text(text, encoding="utf-8")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
