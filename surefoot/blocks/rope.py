"""Rotary positions of a mixer's heads: which components turn, how they are paired, how frequencies are stretched.

Legend: B batch, L length, H heads, K head size, F frequencies.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from surefoot.config import Config
from surefoot.ops import rope
from surefoot.ops.documents import Documents


class RopeScaling(Config):
    """How frequencies change for contexts longer than `original_length`."""

    @abstractmethod
    def stretch(self, plain_F: Tensor, theta: float) -> Tensor:
        """The frequencies in use, in fp64."""

    @property
    def tables_amplitude(self) -> float:
        """What cosines and sines are multiplied by."""
        return 1.0


class LinearScaling(RopeScaling):
    """All frequencies divided by `factor` (Chen et al., 2023)."""

    factor: float = Field(ge=1)

    def stretch(self, plain_F: Tensor, theta: float) -> Tensor:  # noqa: ARG002
        """One factor for all."""
        return plain_F / self.factor


class Llama3Scaling(RopeScaling):
    """Long wavelengths stretched, short ones kept (Llama 3.1; Dubey et al., 2024)."""

    factor: float = Field(ge=1)
    original_length: int = Field(gt=0)
    low_factor: float = Field(default=1.0, gt=0, description="wavelengths over original_length / this are stretched")
    high_factor: float = Field(default=4.0, gt=0, description="wavelengths under original_length / this are kept")

    def stretch(self, plain_F: Tensor, theta: float) -> Tensor:  # noqa: ARG002
        """By wavelength."""
        return rope.llama3_frequencies(
            plain_F,
            factor=self.factor,
            original_length=self.original_length,
            low_factor=self.low_factor,
            high_factor=self.high_factor,
        )


class YarnScaling(RopeScaling):
    """A ramp over the pairs, and larger scores (YaRN; Peng et al., 2023)."""

    factor: float = Field(ge=1)
    original_length: int = Field(gt=0)
    fast_turns: float = Field(default=32.0, gt=0, description="pairs that turn more often in original_length are kept")
    slow_turns: float = Field(
        default=1.0, gt=0, description="pairs that turn less often in original_length are stretched"
    )
    bounds: Literal["whole", "exact"] = Field(
        default="whole", description="whether the ramp begins and ends at whole pairs (gpt-oss: exact)"
    )
    amplitude: float | None = Field(
        default=None, gt=0, description="of cosines and sines; 0.1 ln(factor) + 1 where not given"
    )

    def stretch(self, plain_F: Tensor, theta: float) -> Tensor:
        """By the number of the pair."""
        return rope.yarn_frequencies(
            plain_F,
            theta=theta,
            factor=self.factor,
            original_length=self.original_length,
            fast_turns=self.fast_turns,
            slow_turns=self.slow_turns,
            bounds=self.bounds,
        )

    @property
    def tables_amplitude(self) -> float:
        """Peng et al., 2023, equation 22: a temperature, put on queries and keys alike."""
        return 0.1 * math.log(self.factor) + 1 if self.amplitude is None else self.amplitude


@dataclass(frozen=True)
class Rope:
    """Rotary positions (Su et al., 2021) of the first `size` components of each head."""

    size: int
    theta: float
    layout: rope.Layout = "half"
    scaling: RopeScaling | None = None

    def tables(self, docs: Documents, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions in `docs`, in at least fp32, made once for all layers that turn alike."""
        wide = torch.promote_types(dtype, torch.float32)
        key = ("rope", self.size, self.theta, self.scaling, wide)
        return docs.derive(key, lambda: self.tables_at(docs.positions, dtype))

    def tables_at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Those of any positions, (L) or (B, L)."""
        frequencies_F, amplitude = rope.frequencies(self.size, self.theta), 1.0
        if self.scaling is not None:
            frequencies_F = self.scaling.stretch(frequencies_F, self.theta)
            amplitude = self.scaling.tables_amplitude
        return rope.rope_tables(positions, frequencies_F, torch.promote_types(dtype, torch.float32), amplitude)

    def turn(self, x_BLHK: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Each head turned by its position."""
        return rope.rotate(x_BLHK, tables, self.layout)
