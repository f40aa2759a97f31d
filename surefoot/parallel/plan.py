"""`Plan`: how many ranks along each axis, and what is kept where. Legality is checked before any process group exists."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from surefoot.config import Config, FieldError
from surefoot.dist.mesh import AXES, Grid
from surefoot.parallel.context import Kind
from surefoot.parallel.recompute import RecomputeConfig
from surefoot.parallel.schedules import SINGLE, SPLIT_BACKWARD, V_SHAPED, Schedule, takes


class Plan(Config):
    """A layout over `pipeline` x `replicate` x `shard` x `expert` x `context` x `tensor` ranks. Any legal plan trains the same
    model as one process.

    `replicate`, `shard` and `expert` cut the batch; `expert` also shares out experts; `context` cuts each sequence; `tensor` cuts
    each layer's heads, feed-forward width and vocabulary, and the sequence between them; `pipeline` shares out the layers.
    """

    replicate: int = Field(
        default=1, ge=1, description="copies of everything that `shard` cuts: DDP, or HSDP with shard"
    )
    shard: int = Field(default=1, ge=1, description="ranks that share the copy of what `zero` names")
    zero: Literal[1, 2, 3] = Field(
        default=3,
        description="what is cut over `shard` x `expert` ranks (ZeRO, Rajbhandari et al., 2020): 1 optimizer state, 2 also "
        "gradients, 3 also weights",
    )
    reshard: int | None = Field(
        default=None, ge=2, description="ranks over which weights stay cut between forward and backward; null: all"
    )
    expert: int = Field(
        default=1,
        ge=1,
        description="data ranks that share out the experts of routed networks; other weights are kept as over `shard`",
    )
    context: int = Field(
        default=1,
        ge=1,
        description="context-parallel ranks: each holds two chunks of every sequence, an early and a late one",
    )
    context_kind: Kind = Field(
        default="gather",
        description="how attention finds the keys of other context ranks: gather all of them (Dubey et al., 2024); ulysses "
        "exchanges sequence for heads (Jacobs et al., 2023); ring sends them round, one rank's at a time (Liu et al., 2023)",
    )
    tensor: int = Field(default=1, ge=1, description="tensor and sequence parallel ranks (Korthikanti et al., 2022)")
    pipeline: int = Field(default=1, ge=1, description="ranks that each hold some of the layers")
    schedule: Schedule = Field(
        default="1f1b",
        description="order of a pipeline's passes: gpipe (Huang et al., 2019); 1f1b, interleaved (Narayanan et al., 2021); "
        "zero-bubble, zbv (Qi et al., 2024); dualpipev (DeepSeek-AI, 2025)",
    )
    stages_per_rank: int | None = Field(
        default=None, ge=1, description="runs of layers a pipeline rank holds; 1 in gpipe and 1f1b, 2 in the others"
    )
    recompute: RecomputeConfig = Field(
        default=RecomputeConfig(), description="which activations are made again in backward instead of being kept"
    )
    compile: Literal["none", "layers"] = Field(
        default="none",
        description="layers: each through torch.compile; what has a gradient written by hand stays as it is",
    )

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        if self.reshard is not None and (self.zero != 3 or self.shard == 1):
            raise FieldError("reshard", self.reshard, "has an effect only with zero = 3 and shard above 1; drop it")
        if self.reshard is not None and self.shard % self.reshard:
            raise FieldError("reshard", self.reshard, f"must divide shard {self.shard}")
        if self.reshard is not None and self.num_ranks != self.shard:
            # FSDP2 makes the groups for it itself, and gives those of different shard groups the same name.
            raise FieldError(
                "reshard", self.reshard, "works only where `shard` is all there is; drop it or the other axes"
            )
        if self.stages_per_rank is not None:
            self._refuse_stages(self.stages_per_rank)
        if self.recompute.mode == "budget" and self.pipeline > 1:
            raise FieldError(
                "recompute.mode",
                "budget",
                "is not possible with pipeline above 1, whose micro-batches in flight differ by stage; use selective",
            )
        return self

    def _refuse_stages(self, count: int) -> None:
        if self.pipeline == 1:
            raise FieldError("stages_per_rank", count, "has an effect only with pipeline above 1; drop it")
        fixed = 1 if self.schedule in SINGLE else 2 if self.schedule in V_SHAPED else None
        if fixed is not None and count != fixed:
            raise FieldError("stages_per_rank", count, f"is always {fixed} in schedule {self.schedule}; drop it")
        if count == 1 and fixed is None:
            raise FieldError(
                "stages_per_rank", count, f"must be 2 or more in schedule {self.schedule}; use schedule=1f1b"
            )

    @property
    def num_stages(self) -> int:
        """Runs of layers into which a pipeline cuts the model; 1 without one."""
        if self.pipeline == 1:
            return 1
        return self.pipeline * (self.stages_per_rank or (1 if self.schedule in SINGLE else 2))

    def takes(self, num_micro_batches: int) -> bool:
        """Whether the schedule works with so many micro-batches a step."""
        return self.pipeline == 1 or takes(self.schedule, self.pipeline, self.num_stages, num_micro_batches)

    def num_micro_batches(self, batch: int) -> int | None:
        """Into how many micro-batches a rank's `batch` samples are best cut for the pipeline: enough to keep its bubble
        small, no more than that; None where no number will do."""
        if self.pipeline == 1:
            return 1
        legal = [number for number in range(1, batch + 1) if batch % number == 0 and self.takes(number)]
        if not legal:
            return None
        return next((number for number in legal if number >= 2 * self.num_stages), legal[-1])

    @property
    def grid(self) -> Grid:
        """The grid of ranks."""
        return Grid({axis: getattr(self, axis) for axis in AXES})

    @property
    def num_ranks(self) -> int:
        """Number of ranks in all."""
        return self.grid.num_ranks

    @property
    def num_data_ranks(self) -> int:
        """Parts into which a batch is cut."""
        return self.replicate * self.shard * self.expert

    @property
    def is_sharded(self) -> bool:
        """Whether ranks share the keeping of what `zero` names: `expert` ranks do, of all weights but the experts."""
        return self.shard * self.expert > 1

    @property
    def is_fully_sharded(self) -> bool:
        """Whether FSDP2 holds the weights."""
        return self.is_sharded and self.zero > 1

    @property
    def keeps_weights_cut(self) -> bool:
        """Whether weights are cut again after each layer's forward pass (ZeRO-3 proper).

        A schedule that computes gradients of weights later needs them whole until then.
        """
        return self.is_fully_sharded and self.zero == 3 and (self.pipeline == 1 or self.schedule not in SPLIT_BACKWARD)

    def build(self) -> Self:
        """The plan itself: `parallel.apply` carries it out."""
        return self

    def describe(self) -> str:
        """The plan in a few words."""
        parts = [f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        if self.pipeline > 1:
            parts.append(
                f"{self.schedule} schedule"
                + (f" of {self.num_stages} stages" if self.num_stages > self.pipeline else "")
            )
        if self.context > 1:
            parts.append(f"{self.context_kind} attention")
        if self.is_sharded:
            parts.append(f"ZeRO-{self.zero}" + (f" (reshard {self.reshard})" if self.reshard else ""))
            if self.zero == 3 and not self.keeps_weights_cut:
                parts[-1] += f" with weights whole during a step, as {self.schedule} needs"
        if self.recompute.mode != "none":
            parts.append(self.recompute.describe())
        if self.compile != "none":
            parts.append(f"compiled {self.compile}")
        said = ", ".join(parts) or "one process"
        if self.context == 1 and self.context_kind != "gather":
            said += f" (context_kind {self.context_kind} has no effect with context 1)"
        if self.pipeline == 1 and self.schedule != "1f1b":
            said += f" (schedule {self.schedule} has no effect with pipeline 1)"
        return said
