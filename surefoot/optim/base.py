"""What every optimizer is: parameters with axes go in, groups by role come out, state lives under logical names."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from surefoot.config import CheckpointError, Config
from surefoot.dist.layout import Box, Place

Role: TypeAlias = Literal["matrix", "vocabulary", "vector"]

COUNTING_AXES = frozenset({"streams", "taps"})
"""Axes that count alternatives and span no space: a weight along one of them and a space is a few vectors, not a map."""
State: TypeAlias = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Storage:
    """How a weight takes updates if it is narrower than fp32, and what its moments are held in (None: at least fp32). See
    `optim.narrow`."""

    rounding: Literal["nearest", "stochastic", "kahan"] = "nearest"
    moments: torch.dtype | None = None


@dataclass(frozen=True)
class Param:
    """One logical parameter: its full name, its tensor and the names of its axes, output axis first.

    With a `place`, `tensor` is this rank's part of it. Its gradient may be of another dtype.
    """

    name: str
    tensor: Tensor
    axes: tuple[str, ...]
    place: Place | None = None
    storage: Storage = Storage()

    def __post_init__(self) -> None:
        if self.tensor.dim() != len(self.axes):
            raise ValueError(f"{self.name} has {self.tensor.dim()} dimensions and axes {self.axes}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the logical parameter."""
        return tuple(self.tensor.shape) if self.place is None else self.place.shape

    @property
    def box(self) -> Box:
        """Where `tensor` lies in the logical parameter."""
        return Box.whole(tuple(self.tensor.shape)) if self.place is None else self.place.box

    @property
    def counts(self) -> bool:
        """Whether `tensor` is the copy that counts in a sum over all ranks."""
        return self.place is None or self.place.counts

    @property
    def num_elements(self) -> int:
        """Numbers in the logical parameter."""
        return math.prod(self.shape)

    @property
    def role(self) -> Role:
        """What the axes make of it: one row a token, a map between spaces, or a scale along one space."""
        if {"vocab", "words"} & set(self.axes):
            return "vocabulary"
        return "matrix" if len([axis for axis in self.axes if axis not in COUNTING_AXES]) >= 2 else "vector"


def gradients_of(params: Iterable[Param]) -> list[Tensor]:
    """The gradients there are, in order."""
    return [param.tensor.grad for param in params if param.tensor.grad is not None]


@dataclass(frozen=True)
class Group:
    """What is printed at start and kept in facts.json: which parameters are treated alike, and how.

    `lr` is the rate at schedule factor 1; `num_elements` counts the numbers in all of `names`.
    """

    role: Role
    method: str
    lr: float
    weight_decay: float
    names: tuple[str, ...]
    num_elements: int

    def __str__(self) -> str:
        return (
            f"{self.role}: {len(self.names)} weights, {self.num_elements:,} numbers, {self.method}, "
            f"lr {self.lr:g}, weight decay {self.weight_decay:g}"
        )


class Optimizer(ABC):
    """Moves parameters by their gradients; owns nothing but the state it names."""

    @abstractmethod
    def step(self, scale: float) -> None:
        """Update every parameter in place from its `.grad`, at `scale` times its group's rate.

        A parameter whose `.grad` is None keeps its value and its state.
        """

    @abstractmethod
    def zero_grad(self) -> None:
        """Drop every gradient."""

    @abstractmethod
    def groups(self) -> list[Group]:
        """The groups; each parameter is in exactly one."""

    @abstractmethod
    def state(self) -> dict[str, dict[str, Tensor]]:
        """The live state tensors by parameter name, complete from the start; not copies."""

    def restore(self, state: State) -> None:
        """Copy `state` into the live tensors; `CheckpointError`, with nothing changed, where it does not fit."""
        live = self.state()
        _refuse_other_keys("the optimizer state", live, state)
        for name, tensors in live.items():
            _refuse_other_keys(f"the optimizer state of {name}", tensors, state[name])
            for key, tensor in tensors.items():
                found = state[name][key]
                if (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
                    raise CheckpointError(
                        f"optimizer state {name}/{key}: is {_described(found)} in the checkpoint and "
                        f"{_described(tensor)} in this run; resume with the model and precision that wrote it"
                    )
        for name, tensors in live.items():
            for key, tensor in tensors.items():
                tensor.copy_(state[name][key])


class OptimizerConfig(Config):
    """Describes an optimizer: a rate and a weight decay for each role, and what its class adds."""

    lr: float = Field(
        default=1e-3, gt=0, description="peak learning rate; of matrices, and of every role not set apart"
    )
    vocabulary_lr: float | None = Field(default=None, gt=0, description="of embedding and head; null: lr")
    vector_lr: float | None = Field(default=None, gt=0, description="of norms and biases; null: lr")
    weight_decay: float = Field(default=0.1, ge=0, description="of matrices, decoupled, times the learning rate")
    vocabulary_weight_decay: float = Field(default=0.0, ge=0, description="of embedding and head; vectors never decay")

    @abstractmethod
    def build(self, params: Sequence[Param]) -> Optimizer:
        """An optimizer over `params`, its state at zero."""

    def lr_of(self, role: Role) -> float:
        """The learning rate of a role at schedule factor 1."""
        own = {"matrix": None, "vocabulary": self.vocabulary_lr, "vector": self.vector_lr}[role]
        return self.lr if own is None else own

    def weight_decay_of(self, role: Role) -> float:
        """The weight decay of a role."""
        return {"matrix": self.weight_decay, "vocabulary": self.vocabulary_weight_decay, "vector": 0.0}[role]


def _refuse_other_keys(what: str, wanted: Mapping[str, object], found: Mapping[str, object]) -> None:
    missing, extra = [key for key in wanted if key not in found], [key for key in found if key not in wanted]
    if missing or extra:
        parts = [f"{len(keys)} {word} ({keys[0]})" for keys, word in ((missing, "missing"), (extra, "extra")) if keys]
        raise CheckpointError(f"{what}: {' and '.join(parts)}; resume with the model and optimizer that wrote it")


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
