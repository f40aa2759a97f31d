"""What a person sees while a run trains: a live panel on a terminal, plain lines where output is piped."""

from __future__ import annotations

import math
import time
from collections import deque

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from surefoot.observe.schema import EvaluationReport, Hook, RunStart, SampleReport, StepReport

_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_SECONDS = 5.0


class ConsoleHook(Hook):
    """Progress of a run; on a terminal it draws in place, otherwise it prints a line every few seconds."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._losses: deque[float] = deque(maxlen=4096)
        self._num_steps = self._first_step = 0
        self._started = self._last_line = 0.0

    def on_start(self, start: RunStart) -> None:
        """Begin drawing."""
        self._num_steps, self._first_step = start.num_steps, start.first_step
        self._started = time.monotonic()
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=False)
            self._live.start()

    def on_step(self, report: StepReport) -> None:
        """Draw the newest step."""
        self._losses.append(report.loss)
        now = time.monotonic()
        done = report.step - self._first_step
        left = (now - self._started) / done * (self._num_steps - report.step)
        if self._live is not None:
            self._live.update(self._panel(report, left))
        elif done == 1 or report.step == self._num_steps or now - self._last_line > _PLAIN_SECONDS:
            self._last_line = now
            self._console.print(
                f"step {report.step}/{self._num_steps}  loss {report.loss:.4f}{_bits(report.bits_per_byte)}"
                f"  lr {report.learning_rate:.2e}  grad {report.gradient_norm:.2f}"
                f"  {report.tokens_per_second:,.0f} tokens/s{_mfu(report)}  {_clock(left)} left"
            )

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Print the held-out result."""
        part = "" if report.is_whole else f" (first {report.tokens:,} tokens)"
        self._console.print(f"step {report.step}: held-out loss {report.loss:.4f}{_bits(report.bits_per_byte)}{part}")

    def on_samples(self, report: SampleReport) -> None:
        """Print the completions."""
        for completion in report.completions:
            self._console.print(Text("─── sample " + "─" * 40, style="dim"))
            self._console.print(Text(completion["prompt"], style="bold") + Text(completion["text"]))

    def on_message(self, text: str) -> None:
        """Print one line."""
        self._console.print(Text(text))

    def close(self) -> None:
        """Stop drawing."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _panel(self, report: StepReport, left: float) -> Table:
        table = Table.grid(padding=(0, 2))
        share = report.step / self._num_steps
        width = 30
        bar = "━" * round(share * width)
        table.add_row(
            Text(bar, style="green") + Text("━" * (width - len(bar)), style="dim"),
            f"{report.step}/{self._num_steps}",
            f"{_clock(left)} left",
            f"{report.tokens_per_second:,.0f} tokens/s{_mfu(report)}",
        )
        table.add_row(
            Text(sparkline(list(self._losses), width), style="cyan"),
            f"loss {report.loss:.4f}",
            _bits(report.bits_per_byte).strip(),
            f"lr {report.learning_rate:.2e}  grad {report.gradient_norm:.2f}",
        )
        return table


def sparkline(values: list[float], width: int) -> str:
    """The values as `width` bars at most, each the mean of its share; values that are not finite are left out."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    columns = min(width, len(finite))
    means = []
    for column in range(columns):
        part = finite[column * len(finite) // columns : (column + 1) * len(finite) // columns]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    return "".join(_BARS[round((mean - low) / (high - low) * 7) if high > low else 0] for mean in means)


def _bits(bits_per_byte: float | None) -> str:
    return "" if bits_per_byte is None else f"  {bits_per_byte:.3f} bits/byte"


def _mfu(report: StepReport) -> str:
    return "" if report.mfu is None else f"  {report.mfu:.0%} MFU"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
