"""A run in a few numbers, and numbers as people write them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from surefoot.report.reading import Column, RunRecord, number
from surefoot.report.series import smoothing_width

MISSING = "–"


@dataclass(frozen=True)
class Summary:
    """Where a run stands: last values of what accumulates, medians of rates, NaN where nothing was recorded.

    `heldout_bits_per_byte` is the last evaluation's and `heldout_is_whole` whether that read the whole split;
    `train_bits_per_byte` and `train_loss` are means over the last recorded steps.
    """

    heldout_bits_per_byte: float
    heldout_loss: float
    heldout_is_whole: bool
    train_bits_per_byte: float
    train_loss: float
    step: int
    num_steps: int | None
    is_finished: bool
    tokens: float
    parameters: float
    flops: float
    seconds: float
    tokens_per_second: float
    mfu: float
    waiting_share: float
    memory_bytes: float
    device: str


def summarise(run: RunRecord) -> Summary:
    """The summary of a run."""
    metrics = run.metrics
    step = int(run.steps[-1]) if len(run.steps) else 0
    heldout = _last(run.evaluations["bits_per_byte"])
    if math.isnan(heldout):
        heldout = number(run.fact("result", "heldout_bits_per_byte"))
    device = run.fact("device", "name") or run.fact("device", "kind") or run.fact("device")
    result = run.fact("result")
    return Summary(
        heldout_bits_per_byte=heldout,
        heldout_loss=_last(run.evaluations["loss"]),
        heldout_is_whole=bool(run.whole_evaluations[-1]) if len(run.whole_evaluations) else True,
        train_bits_per_byte=_last_mean(metrics["bits_per_byte"]),
        train_loss=_last_mean(metrics["loss"]),
        step=step,
        num_steps=run.num_steps,
        is_finished=bool(result) or (run.num_steps is not None and step >= run.num_steps),
        tokens=_last(metrics["tokens"]),
        parameters=_parameters(run),
        flops=_last(metrics["flops"]),
        seconds=_last(metrics["seconds"]),
        tokens_per_second=_median(metrics["tokens_per_second"]),
        mfu=_median(metrics["mfu"]),
        waiting_share=waiting_share(run),
        memory_bytes=float(np.nanmax(metrics["memory_bytes"]))
        if np.isfinite(metrics["memory_bytes"]).any()
        else math.nan,
        device=device if isinstance(device, str) else MISSING,
    )


def waiting_share(run: RunRecord) -> float:
    """Share of the time of all steps that went into waiting for data."""
    both = np.isfinite(run.metrics["data_seconds"]) & np.isfinite(run.metrics["step_seconds"])
    total = float(run.metrics["step_seconds"][both].sum())
    return float(run.metrics["data_seconds"][both].sum()) / total if total > 0 else math.nan


def fixed(value: float, digits: int = 3) -> str:
    """A number with a fixed number of decimals."""
    return MISSING if math.isnan(value) else f"{value:,.{digits}f}"


def whole(value: float) -> str:
    """A whole number with thousands apart."""
    return MISSING if math.isnan(value) else f"{value:,.0f}"


def short(value: float) -> str:
    """A count in three digits: 12.3 M."""
    if math.isnan(value):
        return MISSING
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g}"


def power(value: float) -> str:
    """A large number as a power of ten: 1.23 × 10¹⁵."""
    if math.isnan(value):
        return MISSING
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa} × 10{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def percent(value: float) -> str:
    """A share of one."""
    return MISSING if math.isnan(value) else f"{100 * value:.1f}%" if value >= 0.1 else f"{100 * value:.2f}%"


def size(value: float) -> str:
    """Bytes in binary units."""
    if math.isnan(value):
        return MISSING
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """A time in its two largest units."""
    if math.isnan(seconds):
        return MISSING
    if seconds < 10:
        return f"{seconds:.1f} s"
    rest = round(seconds)
    parts = []
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, length)
        parts.append((count, unit))
    first = next(index for index, (count, _) in enumerate(parts) if count)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count)


def _last(values: Column) -> float:
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else math.nan


def _last_mean(values: Column) -> float:
    finite = values[np.isfinite(values)]
    count = 1 + max(smoothing_width(len(values)), min(10, len(values) // 4))
    return float(finite[-count:].mean()) if len(finite) else math.nan


def _median(values: Column) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


def _parameters(run: RunRecord) -> float:
    counts = run.fact("parameters")
    if not isinstance(counts, dict):
        return number(counts)
    return next(
        (value for value in map(number, [counts.get("total"), *counts.values()]) if math.isfinite(value)), math.nan
    )
