"""Which number formats a run computes in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self, get_args

import torch
from pydantic import Field, model_validator
from torch import nn

from surefoot.blocks.base import Block
from surefoot.config import Config, FieldError
from surefoot.precision.kinds import Kind, Name, kind_of

WeightRole = Literal["matrix", "vocabulary", "router", "state", "vector"]
Rounding = Literal["nearest", "stochastic", "kahan"]

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


@dataclass(frozen=True)
class Types:
    """Of the weights of one role: the numbers they are held in, those their gradients are added up in (over micro-batches and
    over data ranks) and those of the optimizer's state. Arithmetic of the optimizer is in at least fp32."""

    parameters: torch.dtype
    accumulate: torch.dtype
    reduce: torch.dtype
    optimizer_state: torch.dtype
    rounding: Rounding = "nearest"

    def __str__(self) -> str:
        rounding = f" (rounded {self.rounding})" if self.parameters is torch.bfloat16 else ""
        return (
            f"weights {_name(self.parameters)}{rounding}, gradients added up in {_name(self.accumulate)} and over ranks in "
            f"{_name(self.reduce)}, optimizer state {_name(self.optimizer_state)}"
        )


class PrecisionConfig(Config):
    """Activations and matrix products in `compute`, or products in narrower numbers; weights, gradients, optimizer state and
    sums in at least fp32 unless asked for, and then of the `narrow_roles` alone.

    Products of embedding, head, routers and the state of recurrent mixers are never narrowed.
    """

    compute: Literal["bf16", "fp32", "fp64"] = Field(
        default="bf16", description="bf16 keeps fp32 master weights; fp64 keeps everything in fp64, for parity tests"
    )
    parameters: Literal["bf16"] | None = Field(
        default=None,
        description="bf16: weights of narrow_roles have no fp32 masters; null: fp32, or fp64 with compute=fp64",
    )
    rounding: Rounding | None = Field(
        default=None,
        description="how bf16 weights take updates: nearest loses those below 2^-9 of a weight; stochastic keeps their mean; "
        "kahan keeps what rounding took away beside the weight, in bf16 too; null: stochastic",
    )
    accumulate: Literal["bf16"] | None = Field(
        default=None, description="bf16: gradients of narrow_roles are added up over micro-batches in it; null: fp32"
    )
    reduce: Literal["bf16"] | None = Field(
        default=None, description="bf16: gradients of narrow_roles are summed over data ranks in it; null: fp32"
    )
    optimizer_state: Literal["bf16"] | None = Field(
        default=None, description="bf16, rounded stochastically: moments of narrow_roles; null: fp32"
    )
    narrow_roles: tuple[WeightRole, ...] | None = Field(
        default=None,
        description="which weights parameters, accumulate, reduce and optimizer_state are about: matrix, vocabulary "
        "(embedding, head), router, state (of recurrent mixers), vector (norms, biases); null: matrix",
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
        self._refuse_storage()
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

    def _refuse_storage(self) -> None:
        if self.rounding is not None and self.parameters is None:
            raise FieldError("rounding", self.rounding, "has an effect only with parameters=bf16; set that or drop it")
        if self.accumulate is not None and self.reduce is None:
            raise FieldError("accumulate", self.accumulate, "would be widened for nothing; add reduce=bf16 or drop it")
        if self.narrow_roles is None:
            return
        if not self.is_narrow:
            raise FieldError(
                "narrow_roles",
                self.narrow_roles,
                "has an effect only with parameters, reduce or optimizer_state=bf16; drop it",
            )
        if not self.narrow_roles or len(set(self.narrow_roles)) < len(self.narrow_roles):
            raise FieldError("narrow_roles", self.narrow_roles, "must name at least one role, and each once")

    @property
    def is_narrow(self) -> bool:
        """Whether any weight, gradient or moment is held in less than fp32."""
        return bool(self.parameters or self.accumulate or self.reduce or self.optimizer_state)

    def types(self, role: WeightRole) -> Types:
        """What weights of a role are held and summed in."""
        wide = self.weight_dtype
        if role not in (self.narrow_roles or ("matrix",)):
            return Types(wide, wide, wide, wide)
        parameters, accumulate, reduce, state = (
            torch.bfloat16 if asked else wide
            for asked in (self.parameters, self.accumulate, self.reduce, self.optimizer_state)
        )
        return Types(
            parameters, accumulate, reduce, state, (self.rounding or "stochastic") if self.parameters else "nearest"
        )

    def types_of(self, axes: tuple[str, ...]) -> Types:
        """Of a weight with these axes."""
        return self.types(weight_role(axes))

    def describe(self) -> dict[str, str]:
        """What is in effect, in words, by the roles that it is in effect for."""
        found: dict[str, list[str]] = {}
        for role in get_args(WeightRole):
            found.setdefault(str(self.types(role)), []).append(role)
        return {", ".join(roles): words for words, roles in found.items()}

    def retype(self, model: nn.Module) -> None:
        """Give each weight of a model in `weight_dtype` the numbers that it is held in; it may be on meta."""
        for block in model.modules():
            if isinstance(block, Block):
                for name, axes in block.axes.items():
                    weight = getattr(block, name)
                    weight.data = weight.data.to(self.types_of(axes).parameters)

    def in_wide(self, compute: Literal["bf16", "fp32", "fp64"]) -> Self:
        """The same with everything but activations and products in at least fp32."""
        fields = ("parameters", "rounding", "accumulate", "reduce", "optimizer_state", "narrow_roles")
        return self.model_copy(update={"compute": compute} | dict.fromkeys(fields))

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of activations."""
        return _DTYPES[self.compute]

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype of weights, gradients and optimizer state that are not asked to be narrow."""
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


def _name(dtype: torch.dtype) -> str:
    return next(name for name, known in _DTYPES.items() if known is dtype)


DEFAULT = PrecisionConfig()
