"""Whether a run's numbers may be trusted with it: how far its loss ends from fp32's, and what one wild weight does.

A run that `verify.shrunk` made takes `STEPS` steps on one batch, once in its own numbers around bf16 and once in fp32; its loss
afterwards must be within a budget. The steps are short (`RATE` of the learning rate): a batch known by heart has no loss to
compare. Then one weight is set far beyond all others. Products may lose what lies beside it, or saturate, but the loss must stay
a number and the counter that is for it must rise. One process suffices: `verify` shows that layouts find the same, largest
magnitudes and all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from surefoot.dist.mesh import Mesh
from surefoot.optim.base import gradients_of
from surefoot.optim.clip import clip_, global_norm
from surefoot.parallel.apply import Laid, lay_out
from surefoot.parallel.plan import Plan
from surefoot.precision.policy import DEFAULT, PrecisionConfig
from surefoot.study.trial import ragged_batch
from surefoot.train.agree import Ranks
from surefoot.train.run import Run
from surefoot.train.state import laid_params

STEPS, RATE = 4, 0.05
BUDGET, BUDGET_OF_4_BITS = 0.005, 0.02
"""How far, relative to fp32's, a loss may be after the steps."""
OUTLIER = 1e5


@dataclass(frozen=True)
class Outlier:
    """One entry of `weight` set to `OUTLIER`: shares of its product's weight that the `counter` had before and has after, loss
    and gradient norm after."""

    weight: str
    counter: Literal["saturated", "underflowed"]
    before: float
    after: float
    loss: float
    norm: float


@dataclass(frozen=True)
class Trust:
    """Losses after the steps, what they may differ by, and the outlier where products are narrow."""

    loss: float
    exact: float
    allowed: float
    outlier: Outlier | None

    @property
    def gap(self) -> float:
        """Relative to fp32."""
        return abs(self.loss / self.exact - 1)

    @property
    def failure(self) -> str | None:
        """What may not be trusted, if anything."""
        if not self.gap <= self.allowed:
            return (
                f"loss is {self.loss:.4f}, in fp32 {self.exact:.4f}: off by {self.gap:.2%}, allowed {self.allowed:.1%}"
            )
        if (outlier := self.outlier) is None:
            return None
        if not (math.isfinite(outlier.loss) and math.isfinite(outlier.norm)):
            return f"with an outlier in {outlier.weight} loss and gradient norm are {outlier.loss} and {outlier.norm}"
        if not outlier.after > outlier.before:
            return f"an outlier in {outlier.weight} leaves the {outlier.counter} share at {outlier.after:.3%}"
        return None

    def describe(self) -> list[str]:
        """What was found, a line each."""
        lines = [
            f"loss after {STEPS} steps {self.loss:.4f}, in fp32 {self.exact:.4f}: {self.gap:.3%} off, allowed {self.allowed:.1%}"
        ]
        if (outlier := self.outlier) is not None:
            lines.append(
                f"{OUTLIER:.0e} in {outlier.weight}: {outlier.counter} share {outlier.before:.3%} to {outlier.after:.3%}, loss "
                f"{outlier.loss:.4f}"
            )
        return lines if self.failure is None else [*lines, f"FAILED: {self.failure}"]


def trust(run: Run) -> Trust | None:
    """Of a shrunk run in bf16 or with narrow products; None where it has neither."""
    precision, kind = run.precision, run.precision.kind
    if kind is None and precision.compute != "bf16":
        return None
    own = _Training(run, precision.model_copy(update={"compute": "bf16"}))
    exact = _Training(run, DEFAULT.model_copy(update={"compute": "fp32"}))
    allowed = BUDGET_OF_4_BITS if precision.products in {"mxfp4", "nvfp4"} else BUDGET
    return Trust(own.loss_after(STEPS), exact.loss_after(STEPS), allowed, None if kind is None else own.outlier())


class _Training:
    """A run on one process and one batch."""

    def __init__(self, run: Run, precision: PrecisionConfig) -> None:
        cpu = torch.device("cpu")
        mesh = Mesh(Plan().grid)
        self.run, self.precision, self.ranks = run, precision, Ranks(mesh, cpu)
        self.laid: Laid = lay_out(
            Plan(),
            run.model,
            mesh,
            sequence_length=run.data.sequence_length,
            dtype=precision.weight_dtype,
            device=cpu,
            seed=run.train.seed,
            precision=precision,
        )
        self.params = laid_params(self.laid)
        self.optimizer = run.optim.build(self.params)
        self.batch = ragged_batch(run.model.vocab_size, run.data.sequence_length)
        self.num_tokens = int((self.batch[1] >= 0).sum())

    def passed(self) -> tuple[float, torch.Tensor, dict[str, dict[str, float]]]:
        """Loss, gradient norm and counters of one pass, whose gradients stay."""
        self.optimizer.zero_grad()
        nll, _ = self.laid.accumulate([self.batch], self.num_tokens, self.precision.compute_dtype)
        found = self.ranks.end_step(self.laid.meter) if self.laid.meter is not None else {}
        return nll / self.num_tokens, global_norm(self.params, self.ranks.group), found

    def loss_after(self, num_steps: int) -> float:
        """Steps at a fraction of the learning rate."""
        for _ in range(num_steps):
            _, norm, _ = self.passed()
            clip_(gradients_of(self.params), norm, self.run.train.max_gradient_norm or 1.0)
            self.optimizer.step(RATE)
            self.laid.after_step()
        return self.laid.evaluate([self.batch], self.precision.compute_dtype) / self.num_tokens

    def outlier(self) -> Outlier:
        """In the first weight that is narrow."""
        _, _, before = self.passed()
        row = next(name for name in before if name.endswith("/weight"))
        weight = row.removesuffix("/weight")
        (tensor,) = (param.tensor for param in self.params if param.name == weight)
        tensor.detach().view(-1)[0] = OUTLIER
        self.laid.after_step()
        loss, norm, after = self.passed()
        # Where scales look back the outlier saturates; where they follow it, what shares its scale vanishes beside it.
        counter: Literal["saturated", "underflowed"] = (
            "saturated" if self.precision.history_steps is not None else "underflowed"
        )
        return Outlier(weight, counter, before[row][counter], after[row][counter], loss, float(norm))
