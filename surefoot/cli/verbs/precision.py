"""`surefoot precision`."""

from __future__ import annotations

import sys
import time
from typing import cast

from surefoot.config import ConfigError, override
from surefoot.dist.startup import set_threads, tune_allocator
from surefoot.recipes.find import find_recipe
from surefoot.study.precision import (
    FORMATS,
    SEEDS,
    STEPS,
    TOO_SATURATED,
    TOO_UNDERFLOWED,
    WARM_UP,
    Budget,
    Error,
    Numbers,
    budget,
)


def run(recipe: str, formats: list[str], sets: list[str], allow: list[str]) -> None:
    """Print the error budget of a recipe."""
    for name in formats:
        if name not in FORMATS:
            raise ConfigError("--format", name, f"is none; choose among {', '.join(FORMATS)}")
    chosen = override(find_recipe(recipe, allow), sets)
    set_threads(chosen.train.threads)
    tune_allocator()
    started = time.monotonic()

    def announce(text: str) -> None:
        print(f"[{time.monotonic() - started:4.0f} s] {text}", file=sys.stderr, flush=True)

    dataset = chosen.data.build(announce=announce)
    found = budget(chosen, dataset, [cast(Numbers, name) for name in formats] or FORMATS, announce)
    print("\n".join([*_products(found), "", *_formats(found), "", *advice(found)]))


def _products(found: Budget) -> list[str]:
    """A line a product: its largest error in each format."""
    names = list(next(iter(found.errors.values()), {}))
    width = max([len(name) for name in names], default=0)
    lines = [
        "largest relative error of each product's output / gradients against fp32, in % "
        f"(* more than {TOO_SATURATED:.1%} of an operand saturates, or {TOO_UNDERFLOWED:.0%} underflows)",
        "  ".join([" " * width, *(f"{numbers:>13}" for numbers in found.errors)]),
    ]
    for name in names:
        cells = [_cell(errors[name]) for errors in found.errors.values()]
        lines.append("  ".join([f"{name:{width}}", *(f"{cell:>13}" for cell in cells)]))
    return lines


def _cell(error: Error) -> str:
    is_lossy = error.saturated > TOO_SATURATED or error.underflowed > TOO_UNDERFLOWED
    gradients = max(error.input_gradient, error.weight_gradient)
    return f"{100 * error.output:.2f} / {100 * gradients:.2f}" + ("*" if is_lossy else " ")


def _formats(found: Budget) -> list[str]:
    """A line a format: its worst product, and what became of the loss."""
    lines = [
        f"{'':>10}  {'saturated':>9}  {'underflowed':>11}  {'worst product':>13}  loss gap to fp32, nats a token "
        f"(after {WARM_UP} + {STEPS} steps, {SEEDS} seeds)"
    ]
    for numbers, errors in found.errors.items():
        gap, worst = found.gaps[numbers], max(error.largest for error in errors.values())
        saturated = max(error.saturated for error in errors.values())
        underflowed = max(error.underflowed for error in errors.values())
        lines.append(
            f"{numbers:>10}  {saturated:>9.3%}  {underflowed:>11.2%}  {worst:>13.2%}  {gap.mean:+.4f} +- {gap.error:.4f}  "
            f"({', '.join(f'{value:+.4f}' for value in gap.seeds)})"
        )
    return lines + [f"{numbers:>10}  cannot be used: {why}" for numbers, why in found.refused.items()]


def advice(found: Budget) -> list[str]:
    """Which layers to keep in bf16, as an option to copy."""
    lines = []
    for numbers in found.errors:
        layers = found.to_keep(numbers)
        if numbers == "bf16" or not layers:
            continue
        if len(layers) == len({name.split(".")[1] for name in found.errors[numbers]}):
            lines.append(f"{numbers}: loses much in every layer; {next(iter(layers.values()))}, for one")
            continue
        lines.append(f"{numbers}: keep in bf16 with --set precision.keep_layers=[{','.join(map(str, layers))}]")
        lines += [f"    layer {layer}: {why}" for layer, why in layers.items()]
    return lines or ["no layer stands out"]
