"""Which number formats a run computes in."""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field, model_validator

from surefoot.config import Config, FieldError
from surefoot.precision.kinds import Kind, Name, kind_of

WeightRole = Literal["matrix", "vocabulary", "router", "state", "vector"]

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_BLOCK, _HISTORY = 128, 16


def weight_role(axes: tuple[str, ...]) -> WeightRole:
    """What a weight's axes say about the numbers it needs. Only a matrix may go below fp32 unless asked for.

    The vocabulary's are embedding and head; a router's decide discretely; a state's set steps, decays (RWKV-7's and KDA's
    through a low rank, as their gates) and short convolutions, which act over a whole sequence, or mix residual streams;
    vectors are norm scales and biases.
    """
    if {"vocab", "words"} & set(axes):
        return "vocabulary"
    if "routes" in axes:
        return "router"
    if len(axes) < 2:
        return "vector"
    return "state" if {"taps", "per_head", "streams", "rank"} & set(axes) else "matrix"


class PrecisionConfig(Config):
    """Activations and matrix products in `compute`, or products in narrower numbers; weights, gradients, optimizer state and
    sums in at least fp32.

    Products of embedding, head, routers and the state of recurrent mixers are never narrowed.
    """

    compute: Literal["bf16", "fp32", "fp64"] = Field(
        default="bf16", description="bf16 keeps fp32 master weights; fp64 keeps everything in fp64, for parity tests"
    )
    products: Literal["compute", Name] = Field(
        default="compute",
        description="what layers' matrices are multiplied in: the compute dtype, or operands quantised to 8 or 4 bits "
        "(emulated) with scales of a whole operand (tensorwise; delayed by a step), of a row (rowwise), of 1x128 and 128x128 "
        "(blockwise), 1x32 (mxfp8, mxfp4) or 1x16 (nvfp4)",
    )
    keep_first: int | None = Field(
        default=None, ge=0, description="first layers whose products are not narrowed; null: 1"
    )
    keep_last: int | None = Field(
        default=None, ge=0, description="last layers whose products are not narrowed; null: 1"
    )
    keep_layers: tuple[int, ...] | None = Field(default=None, description="further such layers, counted from 0")
    gradients: Literal["e4m3", "e5m2"] | None = Field(
        default=None, description="format of gradients in 8 bits; null: e5m2, whose range is wider"
    )
    weight_gradients: Literal["products", "compute"] | None = Field(
        default=None,
        description="what the products that give weights' gradients are multiplied in; null: as the others",
    )
    tile: int | None = Field(
        default=None, ge=16, multiple_of=16, description=f"length of blockwise tiles; null: {_BLOCK}"
    )
    history: int | None = Field(
        default=None,
        gt=0,
        description=f"steps whose largest magnitude sets delayed scales; null: {_HISTORY}; the first step is not narrowed",
    )

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        narrow = self.products != "compute"
        for field in ("keep_first", "keep_last", "keep_layers", "gradients", "weight_gradients"):
            if not narrow and getattr(self, field) is not None:
                raise FieldError(field, getattr(self, field), "has an effect only where products are narrowed; drop it")
        if self.products in {"mxfp4", "nvfp4"} and self.gradients is not None:
            raise FieldError("gradients", self.gradients, f"are e2m1 like all operands of {self.products}; drop it")
        for field, kind in (("tile", "blockwise"), ("history", "delayed")):
            if self.products != kind and getattr(self, field) is not None:
                raise FieldError(field, getattr(self, field), f"has an effect only with products={kind}; drop it")
        for number in self.keep_layers or ():
            if number < 0:
                raise FieldError("keep_layers", number, "layers are counted from 0")
        return self

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of activations."""
        return _DTYPES[self.compute]

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype of weights, gradients and optimizer state."""
        return torch.promote_types(self.compute_dtype, torch.float32)

    @property
    def kind(self) -> Kind | None:
        """How operands are quantised; None where they are not."""
        if self.products == "compute":
            return None
        return kind_of(self.products, gradient=self.gradients or "e5m2", tile=self.tile or _BLOCK)

    @property
    def history_steps(self) -> int | None:
        """Steps that delayed scales look back; None where they are not delayed."""
        return (self.history or _HISTORY) if self.products == "delayed" else None

    def keeps(self, layer: int, num_layers: int) -> bool:
        """Whether products of a layer, counted from 0, are not narrowed."""
        first, last = self._ends
        return layer < first or layer >= num_layers - last or layer in (self.keep_layers or ())

    @property
    def num_kept(self) -> int:
        """First and last layers whose products are not narrowed."""
        return sum(self._ends)

    @property
    def _ends(self) -> tuple[int, int]:
        first, last = (1 if count is None else count for count in (self.keep_first, self.keep_last))
        return first, last

    def build(self) -> torch.dtype:
        """The compute dtype."""
        return self.compute_dtype


DEFAULT = PrecisionConfig()
