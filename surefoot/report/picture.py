"""A static picture of a run: bits per byte against steps, as an SVG that follows the reader's light or dark theme."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from surefoot.config import RunError
from surefoot.observe.folder import write_text
from surefoot.report.markup import escape
from surefoot.report.reading import Column, RunRecord, read_run
from surefoot.report.series import smooth, smoothing_width, thin
from surefoot.report.summary import MISSING, fixed, short, summarise

WIDTH, HEIGHT = 880, 420
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 74, 48
MAX_POINTS = 600

_STYLE = """
text { font: 13px system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif; fill: #5f6670; }
.title { font-size: 17px; font-weight: 600; fill: #1c2024; }
.grid { stroke: #e4e4de; } .axis { stroke: #b9bcb8; }
.train { stroke: #2454c6; } .mark { stroke: #c9500a; fill: #ffffff; } .words { fill: #c9500a; font-weight: 600; }
@media (prefers-color-scheme: dark) {
  text { fill: #9aa2ad; } .title { fill: #e8e9ea; }
  .grid { stroke: #2b3036; } .axis { stroke: #4a5059; }
  .train { stroke: #85aaff; } .mark { stroke: #ff9d5c; fill: #0d1117; } .words { fill: #ff9d5c; }
}
"""


def write_picture(run: Path, destination: Path) -> Path:
    """Write the picture of the run in the folder `run` to the file `destination` and return it.

    `RunError` where the folder is no run, has no bits per byte yet, or the picture cannot be written.
    """
    record = read_run(run)
    if not np.isfinite(record.metrics["bits_per_byte"]).any():
        raise RunError(f"{run}: has no bits per byte to draw yet (metrics.jsonl); let the run take a step first")
    try:
        write_text(destination, draw_picture(record).encode("utf-8", errors="replace").decode("utf-8"))
    except OSError as error:
        raise RunError(
            f"{destination}: cannot be written ({error.strerror}); name a file in a folder that you can write to"
        ) from None
    return destination


def draw_picture(run: RunRecord) -> str:
    """The picture as SVG. `run` needs at least one finite value of bits per byte.

    The vertical axis ends where training stands after a twentieth of the steps: the drop before that would flatten the
    rest.
    """
    raw = run.metrics["bits_per_byte"]
    means = smooth(raw, smoothing_width(len(raw)))
    heldout = run.evaluations["bits_per_byte"]
    last = float(max(run.steps.max(), run.evaluation_steps.max(initial=1.0)))
    late = np.concatenate([means[run.steps >= 0.05 * last], heldout[run.evaluation_steps >= 0.05 * last]])
    shown = late[np.isfinite(late)] if np.isfinite(late).any() else means[np.isfinite(means)]
    noise = raw[np.isfinite(raw) & (run.steps >= 0.05 * last)]
    lowest = min(float(shown.min()), float(np.quantile(noise, 0.005)) if len(noise) else math.inf)
    low, high = _padded(lowest, float(shown.max()))

    def across(steps: Column) -> Column:
        return LEFT + steps / last * (WIDTH - LEFT - RIGHT)

    def down(values: Column) -> Column:
        return TOP + (high - values) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def line(values: Column) -> str:
        kept = thin(values, MAX_POINTS)
        return _path(across(run.steps[kept]), down(values[kept]))

    grid = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 10}" y="{y + 4.5:.1f}" text-anchor="end">{value:.{digits}f}</text>'
        for ticks, digits in [_ticks(low, high, 6)]
        for value, y in zip(ticks, down(ticks), strict=True)
    )
    steps = "".join(
        f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{value:,.0f}</text>'
        for value, x in zip(_ticks(0, last, 8)[0], across(_ticks(0, last, 8)[0]), strict=True)
    )
    known = np.isfinite(heldout)
    xs, ys = across(run.evaluation_steps[known]), down(heldout[known])
    marks = "".join(
        f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="4" stroke-width="2"/>'
        for x, y in zip(xs, ys, strict=True)
        if y >= TOP
    )
    end = ""
    if known.any():
        # Above the mark unless that would leave the plot.
        y = ys[-1] - 14 if ys[-1] > TOP + 24 else ys[-1] + 24
        value = fixed(_end(heldout))
        end = f'<text class="words" x="{xs[-1]:.1f}" y="{y:.1f}" text-anchor="end">{value}</text>'
    summary = summarise(run)
    facts = [
        "" if math.isnan(summary.parameters) else f"{short(summary.parameters)} parameters",
        "" if math.isnan(summary.tokens) else f"{short(summary.tokens)} tokens",
        "" if summary.device == MISSING else summary.device,
    ]
    told = " · ".join(filter(None, facts))
    description = f"Bits per byte of {run.name} over {last:,.0f} steps: training ends at {fixed(_end(means))}"
    description += f", held-out text at {fixed(_end(heldout))}." if known.any() else "."
    key = (
        f'<g transform="translate({WIDTH - RIGHT - 190} 34)">'
        '<line class="train" x1="0" x2="24" y1="-4" y2="-4" stroke-width="2"/><text x="32">training</text>'
        '<circle class="mark" cx="112" cy="-4" r="4" stroke-width="2"/><text x="124">held out</text></g>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" aria-labelledby="title description">'
        f'<title id="title">Bits per byte of {escape(run.name)}</title>'
        f'<desc id="description">{escape(description)}</desc>'
        f'<style>{_STYLE}</style><clipPath id="inside"><rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" '
        f'height="{HEIGHT - TOP - BOTTOM}"/></clipPath>'
        f'<text class="title" x="{LEFT}" y="34">Bits per byte, {escape(run.name)}</text>'
        f'<text x="{LEFT}" y="55">{escape(told)}</text>{key}{grid}{steps}'
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>'
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">step</text>'
        f'<g clip-path="url(#inside)" fill="none" stroke-linejoin="round">'
        f'<path class="train" opacity="0.3" stroke-width="1" d="{line(raw)}"/>'
        f'<path class="train" stroke-width="2.2" d="{line(means)}"/></g>{marks}{end}</svg>\n'
    )


def _end(values: Column) -> float:
    return float(values[np.isfinite(values)][-1])


def _padded(low: float, high: float) -> tuple[float, float]:
    pad = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    return low - pad, high + pad


def _path(xs: Column, ys: Column) -> str:
    """An SVG path that lifts the pen at gaps."""
    parts, is_down = [], False
    for x, y in zip(xs, ys, strict=True):
        if math.isfinite(y):
            parts.append(f"{'L' if is_down else 'M'}{x:.1f} {y:.1f}")
        is_down = math.isfinite(y)
    return "".join(parts)


def _ticks(low: float, high: float, count: int) -> tuple[Column, int]:
    """Round numbers within the ends, about so many, and the decimals they need."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, end = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks: Column = np.arange(first, end + 1, dtype=np.float64) * step
    return ticks, max(0, -math.floor(math.log10(step) + 1e-9))
