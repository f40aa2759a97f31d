"""`Run`: everything that decides what a training run computes, as one frozen object."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from surefoot.checkpoint.config import CheckpointConfig
from surefoot.config import Config, FieldError
from surefoot.data.dataset import DataConfig
from surefoot.models.decoder import DecoderConfig
from surefoot.optim.base import OptimizerConfig
from surefoot.optim.schedule import Schedule
from surefoot.parallel.plan import Plan
from surefoot.precision.policy import PrecisionConfig


class TrainConfig(Config):
    """How long and in what portions."""

    num_steps: int = Field(gt=0, description="optimizer steps; also the horizon of the schedule")
    batch: int = Field(gt=0, description="samples (sequences) an optimizer step, whatever the accumulation")
    micro_batch: int | None = Field(
        default=None, gt=0, description="samples a forward pass; the whole batch by default"
    )
    max_gradient_norm: float | None = Field(default=1.0, gt=0, description="clip above this; null never clips")
    seed: int = Field(default=0, ge=0, description="of the initial weights; the data has a seed of its own")
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    threads: int | None = Field(default=None, gt=0, description="CPU threads; all cores by default")

    @model_validator(mode="after")
    def _micro_batch_divides(self) -> Self:
        if self.micro_batch is not None and self.batch % self.micro_batch:
            raise FieldError("micro_batch", self.micro_batch, f"must divide train.batch {self.batch}")
        return self


class ObserveConfig(Config):
    """What the run records besides the line a step it always writes."""

    evaluate_every: int | None = Field(
        default=None, gt=0, description="steps; the end always evaluates the whole split"
    )
    evaluate_batches: int = Field(default=8, gt=0, description="held-out batches of an evaluation before the end")
    evaluate_whole: bool = Field(default=True, description="whether the last evaluation reads the whole held-out split")
    prompts: tuple[str, ...] = Field(default=(), description="completed at the end and every sample_every steps")
    sample_every: int | None = Field(default=None, gt=0, description="steps")
    sample_tokens: int = Field(default=64, gt=0, description="new tokens a completion")


class Run(Config):
    """One training run. A recipe is a function that returns one."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    model: DecoderConfig
    data: DataConfig
    optim: OptimizerConfig
    schedule: Schedule
    train: TrainConfig
    plan: Plan = Plan()
    precision: PrecisionConfig = PrecisionConfig()
    observe: ObserveConfig = ObserveConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _ranks_share_the_batch(self) -> Self:
        ranks, batch, micro = self.plan.num_data_ranks, self.train.batch, self.train.micro_batch
        if batch % ranks:
            nearest = max(ranks, round(batch / ranks) * ranks)
            raise FieldError(
                "train.batch", batch, f"must divide over plan.replicate x plan.shard = {ranks}; try {nearest}"
            )
        if micro is not None and (batch // ranks) % micro:
            raise FieldError("train.micro_batch", micro, f"must divide a rank's share of the batch, {batch // ranks}")
        return self

    @model_validator(mode="after")
    def _losses_see_whole_sequences(self) -> Self:
        model, context = self.model, self.plan.context
        if context > 1 and any(model.ffn_of(layer).needs_whole_sequences for layer in range(model.depth)):
            remedy = "cuts the sequences that the routers balance over; use plan.context=1 or a router's balance_loss=0"
            raise FieldError("plan.context", context, remedy)
        return self

    @property
    def rank_batch(self) -> int:
        """Samples a rank sees in a step."""
        return self.train.batch // self.plan.num_data_ranks

    @property
    def micro_batch(self) -> int:
        """Samples of a forward pass on one rank."""
        return self.train.micro_batch or self.rank_batch

    @property
    def tokens(self) -> int:
        """Input tokens of the whole run."""
        return self.train.num_steps * self.train.batch * self.data.sequence_length

    def build(self) -> Self:
        """The run itself: `Trainer` gives it a process."""
        return self


Effect = Literal["none", "rounding", "run"]

_NO_EFFECT = ("observe.", "checkpoint.", "name")
_ROUNDING = ("train.micro_batch", "train.threads", "train.device")


def effect_of_change(path: str) -> Effect:
    """What changing the leaf at `path` does to a resumed run: nothing, other rounding, or another run."""
    if path.startswith(_NO_EFFECT):
        return "none"
    return "rounding" if path in _ROUNDING or path.startswith("plan.") else "run"
