"""`surefoot bench decode`."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from surefoot.cli.verbs.cost import DTYPES, duration, parse_counts
from surefoot.cli.verbs.dry import shown
from surefoot.config import ConfigError
from surefoot.dist.startup import choose_device, set_threads
from surefoot.infer.decode import measure
from surefoot.recipes.find import find_recipe


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
