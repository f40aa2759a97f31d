"""The report: one HTML page that holds everything it shows and asks the network for nothing."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import surefoot
from surefoot.config import RunError
from surefoot.observe.folder import write_text
from surefoot.report import sections
from surefoot.report.figures import draw
from surefoot.report.markup import embed, escape
from surefoot.report.reading import RunRecord, read_runs
from surefoot.report.script import SCRIPT
from surefoot.report.style import NUM_RUN_COLOURS, STYLE
from surefoot.report.summary import MISSING, Summary, duration, fixed, percent, power, short, size, summarise, whole


def write_report(runs: Sequence[Path], destination: Path) -> Path:
    """Write the page about `runs` to the file `destination` and return it.

    `RunError` where a folder is no run or the page cannot be written; a page already there then stays as it was.
    """
    page = render(read_runs(runs))
    try:
        # A lone surrogate from a JSON escape has no UTF-8.
        write_text(destination, page.encode("utf-8", errors="replace").decode("utf-8"))
    except OSError as error:
        raise RunError(
            f"{destination}: cannot be written ({error.strerror}); give --out a file in a folder that you can write to"
        ) from None
    return destination


def render(runs: Sequence[RunRecord]) -> str:
    """The page about `runs` as HTML."""
    from plotly.offline import get_plotlyjs  # noqa: PLC0415  # 5 MB of text, for whoever writes a page

    summaries = [summarise(run) for run in runs]
    drawn = draw(runs)
    data = {
        "runs": [run.name for run in runs],
        "figures": [
            {
                key: value
                for key, value in dataclasses.asdict(figure).items()
                if key in ("name", "format", "is_log", "is_wide", "top", "traces")
            }
            for figure in drawn.figures
        ],
        "positions": drawn.positions,
        "numColours": NUM_RUN_COLOURS,
    }
    library = get_plotlyjs()
    title = escape(_title(runs))
    body = [
        _header(runs, summaries),
        sections.controls(runs) if drawn.figures else "",
        "<main>",
        sections.charts(drawn.figures, runs),
        sections.comparison(runs, summaries) if len(runs) > 1 else "",
        sections.differences(runs) if len(runs) > 1 else "",
        sections.evaluations(runs),
        sections.samples(runs),
        sections.facts(runs),
        sections.configuration(runs),
        "</main>",
        f"<footer>Written by surefoot {escape(surefoot.__version__)}. Charts by plotly.js, MIT licence.</footer>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(library, SCRIPT)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{title} · surefoot</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + (
            f'\n<script type="application/json" id="data">{embed(data)}</script>'
            f"\n<script>{library}</script>\n<script>{SCRIPT}</script>"
            if drawn.figures
            else ""
        )
        + "\n</body></html>\n"
    )


def _policy(*scripts: str) -> str:
    """Only our own scripts run, by their hash, and nothing is fetched: text that slipped through could do nothing."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _title(runs: Sequence[RunRecord]) -> str:
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs"


def _header(runs: Sequence[RunRecord], summaries: Sequence[Summary]) -> str:
    notes = [(run.name if len(runs) > 1 else "", note) for run in runs for note in run.notes]
    listed = "".join(f"<li>{escape(f'{name}: ' if name else '')}{escape(note)}</li>" for name, note in notes)
    return (
        f'<header class="top"><p class="over">surefoot training report</p><h1>{escape(_title(runs))}</h1>'
        f'<p class="verdict">{_verdict(summaries[0]) if len(runs) == 1 else _verdict_of_many(runs, summaries)}</p>'
        + (f'<ul class="notes" aria-label="What could not be read">{listed}</ul>' if notes else "")
        + (_tiles(summaries[0]) if len(runs) == 1 else "")
        + '<p id="failure" class="failure" role="alert" hidden></p>'
        "<noscript><p class='failure'>The charts need JavaScript; the rest of the page does not.</p></noscript>"
        "</header>"
    )


def _verdict(summary: Summary) -> str:
    if not summary.step and math.isnan(summary.heldout_bits_per_byte):
        return "No step has been recorded yet."
    if not math.isnan(summary.heldout_bits_per_byte):
        result = f"<b>{fixed(summary.heldout_bits_per_byte)} bits per byte</b> on held-out text"
        result += "" if summary.heldout_is_whole else " (a part of the split)"
    elif not math.isnan(summary.train_bits_per_byte):
        result = f"<b>{fixed(summary.train_bits_per_byte)} bits per byte</b> in training, not evaluated yet"
    else:
        result = f"<b>{fixed(summary.train_loss)} nats per token</b> in training"
    told = [
        f"after <b>{short(summary.tokens)}</b> tokens" if not math.isnan(summary.tokens) else "",
        f"with <b>{short(summary.parameters)}</b> parameters" if not math.isnan(summary.parameters) else "",
        f"in <b>{duration(summary.seconds)}</b>" if not math.isnan(summary.seconds) else "",
        f"on {escape(summary.device)}" if summary.device != MISSING else "",
    ]
    unfinished = "" if summary.is_finished else f" The run is at {_progress(summary)}: still going, or stopped."
    return f"{' '.join([result, *filter(None, told)])}.{unfinished}"


def _verdict_of_many(runs: Sequence[RunRecord], summaries: Sequence[Summary]) -> str:
    known = [index for index, summary in enumerate(summaries) if not math.isnan(summary.heldout_bits_per_byte)]
    if not known:
        return "None of these runs has been evaluated on held-out text yet."
    best = min(known, key=lambda index: summaries[index].heldout_bits_per_byte)
    return (
        f"<b>{escape(runs[best].name)}</b> is lowest on held-out text: "
        f"<b>{fixed(summaries[best].heldout_bits_per_byte)} bits per byte</b>."
    )


def _progress(summary: Summary) -> str:
    step = f"step {summary.step:,}"
    return step if summary.num_steps is None else f"{step} of {summary.num_steps:,}"


def _tiles(summary: Summary) -> str:
    part = "" if summary.heldout_is_whole else " <small>of a part</small>"
    unit = " <small>bits / byte</small>"
    tiles = [
        ("Held out", summary.heldout_bits_per_byte, fixed(summary.heldout_bits_per_byte) + (part or unit)),
        ("Training", summary.train_bits_per_byte, fixed(summary.train_bits_per_byte) + unit),
        ("Steps", float(summary.step), f"{summary.step:,}"),
        ("Tokens", summary.tokens, short(summary.tokens)),
        ("Parameters", summary.parameters, short(summary.parameters)),
        ("Training FLOPs", summary.flops, power(summary.flops)),
        ("Training time", summary.seconds, duration(summary.seconds)),
        ("Throughput", summary.tokens_per_second, f"{whole(summary.tokens_per_second)} <small>tokens / s</small>"),
        ("FLOPs utilisation", summary.mfu, percent(summary.mfu)),
        ("Peak memory", summary.memory_bytes, size(summary.memory_bytes)),
    ]
    cells = "".join(
        f"<div><dt>{name}</dt><dd>{text}</dd></div>" for name, value, text in tiles if not math.isnan(value)
    )
    return f'<dl class="tiles">{cells}</dl>'
