"""Which number formats a run computes in."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from surefoot.config import Config

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


class PrecisionConfig(Config):
    """Activations and matrix products in `compute`; weights, gradients, optimizer state and sums in at least fp32."""

    compute: Literal["bf16", "fp32", "fp64"] = Field(
        default="bf16", description="bf16 keeps fp32 master weights; fp64 keeps everything in fp64, for parity tests"
    )

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of activations."""
        return _DTYPES[self.compute]

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype of weights, gradients and optimizer state."""
        return torch.promote_types(self.compute_dtype, torch.float32)

    def build(self) -> torch.dtype:
        """The compute dtype."""
        return self.compute_dtype
