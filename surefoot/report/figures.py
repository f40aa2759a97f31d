"""The charts of a report as plain data; the page's script gives them axes, colours and marks.

A trace's `x` is an index into `Charts.positions`, where each entry holds the same points on all four axes: that is how
the page switches between them without another copy of the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypedDict

import numpy as np

from surefoot.report.reading import Column, RunRecord
from surefoot.report.series import smooth, smoothing_width, thin
from surefoot.report.summary import fixed, percent, size, whole

AXES = ("steps", "tokens", "flops", "seconds")
Kind = Literal["raw", "mean", "line", "heldout", "clipped"]
_Tell: TypeAlias = Callable[[float], str]


class Trace(TypedDict):
    """One line or one set of marks of `run` (an index); `part` counts the lines that one run has in a chart."""

    run: int
    kind: Kind
    part: int
    label: str
    x: int
    y: list[float | None]


@dataclass
class Figure:
    """One chart: its texts, how its numbers are written (d3 format), and whether it opens on a log axis.

    `top` is where a linear axis ends that does not show the whole range.
    """

    name: str
    title: str
    unit: str
    format: str
    is_log: bool = False
    is_wide: bool = False
    top: float | None = None
    note: str = ""
    description: str = ""
    traces: list[Trace] = field(default_factory=list)


@dataclass
class Charts:
    """All charts of a page and the positions their points share."""

    figures: list[Figure]
    positions: list[dict[str, list[float | None]]]


def draw(runs: Sequence[RunRecord]) -> Charts:
    """The charts of `runs`, without those that no run has a finite value for."""
    return _Drawing(runs).charts()


def rounded(values: Iterable[float], digits: int = 6) -> list[float | None]:
    """Values as JSON holds them: so many significant digits, `None` for a gap."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]


class _Drawing:
    def __init__(self, runs: Sequence[RunRecord]) -> None:
        self.runs = runs
        self.positions: list[dict[str, list[float | None]]] = []
        self._known: dict[tuple[int, bytes], int] = {}

    def charts(self) -> Charts:
        figures: list[Figure] = [
            self._loss("bits_per_byte", "Bits per byte", "bits / byte", is_wide=True),
            self._loss("loss", "Loss", "nats / token"),
            self._gradient_norm(),
            self._single("learning_rate", "Learning rate", "", "~g"),
            self._update_ratio(),
            self._rate("tokens_per_second", "Throughput", "tokens / s", ",.0f", whole),
            self._rate("mfu", "Model FLOPs utilisation", "share of peak", ".1%", percent),
            self._waiting(),
            self._single("memory_bytes", "Peak memory", "GiB", ".3~f", scale=2**-30),
        ]
        for figure in figures:
            figure.description = figure.description or f"{figure.title}: nothing was recorded."
        return Charts([figure for figure in figures if figure.traces], self.positions)

    def _loss(self, column: str, title: str, unit: str, *, is_wide: bool = False) -> Figure:
        figure = Figure(column, title, unit, ".4~f", is_wide=is_wide)
        told = []
        for index, run in enumerate(self.runs):
            told.append(self._noisy(figure, index, "training", run.metrics[column], fixed))
            heldout = run.evaluations[column]
            self._add(figure, index, "heldout", "held out", steps=run.evaluation_steps, values=heldout)
            told.append(self._told(run, "held out", run.evaluation_steps, heldout, fixed))
        spans = sorted({2 * width + 1 for width in (smoothing_width(len(run.steps)) for run in self.runs) if width})
        figure.top = self._top(figure)
        figure.note = f"mean of {' or '.join(map(str, spans))} steps" if spans else ""
        figure.description = _join(title, told)
        return figure

    def _top(self, figure: Figure) -> float | None:
        """Where a linear axis should end so that the first drop does not flatten what follows; `None`: at the top."""
        highest, after = -math.inf, -math.inf
        for trace in figure.traces:
            values = np.array([math.nan if value is None else value for value in trace["y"]])
            steps = np.array(self.positions[trace["x"]]["steps"], dtype=np.float64)
            late = np.isfinite(values) & (steps > 0.04 * self.runs[trace["run"]].steps.max(initial=0.0))
            if trace["kind"] != "raw":
                highest = max(highest, float(np.nanmax(values)))
                after = max(after, float(values[late].max(initial=-math.inf)))
        return after if math.isfinite(after) and highest > 1.4 * after > 0 else None

    def _gradient_norm(self) -> Figure:
        figure = Figure("gradient_norm", "Gradient norm", "before clipping", ".3~g", is_log=True)
        told, shares = [], []
        for index, run in enumerate(self.runs):
            norms = run.metrics["gradient_norm"]
            told.append(self._noisy(figure, index, "norm", norms, fixed))
            # NaN compares false: a step without a coefficient does not count as clipped.
            clipped = (run.metrics["clip_coefficient"] < 1) & np.isfinite(norms)
            self._add(figure, index, "clipped", "clipped step", steps=run.steps[clipped], values=norms[clipped])
            if np.isfinite(run.metrics["clip_coefficient"]).any():
                named = f"{run.name} " if len(self.runs) > 1 else ""
                shares.append(f"{named}{percent(float(clipped.sum()) / len(norms))}")
        if shares:
            figure.note = f"clipped: {', '.join(shares)} of steps"
        figure.description = _join("Gradient norm before clipping", [*told, figure.note])
        return figure

    def _update_ratio(self) -> Figure:
        figure = Figure("update_ratio", "Update to weight ratio", "rms(update) / rms(weight)", ".2~g", is_log=True)
        roles = sorted({role for run in self.runs for role in run.update_ratio})
        told = [
            self._noisy(figure, index, role, run.update_ratio[role], lambda value: f"{value:.2g}", part=part)
            for index, run in enumerate(self.runs)
            for part, role in enumerate(roles)
            if role in run.update_ratio
        ]
        figure.description = _join(figure.title, told)
        return figure

    def _rate(self, column: str, title: str, unit: str, number_format: str, tell: _Tell) -> Figure:
        figure = Figure(column, title, unit, number_format)
        told = [
            self._noisy(figure, index, title.lower(), run.metrics[column], tell) for index, run in enumerate(self.runs)
        ]
        figure.description = _join(title, told)
        return figure

    def _waiting(self) -> Figure:
        figure = Figure("waiting", "Waiting on data", "share of the step", ".2~%")
        told = []
        for index, run in enumerate(self.runs):
            seconds = run.metrics["step_seconds"]
            share = np.full(len(seconds), math.nan)
            np.divide(run.metrics["data_seconds"], seconds, out=share, where=seconds > 0)
            told.append(self._noisy(figure, index, "share", share, percent))
        figure.description = _join("Share of each step spent waiting on data", told)
        return figure

    def _single(self, column: str, title: str, unit: str, number_format: str, *, scale: float = 1.0) -> Figure:
        figure = Figure(column, title, unit, number_format)
        told = []
        for index, run in enumerate(self.runs):
            values = run.metrics[column]
            self._add(figure, index, "line", title.lower(), steps=run.steps, values=values * scale)
            told += [
                self._told(
                    run, "", run.steps, values, size if column == "memory_bytes" else lambda value: f"{value:.3g}"
                )
            ]
        figure.description = _join(title, told)
        return figure

    def _noisy(self, figure: Figure, index: int, label: str, values: Column, tell: _Tell, *, part: int = 0) -> str:
        """Add the smoothed line with each step faint behind it, and tell it in words.

        What is shown on a log axis is smoothed there: one spike then does not lift all means around it.
        """
        run, width = self.runs[index], smoothing_width(len(values))
        if figure.is_log:
            logs = np.full(len(values), math.nan)
            np.log(values, out=logs, where=values > 0)
            means = np.exp(smooth(logs, width))
        else:
            means = smooth(values, width)
        if width:
            self._add(figure, index, "raw", "each step", steps=run.steps, values=values, part=part)
        self._add(figure, index, "mean", label, steps=run.steps, values=means, part=part)
        return self._told(run, label, run.steps, means, tell)

    def _add(
        self, figure: Figure, index: int, kind: Kind, label: str, *, steps: Column, values: Column, part: int = 0
    ) -> None:
        """Add a trace, thinned; one without a finite value is left out."""
        if not np.isfinite(values).any():
            return
        kept = thin(values)
        x = self._position(index, steps[kept])
        figure.traces.append(Trace(run=index, kind=kind, part=part, label=label, x=x, y=rounded(values[kept])))

    def _position(self, index: int, steps: Column) -> int:
        key = (index, steps.tobytes())
        if key not in self._known:
            run = self.runs[index]
            axes = {"steps": rounded(steps, 12)} | {axis: rounded(run.at_steps(axis, steps)) for axis in AXES[1:]}
            self._known[key] = len(self.positions)
            self.positions.append(axes)
        return self._known[key]

    def _told(self, run: RunRecord, label: str, steps: Column, values: Column, tell: _Tell) -> str:
        """A line in words, for those who do not see it."""
        finite = np.isfinite(values)
        if not finite.any():
            return ""
        steps, values = steps[finite], values[finite]
        who = " ".join(part for part in (run.name if len(self.runs) > 1 else "", label) if part)
        return (
            f"{who + ' ' if who else ''}from {tell(float(values[0]))} at step {steps[0]:.0f} "
            f"to {tell(float(values[-1]))} at step {steps[-1]:.0f}, "
            f"lowest {tell(float(values.min()))}, highest {tell(float(values.max()))}"
        )


def _join(title: str, told: Sequence[str]) -> str:
    said = [text for text in told if text]
    return f"{title}: {'; '.join(said)}." if said else ""
