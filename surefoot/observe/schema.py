"""What a run says about itself, as plain records: this is all that reports, diagnosis and scaling studies read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepReport:
    """One optimizer step; a line of metrics.jsonl.

    `step` counts completed steps from 1. `loss` is nats a token over the valid tokens of the whole step, without
    auxiliary terms; `z_loss` is the weighted z term on the same scale. `bits_per_byte` divides the same sum by the
    bytes of text those tokens stand for. `learning_rate` is the schedule's factor times the base rate, `gradient_norm`
    is before clipping, `clip_coefficient` what the gradients were multiplied by, `clip_fraction` the share of steps so
    far that were clipped, `update_ratio` rms(update) / rms(weight) by role. `mfu` is causal training FLOPs achieved over
    the device's peak. `memory_bytes` is the process's peak. `tokens` (valid), `flops` (causal), `samples` (position in
    the data order) and `seconds` are totals since step 0. `data_seconds` of `step_seconds` were spent waiting on data.
    `token_hash` chains the hashes of all token ids seen. `time` is the Unix time at the end of the step. `slowest_rank`
    worked longest in the step before, without its waits for others, and `slowest_ratio` times the median of all ranks;
    null where that is not known (one rank, a GPU, the first step). `router` says how evenly experts were chosen in the step
    and what that cost: `load_entropy`, `max_load_share`, `dead_experts`, `dropped_share` of all choices, and
    `auxiliary_loss`, the weighted losses of all routers on the scale of `loss`; empty for a model without routers.
    `products` is the worst over all narrow products of the step: `saturated` and `underflowed` as shares of an operand,
    `scale_age` in steps; empty where products are in the compute dtype.
    """

    step: int
    loss: float
    bits_per_byte: float | None
    z_loss: float
    learning_rate: float
    gradient_norm: float
    clip_coefficient: float
    clip_fraction: float
    update_ratio: dict[str, float]
    tokens_per_second: float
    mfu: float | None
    memory_bytes: int
    tokens: int
    flops: float
    samples: int
    step_seconds: float
    data_seconds: float
    seconds: float
    token_hash: str
    time: float
    sources: dict[str, int] = field(default_factory=dict)
    slowest_rank: int | None = None
    slowest_ratio: float | None = None
    router: dict[str, float] = field(default_factory=dict)
    products: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ProductReport:
    """Each operand of each narrow product of one step, by `weight/role` (input, weight, gradient); a line of
    records/products.jsonl.

    `amax` is the largest magnitude; `narrowed` the share of entries that were quantised; of these `saturated` lay beyond the
    format and `underflowed` (of a sample) became 0; `scale_age` is in steps, 0 where the scale is the operand's own. Weights
    that multiply one input side by side count it as the first one's.
    """

    step: int
    products: dict[str, dict[str, float]]


@dataclass(frozen=True)
class EvaluationReport:
    """One evaluation; a line of evaluations.jsonl: the exact token-weighted mean over `tokens` held-out tokens.

    `is_whole` says whether that was the whole split.
    """

    step: int
    split: str
    loss: float
    bits_per_byte: float | None
    tokens: int
    bytes: float
    seconds: float
    is_whole: bool


@dataclass(frozen=True)
class SampleReport:
    """Completions drawn from the model after `step` steps: {"prompt", "text"} each."""

    step: int
    completions: list[dict[str, str]]


@dataclass(frozen=True)
class RunStart:
    """What is known when the first step is about to run."""

    name: str
    folder: str
    num_steps: int
    first_step: int
    facts: dict[str, Any]


class Hook:
    """Is told what happens. Reads, never writes: a run with and without it is bitwise the same."""

    def on_start(self, start: RunStart) -> None:
        """Before the first step."""

    def on_step(self, report: StepReport) -> None:
        """After every optimizer step."""

    def on_products(self, report: ProductReport) -> None:
        """Now and then, where products are narrow."""

    def on_evaluation(self, report: EvaluationReport) -> None:
        """After every evaluation."""

    def on_samples(self, report: SampleReport) -> None:
        """After completions were drawn."""

    def on_message(self, text: str) -> None:
        """Something the user should read: a wait, a choice made, a checkpoint written."""

    def close(self) -> None:
        """At the end, also after an error."""
