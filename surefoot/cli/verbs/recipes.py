"""`surefoot recipes`."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from surefoot.dist.startup import choose_device, set_threads
from surefoot.models.count import build_meta, count_parameters, flops_per_token
from surefoot.recipes.find import shipped
from surefoot.train.facts import peak_flops

EFFICIENCY = 0.25
"""Share of the matmul ceiling that a small model's whole step reaches here; the table says so."""


def run() -> None:
    """Print the table."""
    set_threads(None)
    peak, _ = peak_flops(choose_device("auto"), torch.bfloat16)
    table = Table("recipe", box=None, pad_edge=False)
    for title in ("parameters", "tokens", "FLOPs", "time here"):
        table.add_column(title, justify="right")
    table.add_column("what it is")
    for name, function in shipped().items():
        chosen = function()
        model = build_meta(chosen.model)
        flops = flops_per_token(model, chosen.data.sequence_length)["causal"] * chosen.tokens
        table.add_row(
            name,
            _count(count_parameters(model)["total"]),
            _count(chosen.tokens),
            f"{flops:.1e}",
            _duration(flops / peak / EFFICIENCY) if peak else "-",
            (function.__doc__ or "").strip().splitlines()[0],
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"time here: FLOPs / ({EFFICIENCY:.0%} of the matmul ceiling measured just now); data preparation is extra"
    )


def _count(number: int) -> str:
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"


def _duration(seconds: float) -> str:
    for size, unit in ((86400 * 365, "years"), (86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.0f} s"
