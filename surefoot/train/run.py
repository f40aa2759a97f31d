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
        default=None,
        gt=0,
        description="samples a forward pass; the whole batch by default, or what keeps a pipeline busy",
    )
    max_gradient_norm: float | None = Field(default=1.0, gt=0, description="clip above this; null never clips")
    seed: int = Field(default=0, ge=0, description="of the initial weights; the data has a seed of its own")
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    threads: int | None = Field(default=None, gt=0, description="CPU threads; all cores by default")
    timeout: float = Field(
        default=600.0,
        ge=1,
        le=1e6,
        description="seconds, over several ranks: how long one may wait for another, or be in one phase of a step",
    )

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
    fingerprint_every: int | None = Field(
        default=100,
        gt=0,
        description="steps; whether ranks with copies of weights and moments hold the same bits, also before every save",
    )
    products_every: int | None = Field(
        default=50, gt=0, description="steps between records of each narrow product, besides the first step's"
    )
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
            what = f"must divide over plan.replicate x plan.shard x plan.expert = {ranks}"
            if ranks > batch:
                raise FieldError(
                    "train.batch",
                    batch,
                    f"{what}, which is more ranks than samples; use at most {batch} of them, other axes for the rest "
                    "(plan.tensor, context, pipeline), or a larger batch",
                )
            raise FieldError("train.batch", batch, f"{what}; try {round(batch / ranks) * ranks}")
        if micro is not None and (batch // ranks) % micro:
            raise FieldError("train.micro_batch", micro, f"must divide a rank's share of the batch, {batch // ranks}")
        self._refuse_micro_batches(batch // ranks)
        return self

    def _refuse_micro_batches(self, rank_batch: int) -> None:
        """A pipeline's schedule works with some numbers of micro-batches only."""
        plan, micro = self.plan, self.train.micro_batch
        best = plan.num_micro_batches(rank_batch)
        what = f"schedule {plan.schedule} of {plan.num_stages} stages"
        if best is None:
            raise FieldError(
                "train.batch",
                self.train.batch,
                f"gives each rank {rank_batch} samples, which {what} cannot take in any number of micro-batches; use "
                f"{plan.num_stages * plan.num_data_ranks}",
            )
        if micro is not None and not plan.takes(rank_batch // micro):
            raise FieldError(
                "train.micro_batch",
                micro,
                f"makes {rank_batch // micro} micro-batches on a rank, which {what} cannot take; use {rank_batch // best}",
            )

    @property
    def rank_batch(self) -> int:
        """Samples a rank sees in a step."""
        return self.train.batch // self.plan.num_data_ranks

    @property
    def micro_batch(self) -> int:
        """Samples of a forward pass on one rank."""
        return self.train.micro_batch or self.rank_batch // (self.plan.num_micro_batches(self.rank_batch) or 1)

    @property
    def tokens(self) -> int:
        """Input tokens of the whole run."""
        return self.train.num_steps * self.train.batch * self.data.sequence_length

    def build(self) -> Self:
        """The run itself: `Trainer` gives it a process."""
        return self


Effect = Literal["none", "rounding", "run"]

_NO_EFFECT = ("observe.", "checkpoint.", "name", "train.timeout")
_ROUNDING = ("train.micro_batch", "train.threads", "train.device")


def effect_of_change(path: str) -> Effect:
    """What changing the leaf at `path` does to a resumed run: nothing, other rounding, or another run."""
    if path.startswith(_NO_EFFECT):
        return "none"
    return "rounding" if path in _ROUNDING or path.startswith("plan.") else "run"
