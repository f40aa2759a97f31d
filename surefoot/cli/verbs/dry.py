"""`surefoot train --dry-run`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from surefoot.cli.verbs.train import stretch
from surefoot.config import ConfigError, override
from surefoot.planner.devices import DEVICES, UNITS, parse_size
from surefoot.recipes.find import find_recipe
from surefoot.study.dry import UNKNOWN, DryRun, dry_run, num_micro_batches, remedies, telling_ranks
from surefoot.train.run import Run


def run(
    recipe: str | None,
    sets: list[str],
    allow: list[str],
    ranks: int | None,
    device_memory: str | None,
    other_options: Mapping[str, object],
) -> int:
    """Print what ranks hold and send; the exit code is 1 where that does not fit the device."""
    for option, value in other_options.items():
        if value:
            goes = (
                "goes with --dry-run only" if option == "--device-memory" else "has no effect with --dry-run; drop it"
            )
            raise ConfigError(option, str(value), goes)
    if recipe is None:
        raise ConfigError("RECIPE", None, "is missing; name a recipe (surefoot recipes lists them)")
    size = None if device_memory is None else parse_memory(device_memory)
    chosen = override(find_recipe(recipe, allow), sets)
    chosen = stretch(chosen, ranks or chosen.plan.num_ranks)
    found = [dry_run(chosen, rank, size) for rank in telling_ranks(chosen)]
    print("\n".join(described(chosen, found)))
    if size is None:
        return 0
    peak = max(each.peak_bytes for each in found)
    if peak <= size:
        print(f"fits in {shown(size)}: {shown(size - peak)} are left for what is not known")
        return 0
    print(f"does not fit in {shown(size)}: {shown(peak - size)} too much")
    print(remedy(chosen, size, lambda text: print(text, file=sys.stderr)))
    return 1


def described(chosen: Run, found: Sequence[DryRun]) -> list[str]:
    """The report as lines; ranks that are alike share a column."""
    columns: dict[str, list[DryRun]] = {}
    for each in found:
        columns.setdefault(repr(replace(each, rank=0)), []).append(each)
    alike = [[each.rank for each in column] for column in columns.values()]
    firsts = [column[0] for column in columns.values()]
    heads = [f"ranks {' and '.join(map(str, ranks))}" if len(ranks) > 1 else f"rank {ranks[0]}" for ranks in alike]
    lines = [
        f"{chosen.name}: {chosen.plan.describe()} ({chosen.plan.num_ranks} ranks); sequence {chosen.data.sequence_length}, "
        f"batch {chosen.train.batch}, {num_micro_batches(chosen)} x {chosen.micro_batch} samples a rank and step",
        row("", heads),
        *([row("stages", [", ".join(map(str, each.stages)) for each in firsts])] if chosen.plan.pipeline > 1 else []),
        row("parameters held", [f"{each.holdings.parameters:,}" for each in firsts]),
        row("bytes of parameters", [shown(each.holdings.parameter_bytes) for each in firsts]),
        row("bytes of gradients, at most", [shown(each.gradient_bytes) for each in firsts]),
        row("bytes of optimizer state", [shown(each.holdings.state_bytes) for each in firsts]),
        *(
            [row("budget of recomputation", [shown(each.budget_bytes or 0) for each in firsts])]
            if chosen.plan.recompute.mode == "budget"
            else []
        ),
        row("kept for backward, one micro-batch", [shown(each.activation_bytes) for each in firsts]),
        row("kept at once, at most", [shown(each.kept_bytes) for each in firsts]),
        row("  of so many passes through a stage", [str(each.in_flight) for each in firsts]),
        row("most alive at once", [shown(each.peak_bytes) for each in firsts]),
        row("sent in a step", ["calls    bytes" for _ in firsts]),
    ]
    for flow in dict.fromkeys(flow for each in firsts for flow in each.flows):
        amounts = [each.flows.get(flow) for each in firsts]
        lines.append(row(f"  {flow}", ["-" if a is None else f"{a.calls:,} {shown(a.sent):>12}" for a in amounts]))
    return [*lines, f"not known: {'; '.join(UNKNOWN)}"]


def row(name: str, cells: Sequence[str]) -> str:
    """One line of the table."""
    return " ".join([f"{name:44}", *(f"{cell:>24}" for cell in cells)]).rstrip()


def remedy(chosen: Run, size: int, announce: Callable[[str], None]) -> str:
    """The first change that makes it fit on as many ranks, found by dry runs of each; or what to do where none does."""
    best: tuple[int, list[str]] | None = None
    for assignments, changed in remedies(chosen):
        text = " ".join(f"--set {assignment}" for assignment in assignments)
        announce(f"trying {text}")
        try:
            peak = max(dry_run(changed, rank, size).peak_bytes for rank in telling_ranks(changed))
        except ConfigError:  # recomputation that fits the device has nothing left of it
            continue
        if peak <= size:
            return f"nearest remedy: {text} ({shown(peak)})"
        best = min(best or (peak, assignments), (peak, assignments))
    if best is None:
        return "no change of the plan saves memory here; use more ranks, a shorter sequence or a smaller model"
    text = " ".join(f"--set {assignment}" for assignment in best[1])
    return f"no change of the plan is enough on these ranks; the best is {text} ({shown(best[0])}): use more ranks"


def parse_memory(text: str) -> int:
    """`80GiB`, `80GB` or a device's name in bytes."""
    if (device := DEVICES.get(text.lower())) is not None:
        return device.memory
    try:
        return parse_size(text)
    except ValueError:
        raise ConfigError(
            "--device-memory", text, f"is not a size like 80GiB, nor one of {', '.join(DEVICES)}"
        ) from None


def shown(size: float) -> str:
    """Bytes with three digits and a unit."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= UNITS[unit]:
            return (
                f"{size / UNITS[unit]:.3g} {unit}" if size < 1000 * UNITS[unit] else f"{size / UNITS[unit]:,.0f} {unit}"
            )
    return f"{size:.3g} B"
