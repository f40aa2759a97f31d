"""Learning-rate schedules: pure functions from progress in [0, 1] to a factor in [0, 1].

Step k of n (k from 0) uses the progress at its middle, (k + 1/2) / n. So the first step of a warm-up is not at zero,
nor is the last step of a decay to zero, and the mean factor of a run hardly depends on how many steps cut it up.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Literal, Self

from pydantic import Field, model_validator

from surefoot.config import Config, FieldError


class Schedule(Config):
    """A linear warm-up over the first `warmup` of the run, then a class's own shape."""

    warmup: float = Field(default=0.02, ge=0, lt=1, description="fraction of the run")

    def __call__(self, progress: float) -> float:
        """The factor at `progress`; `ValueError` outside [0, 1]."""
        if not 0 <= progress <= 1:
            raise ValueError(f"progress {progress} is outside [0, 1]")
        return progress / self.warmup if progress < self.warmup else self.after_warmup(progress)

    @abstractmethod
    def after_warmup(self, progress: float) -> float:
        """The factor at a progress of at least `warmup`; 1 at the start."""

    def _share(self, progress: float) -> float:
        """How far between the end of the warm-up and the end of the run."""
        return (progress - self.warmup) / (1 - self.warmup)


class Constant(Schedule):
    """1 after the warm-up."""

    def after_warmup(self, progress: float) -> float:  # noqa: ARG002
        """See `Schedule.after_warmup`."""
        return 1.0


class LinearToZero(Schedule):
    """A straight line to 0 at the end of the run (Bergsma et al., 2025)."""

    def after_warmup(self, progress: float) -> float:
        """See `Schedule.after_warmup`."""
        return 1 - self._share(progress)


class Cosine(Schedule):
    """Half a cosine down to `final` (Loshchilov and Hutter, 2017)."""

    final: float = Field(default=0.1, ge=0, le=1, description="factor at the end of the run")

    def after_warmup(self, progress: float) -> float:
        """See `Schedule.after_warmup`."""
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * self._share(progress))) / 2


class WSD(Schedule):
    """Warm-up, stable, decay (Hu et al., 2024): 1 until the last `decay` of the run, then down to `final`."""

    decay: float = Field(default=0.2, gt=0, le=1, description="fraction of the run")
    shape: Literal["linear", "one_minus_sqrt"] = Field(
        default="one_minus_sqrt", description="of the decay; 1 - sqrt is better by Hägele et al. (2024)"
    )
    final: float = Field(default=0.0, ge=0, le=1, description="factor at the end of the run")

    @model_validator(mode="after")
    def _phases_fit(self) -> Self:
        if self.warmup + self.decay > 1:
            raise FieldError("decay", self.decay, f"must be at most 1 - warmup = {1 - self.warmup:g}")
        return self

    def after_warmup(self, progress: float) -> float:
        """See `Schedule.after_warmup`."""
        share = max(0.0, 1 - (1 - progress) / self.decay)
        left = 1 - share if self.shape == "linear" else 1 - math.sqrt(share)
        return self.final + (1 - self.final) * left


def progress_of(step: int, num_steps: int) -> float:
    """The progress at which step `step` (from 0) of `num_steps` reads its schedule: its middle."""
    if not 0 <= step < num_steps:
        raise ValueError(f"step {step} is not one of the {num_steps} steps counted from 0")
    return (step + 0.5) / num_steps


def learning_rates(schedule: Schedule, num_steps: int, lr: float = 1.0) -> list[float]:
    """The learning rate of every step of a run."""
    return [lr * schedule(progress_of(step, num_steps)) for step in range(num_steps)]
