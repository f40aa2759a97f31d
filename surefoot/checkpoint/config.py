"""When a run saves and what it keeps."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from surefoot.config import Config, FieldError


class CheckpointConfig(Config):
    """How often a checkpoint is written, and which ones stay; the last step is always saved, the newest never deleted."""

    every: int | None = Field(default=500, ge=1, description="steps between checkpoints; null saves only at the end")
    keep_last: int = Field(default=2, ge=1, description="number of newest checkpoints kept")
    keep_every: int | None = Field(default=None, ge=1, description="keep those whose step is a multiple of this")

    mode: Literal["asynchronous", "blocking"] = Field(
        default="asynchronous",
        description="asynchronous: parts are copied to host memory and written while training goes on",
    )

    @model_validator(mode="after")
    def _keeps_what_is_saved(self) -> Self:
        if self.keep_every is not None:
            if self.every is None:
                raise FieldError(
                    "keep_every", self.keep_every, "needs `every`: with it null only the last step is saved"
                )
            if self.keep_every % self.every:
                raise FieldError("keep_every", self.keep_every, f"must be a multiple of every = {self.every}")
        return self
