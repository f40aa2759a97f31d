"""`surefoot bench decode` and `surefoot bench cache`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from surefoot.blocks.mixers.cache import NarrowKind
from surefoot.cli.verbs.cost import DTYPES, duration, parse_counts
from surefoot.cli.verbs.dry import shown
from surefoot.cli.verbs.generate import checkpoint_of
from surefoot.config import ConfigError, load_json
from surefoot.data.dataset import Batch
from surefoot.dist.startup import choose_device, set_threads
from surefoot.infer.decode import measure
from surefoot.infer.fidelity import CacheLoss, cache_loss
from surefoot.recipes.find import find_recipe
from surefoot.train.run import Run
from surefoot.train.state import load_model


def decode(recipe: str, contexts: str, batch: int, steps: int, dtype: str, allow: list[str]) -> None:
    """Print one row a context."""
    lengths = parse_counts("--context", contexts)
    if dtype not in DTYPES or dtype == "fp8":
        raise ConfigError("--dtype", dtype, "choose bf16, fp16 or fp32")
    chosen = find_recipe(recipe, allow)
    set_threads(chosen.train.threads)
    device = choose_device("auto")
    console, table = Console(highlight=False), Table("context", box=None, pad_edge=False)
    for title in ("a step", "fastest", "slowest", "tokens/s", "states hold", "formula", "bytes a token"):
        table.add_column(title, justify="right")
    previous: tuple[int, int] | None = None
    with Console(stderr=True).status("building") as status:
        found = measure(chosen.model, lengths, batch, steps, dtype=DTYPES[dtype], device=device, announce=status.update)
        for each in found:
            slope = "-"
            if previous is not None and each.context != previous[0]:
                slope = f"{(each.state_bytes - previous[1]) / (each.context - previous[0]) / batch:,.0f} B"
            previous = each.context, each.state_bytes
            table.add_row(
                f"{each.context:,}",
                duration(each.seconds),
                duration(each.fastest),
                duration(each.slowest),
                f"{batch / each.seconds:,.0f}",
                shown(each.state_bytes),
                shown(each.formula_bytes),
                slope,
            )
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    console.print(f"{chosen.name} on {device.type}{threads}: {batch} sequences, median of {steps} steps, {dtype}")
    console.print(table)


def cache(folder: Path, samples: int, step: int | None, allow: list[str]) -> None:
    """Print the loss with each kind of cache."""
    chosen = load_json(folder / "run.json", Run, allow=allow)
    checkpoint = checkpoint_of(folder, step)
    set_threads(chosen.train.threads)
    device = choose_device("auto")
    model = load_model(chosen, checkpoint, device)
    data = chosen.data.build(announce=lambda text: print(text, file=sys.stderr))
    batches = [torch.from_numpy(batch.tokens_BL).long().to(device) for batch in _first(data.heldout(8), samples)]
    if not batches:
        raise ConfigError(
            str(folder), None, "has no held-out text to measure on; train with data.heldout_fraction above 0"
        )
    table = Table("cache", box=None, pad_edge=False)
    for title in ("nats a token", "change", "bytes a batch", "of the plain"):
        table.add_column(title, justify="right")
    dtype = torch.float32 if device.type == "cpu" else chosen.precision.compute_dtype
    kinds: tuple[NarrowKind | None, ...] = (None, "int8", "fp8")
    plain: CacheLoss | None = None
    for kind in kinds:
        with Console(stderr=True).status(f"reading with a cache in {kind or dtype}"):
            try:
                found = cache_loss(model, batches, kind, dtype=dtype)
            except ValueError as error:
                raise ConfigError(str(folder), kind, str(error)) from None
        plain = plain or found
        table.add_row(
            kind or str(dtype).removeprefix("torch."),
            f"{found.nll:.5f}",
            f"{found.nll - plain.nll:+.5f}",
            shown(found.state_bytes),
            f"{found.state_bytes / plain.state_bytes:.0%}",
        )
    console = Console(highlight=False)
    console.print(f"{chosen.name}, step {checkpoint.step}: {found.tokens:,} held-out tokens")
    console.print(table)


def _first(batches: Iterator[Batch], samples: int) -> Iterator[Batch]:
    """Whole batches until there are as many samples."""
    seen = 0
    for batch in batches:
        if seen >= samples:
            return
        seen += len(batch.tokens_BL)
        yield batch
