"""AdamW (Loshchilov and Hutter, 2019) on torch's fused kernel.

The kernel behind `torch.optim.AdamW(fused=True)` is called directly: that class brings in the compiler the first time
it is built (1.1 s and 70 MB here) and names its state by position instead of by parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from surefoot.config import FieldError
from surefoot.optim.base import Group, Optimizer, OptimizerConfig, Param, Role, gradients_of
from surefoot.optim.groups import describe, split_by_role
from surefoot.optim.narrow import Keeper, widened


class AdamWConfig(OptimizerConfig):
    """AdamW for every parameter."""

    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="memory of the mean and of the square")
    eps: float = Field(default=1e-8, gt=0)

    @model_validator(mode="after")
    def _betas_are_averages(self) -> Self:
        refuse_betas("betas", self.betas)
        return self

    def build(self, params: Sequence[Param]) -> AdamW:
        """AdamW over `params`, its state at zero."""
        split = split_by_role(params)
        return AdamW(split, describe(self, split, dict.fromkeys(split, "AdamW")), self.betas, self.eps)


def refuse_betas(field: str, betas: tuple[float, float]) -> None:
    """Raise `FieldError` unless both are in [0, 1)."""
    if not all(0 <= beta < 1 for beta in betas):
        raise FieldError(field, betas, "both must be at least 0 and below 1")


@dataclass(frozen=True)
class _Slot:
    param: Param
    keeper: Keeper
    first_moment: Tensor
    second_moment: Tensor
    step: Tensor


class AdamW(Optimizer):
    """AdamW with one rate and weight decay a role; state `first_moment`, `second_moment` and a 0-d `step` each, and what
    `optim.narrow` keeps of weights and moments in bf16.

    Each parameter counts its own steps, so that one without a gradient for a while keeps a right bias correction.
    """

    def __init__(
        self, split: Mapping[Role, Sequence[Param]], groups: Sequence[Group], betas: tuple[float, float], eps: float
    ) -> None:
        self._groups = [(group, [_new_slot(param) for param in split[group.role]]) for group in groups]
        self._betas, self._eps = betas, eps

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """See `Optimizer.step`."""
        for group, members in self._groups:
            live = [slot for slot in members if slot.param.tensor.grad is not None]
            if not live:
                continue
            torch._foreach_add_([slot.step for slot in live], 1)
            plain = [slot for slot in live if slot.keeper.is_plain]
            if plain:
                self._move(
                    group,
                    scale,
                    [slot.param.tensor for slot in plain],
                    gradients_of(slot.param for slot in plain),
                    [slot.first_moment for slot in plain],
                    [slot.second_moment for slot in plain],
                    [slot.step for slot in plain],
                )
            for slot in live:
                if not slot.keeper.is_plain:
                    self._move_narrow(group, scale, slot)

    def _move(
        self,
        group: Group,
        scale: float,
        weights: list[Tensor],
        gradients: list[Tensor],
        first_moments: list[Tensor],
        second_moments: list[Tensor],
        steps: list[Tensor],
    ) -> None:
        torch._fused_adamw_(
            weights,
            gradients,
            first_moments,
            second_moments,
            [],
            steps,
            lr=group.lr * scale,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=group.weight_decay,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
        )

    def _move_narrow(self, group: Group, scale: float, slot: _Slot) -> None:
        """The same on wide copies, piece by piece."""
        keeper = slot.keeper
        keeper.begin()
        for rows in keeper.pieces():
            weight, gradient = keeper.read(rows), keeper.gradient(rows)
            first, second = (widened(moment[rows]) for moment in (slot.first_moment, slot.second_moment))
            self._move(group, scale, [weight], [gradient.to(weight.dtype)], [first], [second], [slot.step])
            keeper.write(rows, weight)
            keeper.write_moment(slot.first_moment, rows, first, "first_moment")
            keeper.write_moment(slot.second_moment, rows, second, "second_moment")

    def zero_grad(self) -> None:
        """See `Optimizer.zero_grad`."""
        for _, members in self._groups:
            for slot in members:
                slot.param.tensor.grad = None

    def groups(self) -> list[Group]:
        """See `Optimizer.groups`."""
        return [group for group, _ in self._groups]

    def state(self) -> dict[str, dict[str, Tensor]]:
        """See `Optimizer.state`."""
        return {
            slot.param.name: {"first_moment": slot.first_moment, "second_moment": slot.second_moment, "step": slot.step}
            | slot.keeper.state
            for _, members in self._groups
            for slot in members
        }


def _new_slot(param: Param) -> _Slot:
    # The kernel wants its step counts as fp32 beside the weight: exact up to 16.7 million steps.
    step = torch.zeros((), dtype=torch.float32, device=param.tensor.device)
    keeper = Keeper(param)
    return _Slot(param, keeper, keeper.new_moment(), keeper.new_moment(), step)
