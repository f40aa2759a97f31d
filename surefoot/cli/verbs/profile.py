"""`surefoot profile`."""

from __future__ import annotations

import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from surefoot.cli.verbs.train import stretch
from surefoot.config import ConfigError, override
from surefoot.dist.launch import environment_rank, run_ranks, start_heartbeat
from surefoot.dist.startup import choose_device, join
from surefoot.recipes.find import find_recipe
from surefoot.study.profile import MFU, PARTS, PHASES, Profile, check_profile, profile


def run(recipe: str, steps: int, trace: Path | None, ranks: int | None, sets: list[str], allow: list[str]) -> int:
    """Print the tables; with `ranks`, as that many processes, of which rank 0 speaks."""
    rank, world = environment_rank()
    if ranks is not None and "WORLD_SIZE" in os.environ and ranks != world:
        raise ConfigError("--ranks", ranks, f"this process was started as one of {world}; drop it")
    chosen = stretch(override(find_recipe(recipe, allow), sets), ranks or world)
    check_profile(chosen, steps)
    if trace is not None and rank == 0:
        refuse_unwritable(trace)
    if ranks is not None and ranks > 1 and world == 1:
        with tempfile.TemporaryDirectory(prefix="surefoot-profile-") as logs:
            command = [sys.executable, "-m", "surefoot", *sys.argv[1:]]
            return run_ranks(command, ranks, Path(logs), lambda text: print(f"surefoot: {text}", file=sys.stderr))

    def say(text: str) -> None:
        if rank == 0:
            print(text, file=sys.stderr, flush=True)

    heartbeat = start_heartbeat(rank)
    if world > 1:
        join(choose_device(chosen.train.device), timedelta(seconds=chosen.train.timeout))
    try:
        found = profile(chosen, steps, rank=rank, heartbeat=heartbeat, trace=trace, say=say)
    finally:
        if world > 1:
            dist.destroy_process_group()
    if rank == 0:
        describe(
            found,
            f"{chosen.name}, {chosen.plan.describe()}",
            Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120),
        )
    return 0


def refuse_unwritable(file: Path) -> None:
    """`OSError` where the file cannot be written; before any step, and what was there stays."""
    was_there = file.exists()
    file.open("ab").close()
    if not was_there:
        file.unlink()


def describe(found: Profile, title: str, console: Console) -> None:
    """Phases, parts, layers, ceilings and MFU."""
    total = found.total()
    step = total.seconds + total.waited
    console.print(
        f"{title}: {1000 * found.step_seconds:,.1f} ms a step, {found.tokens_per_second:,.0f} tokens/s "
        f"({found.hooked_seconds / found.step_seconds:.2f} times as long while parts are timed)"
    )
    phases = _table("phase", "ms", "of the step", "waits for collectives, ms")
    for phase in PHASES:
        spent = found.total(phase=phase)
        if spent.seconds + spent.waited:
            phases.add_row(phase, _ms(spent.seconds), f"{spent.seconds / step:.1%}", _ms(spent.waited))
    phases.add_row("collectives", _ms(total.waited), f"{total.waited / step:.1%}", "")
    console.print(phases)
    parts = _table("part", "forward", "again", "backward", "of the step", "GFLOP/s", "of matmul", "GB/s", "of memory")
    for part in PARTS:
        ways = [found.total(phase=phase, part=part) for phase in ("forward", "recompute", "backward")]
        seconds, flops = sum(way.seconds for way in ways), found.total_flops(part=part)
        if seconds:
            cells = [_ms(way.seconds) for way in ways]
            parts.add_row(part, *cells, *_achieved(found, seconds, step, flops, sum(way.num_bytes for way in ways)))
    spent = found.total(phase="optimizer")
    cells = _achieved(found, spent.seconds, step, 0.0, spent.num_bytes)
    parts.add_row("optimizer", "", "", _ms(spent.seconds), *cells)
    console.print(parts)
    columns = ("mixer", "ffn", "norm")
    layers = _table("layer", *(f"{part} {way}" for part in columns for way in ("fwd", "bwd")), "all, ms")
    for layer in sorted({place.layer for place in found.spent if place.layer is not None}):
        cells = [
            _ms(found.total(phase=phase, part=part, layer=layer).seconds)
            for part in columns
            for phase in ("forward", "backward")
        ]
        layers.add_row(str(layer), *cells, _ms(found.total(layer=layer).seconds))
    console.print(layers)
    ceiling = "not known" if found.peak is None else f"{found.peak / 1e9:,.1f} GFLOP/s"
    console.print(f"matmul ceiling: {ceiling} ({found.peak_source})")
    console.print(
        f"memory ceiling: {found.bandwidth / 1e9:,.1f} GB/s (best of 5 large copies); bytes are those of inputs, outputs and "
        "weights, so above 100% they came from caches"
    )
    mfu = "not known" if found.mfu is None else f"{found.mfu:.1%}"
    console.print(f"MFU: {mfu} = {MFU}")


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="left" if title in {"phase", "part", "layer"} else "right", no_wrap=True)
    return table


def _achieved(found: Profile, seconds: float, step: float, flops: float, num_bytes: float) -> list[str]:
    rate, moved = flops / seconds, num_bytes / seconds
    return [
        f"{seconds / step:.1%}",
        f"{rate / 1e9:,.1f}" if flops else "-",
        f"{rate / found.peak:.0%}" if flops and found.peak else "-",
        f"{moved / 1e9:,.1f}" if num_bytes else "-",
        f"{moved / found.bandwidth:.0%}" if num_bytes else "-",
    ]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.2f}"
