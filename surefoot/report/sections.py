"""The parts of a report page below its header, each from records to HTML."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from surefoot.report.figures import Figure
from surefoot.report.markup import details, escape, leaf, nested, table
from surefoot.report.reading import RunRecord, flatten
from surefoot.report.style import NUM_RUN_COLOURS
from surefoot.report.summary import MISSING, Summary, duration, fixed, percent, power, short, size, whole

MAX_SAMPLE_STEPS = 40
MAX_SAMPLE_CHARACTERS = 20_000


def controls(runs: Sequence[RunRecord]) -> str:
    """What the charts are drawn against, and which runs they show."""
    names = {"steps": "Steps", "tokens": "Tokens", "flops": "FLOPs", "seconds": "Time"}
    choices = "".join(
        f'<label><input type="radio" name="x" value="{value}"{" checked" if value == "steps" else ""}>{name}</label>'
        for value, name in names.items()
    )
    boxes = "".join(
        f'<label><input type="checkbox" name="run" value="{index}" checked>{_swatch(index)}{escape(run.name)}</label>'
        for index, run in enumerate(runs)
    )
    return (
        '<nav class="controls" aria-label="Charts"><form autocomplete="off">'
        f'<fieldset class="choice"><legend>Against</legend>{choices}</fieldset>'
        '<label class="tick"><input type="checkbox" name="logx">log axis</label>'
        + (
            f'<fieldset class="runs"><legend class="unseen">Runs shown</legend>{boxes}</fieldset>'
            if len(runs) > 1
            else ""
        )
        + "</form></nav>"
    )


def _swatch(index: int) -> str:
    dashed = " dashed" if index >= NUM_RUN_COLOURS else ""
    return f'<span class="swatch{dashed}" style="color:var(--run-{index % NUM_RUN_COLOURS})" aria-hidden="true"></span>'


def charts(figures: Sequence[Figure], runs: Sequence[RunRecord]) -> str:
    """A place for every chart, filled by the page's script."""
    if not figures:
        return ""
    drawn = "".join(
        f'<figure class="chart{" wide" if figure.is_wide else ""}"><div class="title"><h3>{escape(figure.title)}</h3>'
        f'<span class="unit">{escape(figure.unit)}</span>'
        f'<label class="tick"><input type="checkbox" id="log-{figure.name}" autocomplete="off"'
        f'{" checked" if figure.is_log else ""}>log<span class="unseen"> axis for {escape(figure.title)}</span></label>'
        "</div>"
        f"{_key(figure, is_alone=len(runs) == 1)}"
        f'<div class="plot" id="plot-{figure.name}" role="img" aria-label="{escape(figure.description)}"></div>'
        "</figure>"
        for figure in figures
    )
    return f'<h2 class="unseen">Charts</h2><div class="charts">{drawn}</div>'


def _key(figure: Figure, *, is_alone: bool) -> str:
    """What the marks of a chart mean, where that is not plain."""
    kinds = dict.fromkeys(
        (trace["kind"], trace["part"], trace["label"]) for trace in figure.traces if trace["kind"] != "raw"
    )
    marks = {
        "heldout": '<line x1="0" y1="5" x2="26" y2="5" stroke-width="1" stroke-dasharray="2 2"/>'
        '<circle cx="13" cy="5" r="3.5" stroke-width="2" style="fill:var(--card)"/>',
        "clipped": '<circle cx="13" cy="5" r="2.5" fill="currentColor" stroke="none"/>'
        if is_alone
        else '<path d="M10 2l6 6M16 2l-6 6" stroke-width="1.2"/>',
    }
    items = []
    for kind, part, label in kinds if len(kinds) > 1 else ():
        colour = f"var(--run-{1 if kind in marks else part})" if is_alone else "var(--ink)"
        dash = "" if is_alone else f' stroke-dasharray="{("none", "6 3", "2 2", "9 3 2 3")[part % 4]}"'
        mark = marks.get(kind, f'<line x1="0" y1="5" x2="26" y2="5" stroke-width="2"{dash}/>')
        items.append(
            f'<li><svg aria-hidden="true" style="color:{colour}" stroke="currentColor" fill="none">{mark}</svg>'
            f"{escape(label)}</li>"
        )
    if figure.note:
        items.append(f'<li class="note">{escape(figure.note)}</li>')
    if figure.top is not None:
        items.append('<li class="note above" hidden>the first steps lie above this view; “log” shows them</li>')
    return f'<ul class="key">{"".join(items)}</ul>' if items else ""


def comparison(runs: Sequence[RunRecord], summaries: Sequence[Summary]) -> str:
    """Where each run stands, side by side."""
    head = ["Run", "Held out,<br>bits / byte", "Training,<br>bits / byte", "Steps", "Tokens", "Parameters", "FLOPs"]
    head += ["Time", "Tokens / s", "MFU", "Waiting<br>on data", "Peak<br>memory"]
    lowest = min(
        (s.heldout_bits_per_byte for s in summaries if not math.isnan(s.heldout_bits_per_byte)), default=math.nan
    )
    rows = []
    for index, (run, s) in enumerate(zip(runs, summaries, strict=True)):
        heldout = fixed(s.heldout_bits_per_byte) + ("" if s.heldout_is_whole else " (part)")
        steps = f"{s.step:,}" if s.is_finished or s.num_steps is None else f"{s.step:,} of {s.num_steps:,}"
        rows.append(
            [
                f"{_swatch(index)} {escape(run.name)}",
                f'<span class="best">{heldout}</span>' if s.heldout_bits_per_byte == lowest else heldout,
                fixed(s.train_bits_per_byte),
                steps,
                short(s.tokens),
                short(s.parameters),
                power(s.flops),
                duration(s.seconds),
                whole(s.tokens_per_second),
                percent(s.mfu),
                percent(s.waiting_share),
                size(s.memory_bytes),
            ]
        )
    devices = list(dict.fromkeys(s.device for s in summaries if s.device != MISSING))
    if len(devices) > 1:
        head.append("Device")
        rows = [[*row, escape(s.device)] for row, s in zip(rows, summaries, strict=True)]
    note = f'<p class="hint">All on {escape(devices[0])}.</p>' if len(devices) == 1 else ""
    return f"<h2>Final numbers</h2>{note}{table('Final numbers of each run', head, rows, is_numeric=True)}"


def differences(runs: Sequence[RunRecord]) -> str:
    """Every setting that is not equal in all runs."""
    leaves = [flatten(run.config) if run.config else {} for run in runs]
    paths = dict.fromkeys(path for flat in leaves for path in flat)
    absent = object()
    rows = []
    for path in paths:
        values = [flat.get(path, absent) for flat in leaves]
        # Compared as JSON: 1, 1.0 and true are three values there, and equal in Python.
        if len({json.dumps(value) if value is not absent else "" for value in values}) > 1:
            rows.append([escape(path), *(MISSING if value is absent else leaf(value) for value in values)])
    head = ["Setting", *(f"{_swatch(index)} {escape(run.name)}" for index, run in enumerate(runs))]
    shown = (
        table("Settings that differ between the runs", head, rows)
        if rows
        else '<p class="hint">None: all settings are equal.</p>'
    )
    return f"<h2>Settings that differ</h2>{shown}"


def evaluations(runs: Sequence[RunRecord]) -> str:
    """The numbers behind the held-out marks."""
    parts = []
    for run in runs:
        rows = [
            [
                f"{step:,.0f}",
                fixed(run.evaluations["bits_per_byte"][index], 4),
                fixed(run.evaluations["loss"][index], 4),
                whole(run.evaluations["tokens"][index]),
                "whole" if run.whole_evaluations[index] else "a part",
            ]
            for index, step in reversed(list(enumerate(run.evaluation_steps)))
        ]
        if rows:
            name = escape(run.name) if len(runs) > 1 else "All evaluations"
            shown = table(
                f"Evaluations of {escape(run.name)}",
                ["Step", "Bits / byte", "Nats / token", "Tokens", "Split"],
                rows,
                is_numeric=True,
            )
            parts.append(details(f"{name} <small>{len(rows):,}, newest first</small>", shown))
    return "<h2>Held-out evaluations</h2>" + "".join(parts) if parts else ""


def samples(runs: Sequence[RunRecord]) -> str:
    """What the models wrote, newest first."""
    parts = []
    for run in runs:
        samples = [sample for sample in reversed(run.samples) if sample[1]]
        if not samples:
            continue
        # The newest and evenly spaced older ones down to the first.
        stride = max(1.0, (len(samples) - 1) / (MAX_SAMPLE_STEPS - 1))
        shown = [samples[round(index * stride)] for index in range(min(len(samples), MAX_SAMPLE_STEPS))]
        if len(runs) > 1:
            parts.append(f"<h3>{escape(run.name)}</h3>")
        if len(shown) < len(samples):
            parts.append(
                f'<p class="hint">{len(shown)} of {len(samples):,} steps; the others are in samples/ of the run.</p>'
            )
        for index, (step, completions) in enumerate(shown):
            body = "".join(
                f"<pre><mark>{_cut(item['prompt'])}</mark>{_cut(item['text'])}</pre>" for item in completions
            )
            parts.append(details(f"Step {step:,}", f'<div class="inside">{body}</div>', is_open=index == 0))
    return (
        "<h2>Samples</h2><p class='hint'>What the model wrote after the marked prompt, newest first.</p>"
        + "".join(parts)
        if parts
        else ""
    )


def _cut(text: str) -> str:
    rest = len(text) - MAX_SAMPLE_CHARACTERS
    return (
        escape(text)
        if rest <= 0
        else f'{escape(text[:MAX_SAMPLE_CHARACTERS])} <span class="none">… {rest:,} more characters</span>'
    )


def facts(runs: Sequence[RunRecord]) -> str:
    """The facts of each run."""
    parts = []
    for run in runs:
        if run.facts:
            body = f'<div class="inside facts">{nested(run.facts)}</div>'
            parts.append(details(escape(run.name) if len(runs) > 1 else "About this run", body, is_open=len(runs) == 1))
    return "<h2>Facts</h2>" + "".join(parts) if parts else ""


def configuration(runs: Sequence[RunRecord]) -> str:
    """The configuration of each run."""
    parts = []
    for run in runs:
        if run.config:
            body = (
                f'<div class="inside"><pre>{escape(json.dumps(run.config, indent=2, ensure_ascii=False))}</pre></div>'
            )
            parts.append(
                details(
                    f"{escape(run.name) if len(runs) > 1 else 'run.json'} <small>can be run again as it is</small>",
                    body,
                )
            )
    return "<h2>Configuration</h2>" + "".join(parts) if parts else ""
