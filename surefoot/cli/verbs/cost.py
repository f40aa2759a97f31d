"""`surefoot cost`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from surefoot.cli.verbs.dry import shown
from surefoot.config import ConfigError
from surefoot.planner.devices import Device, parse_device
from surefoot.planner.serving import USABLE, Serving
from surefoot.recipes.find import find_recipe
from surefoot.report.reading import read_run
from surefoot.report.summary import summarise

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}


def run(
    recipes: Sequence[str],
    contexts: str,
    batches: str,
    device: str,
    num_devices: int,
    dtype: str,
    runs: Sequence[Path],
    allow: Sequence[str],
) -> None:
    """Print two tables: what each model weighs, and what each context costs it."""
    lengths, sizes = parse_counts("--context", contexts), parse_counts("--batch", batches)
    chosen = parse_device(device).times(num_devices)
    if dtype not in DTYPES:
        raise ConfigError("--dtype", dtype, f"choose one of {', '.join(DTYPES)}")
    if not recipes and not runs:
        raise ConfigError("RECIPE", None, "is missing; name recipes or run folders, or give --runs")
    models: list[tuple[str, Serving, Path | None]] = []
    for text in [*recipes, *map(str, runs)]:
        found = find_recipe(text, allow)
        folder = Path(text) if Path(text).is_dir() else None
        models.append((folder.name if folder else found.name, Serving(found.model, DTYPES[dtype]), folder))
    console = Console(highlight=False)
    console.print(
        f"{chosen.name}: {shown(chosen.memory)}, {chosen.flops / 1e12:,.0f} TFLOP/s, {chosen.bandwidth / 1e12:.3g} TB/s; "
        f"weights and states in {dtype}"
    )
    console.print(_models(models, max(lengths)))
    console.print(_contexts(models, lengths, sizes, chosen))
    console.print(
        "least times by roofline, without what devices send each other: no implementation is faster. "
        f"Batches fill {USABLE:.0%} of memory at most; what does not fit is in brackets."
    )


def parse_counts(option: str, text: str) -> list[int]:
    """`4k,32k,128k` as numbers, k being 1,024."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"([1-9]\d{0,9})([kK]?)", part.strip())
        if match is None:
            raise ConfigError(option, text, "is not a list like 1,16,64 or 4k,32k,128k")
        found.append(int(match[1]) * (1024 if match[2] else 1))
    return found


def _models(models: Sequence[tuple[str, Serving, Path | None]], context: int) -> Table:
    table = Table("recipe", box=None, pad_edge=False)
    titles = ["parameters", "active", "weights", "state a token", "state besides", "FLOPs a token"]
    measured = any(folder is not None for *_, folder in models)
    for title in [*titles, *(["held-out bits per byte"] if measured else [])]:
        table.add_column(title, justify="right")
    for name, serving, folder in models:
        slope = serving.state_slope(context)
        flops = sum(ffn.flops() for ffn in serving.model.ffns()) + serving.model.head.flops()
        flops += sum(mixer.decode_flops(1) for mixer in serving.model.mixers())
        cells = [
            f"{serving.parameters['total']:,}",
            f"{serving.parameters['active']:,}",
            shown(serving.weight_bytes),
            f"{slope:,.0f} B",
            shown(max(0.0, serving.state_bytes(context) - slope * context)),
            f"{flops:.3g}",
        ]
        if measured:
            loss = math.nan if folder is None else summarise(read_run(folder)).heldout_bits_per_byte
            cells.append("-" if math.isnan(loss) else f"{loss:.4f}")
        table.add_row(name, *cells)
    return table


def _contexts(
    models: Sequence[tuple[str, Serving, Path | None]], lengths: Sequence[int], sizes: Sequence[int], device: Device
) -> Table:
    table = Table("recipe", box=None, pad_edge=False)
    titles = ["context", "state", "largest batch", "prefill", "by"]
    for batch in sizes:
        titles += [f"decode x {batch}", "by", "bytes a token"]
    for title in titles:
        table.add_column(title, justify="right")
    for name, serving, _ in models:
        for context in lengths:
            largest = serving.largest_batch(context, device)
            prefill = serving.prefill(context, 1, device)
            cells = [f"{context:,}", shown(serving.state_bytes(context)), f"{largest:,}"]
            cells += _fitting(largest >= 1, duration(prefill.seconds), prefill.limit)
            for batch in sizes:
                step = serving.decode(context, batch, device)
                cells += _fitting(largest >= batch, duration(step.seconds), step.limit, shown(step.num_bytes / batch))
            table.add_row(name, *cells)
    return table


def _fitting(fits: bool, *cells: str) -> list[str]:
    show: Callable[[str], str] = str if fits else "({})".format
    return [show(cell) for cell in cells]


def duration(seconds: float) -> str:
    """Seconds with three digits."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e9:.3g} ns"
