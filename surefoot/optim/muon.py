"""Muon (Jordan et al., 2024): momentum, then the nearest semi-orthogonal matrix by Newton-Schulz iteration.

Legend: K matrices of one shape, M rows, N columns, M <= N.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from surefoot.config import ConfigError
from surefoot.optim.adamw import AdamW, refuse_betas
from surefoot.optim.base import Group, Optimizer, OptimizerConfig, Param, gradients_of
from surefoot.optim.exchange import AXES, Exchange
from surefoot.optim.groups import describe, split_by_role
from surefoot.optim.narrow import Keeper, is_narrow, widened

# Jordan et al. (2024): steepest at 0, so that five iterations bring singular values from 1e-2 to within 0.7..1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# A stack this large fills a GPU; on a CPU a smaller one stays in cache and keeps the temporaries small.
_STACK_ELEMENTS, _CPU_STACK_ELEMENTS = 1 << 26, 1 << 20


class MuonConfig(OptimizerConfig):
    """Muon for matrices, AdamW for vocabulary and vectors.

    A weight is orthogonalised as its axes name it: (output, input), or each expert's matrix where the first axis is
    "experts".
    """

    momentum: float = Field(default=0.95, ge=0, lt=1, description="Nesterov momentum of matrices")
    scaling: Literal["update_rms", "spectral"] = Field(
        default="update_rms",
        description="size of a matrix update at lr 1: RMS 0.2 like AdamW's, whose lr then carries over "
        "(Liu et al., 2025), or spectral norm sqrt(outputs / inputs) (Bernstein and Newhouse, 2024)",
    )
    num_iterations: int = Field(default=5, ge=1, le=20, description="Newton-Schulz iterations")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="AdamW's, for vocabulary and vectors")
    eps: float = Field(default=1e-8, gt=0, description="AdamW's, for vocabulary and vectors")

    @model_validator(mode="after")
    def _betas_are_averages(self) -> Self:
        refuse_betas("betas", self.betas)
        return self

    def build(self, params: Sequence[Param]) -> Muon:
        """Muon over `params`, its state at zero; `ConfigError` where a weight is no matrix nor a stack of experts'."""
        return Muon(self, params)


@dataclass(frozen=True)
class _Slot:
    param: Param
    keeper: Keeper
    momentum: Tensor


class Muon(Optimizer):
    """See `MuonConfig`; the state of a matrix is its `momentum` and what `optim.narrow` keeps, of any other parameter AdamW's."""

    def __init__(self, config: MuonConfig, params: Sequence[Param]) -> None:
        split = split_by_role(params)
        self._config = config
        self._groups = describe(config, split, {"matrix": "Muon", "vocabulary": "AdamW", "vector": "AdamW"})
        self._rest = AdamW(split, [group for group in self._groups if group.role != "matrix"], config.betas, config.eps)
        matrices = split.get("matrix", [])
        for param in matrices:
            if len(param.axes) > 2 + (param.axes[0] == "experts"):
                raise ConfigError(
                    "optim",
                    param.name,
                    f"has axes {param.axes}; Muon takes (output, input) or (experts, output, input): use AdamW",
                )
        keepers = [Keeper(param) for param in matrices]
        self._slots = [
            _Slot(param, keeper, keeper.new_moment()) for param, keeper in zip(matrices, keepers, strict=True)
        ]
        self._stacks = [[self._slots[index] for index in stack] for stack in _stacks([s.momentum for s in self._slots])]
        self._exchange = _exchange(self._slots)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """See `Optimizer.step`."""
        lr = self._config.lr * scale
        if self._exchange is not None:
            blended = self._blend(self._slots)
            updates = self._exchange.apply(blended, self._orthogonal, meanwhile=lambda: self._rest.step(scale))
            self._move(self._slots, lr, updates)
            return
        self._rest.step(scale)
        for stack in self._stacks:
            slots = [slot for slot in stack if slot.param.tensor.grad is not None]
            if slots:
                self._move(slots, lr, self._stacked(self._blend(slots)))

    def _blend(self, slots: Sequence[_Slot]) -> list[Tensor]:
        """Advance the momenta; what is to be orthogonalised (Nesterov)."""
        for slot in slots:
            slot.keeper.begin()
        momenta = [widened(slot.momentum) for slot in slots]  # a copy only where it is narrow
        gradients = [
            gradient.to(momentum.dtype)
            for gradient, momentum in zip(gradients_of(slot.param for slot in slots), momenta, strict=True)
        ]
        torch._foreach_lerp_(momenta, gradients, 1 - self._config.momentum)
        blended = list(torch._foreach_lerp(gradients, momenta, self._config.momentum))
        for slot, momentum in zip(slots, momenta, strict=True):
            for rows in slot.keeper.pieces() if is_narrow(slot.momentum) else ():
                slot.keeper.write_moment(slot.momentum, rows, momentum[rows], "momentum")
        return blended

    def _orthogonal(self, matrices: list[Tensor]) -> list[Tensor]:
        """The update of each whole matrix, those of one shape together."""
        updates: dict[int, Tensor] = {}
        for stack in _stacks(matrices):
            updates |= zip(stack, self._stacked([matrices[index] for index in stack]), strict=True)
        return [updates[index] for index in range(len(matrices))]

    def _stacked(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """The updates of matrices whose shapes agree up to transposition, as one batch."""
        wide = [matrix.mT if _is_tall(matrix) else matrix for matrix in matrices]
        mixed_KMN = torch.cat([matrix.reshape(-1, *matrix.shape[-2:]) for matrix in wide])
        update_KMN = orthogonalise(mixed_KMN, self._config.num_iterations)
        parts = update_KMN.split([matrix.numel() // mixed_KMN[0].numel() for matrix in wide])
        return [
            (part.mT if _is_tall(matrix) else part).reshape(matrix.shape)
            for part, matrix in zip(parts, matrices, strict=True)
        ]

    def _move(self, slots: Sequence[_Slot], lr: float, updates: Sequence[Tensor]) -> None:
        """Decay and update the weights."""
        kept = 1 - lr * self._config.weight_decay
        wide = [slot.param.tensor for slot in slots if not is_narrow(slot.param.tensor)]
        if kept != 1 and wide:
            torch._foreach_mul_(wide, kept)
        for slot, update in zip(slots, updates, strict=True):
            rate = -lr * self._size(slot.param.shape)
            if not is_narrow(slot.param.tensor):
                slot.param.tensor.add_(update, alpha=rate)
                continue
            for rows in slot.keeper.pieces():
                slot.keeper.write(rows, slot.keeper.read(rows).mul_(kept).add_(update[rows], alpha=rate))

    def zero_grad(self) -> None:
        """See `Optimizer.zero_grad`."""
        self._rest.zero_grad()
        for slot in self._slots:
            slot.param.tensor.grad = None

    def groups(self) -> list[Group]:
        """See `Optimizer.groups`."""
        return list(self._groups)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """See `Optimizer.state`."""
        own = {slot.param.name: {"momentum": slot.momentum} | slot.keeper.state for slot in self._slots}
        return own | self._rest.state()

    def _size(self, shape: tuple[int, ...]) -> float:
        num_outputs, num_inputs = shape[-2:]
        if self._config.scaling == "spectral":
            return math.sqrt(num_outputs / num_inputs)
        # A semi-orthogonal matrix has RMS 1/sqrt(max(M, N)).
        return 0.2 * math.sqrt(max(num_outputs, num_inputs))


def orthogonalise(matrices_KMN: Tensor, num_iterations: int = 5) -> Tensor:
    """For each matrix U S V', about U V': singular values of at least 1e-2 of the norm come out within 0.7 and 1.2.

    Needs M <= N. fp64 is computed in fp64; anything else in bf16 where that is a fast unit's format, else in fp32.
    """
    # The norm is taken before rounding; its floor keeps the squares of a vanishing gradient clear of underflow.
    norm_K11: Tensor = torch.linalg.vector_norm(matrices_KMN, dim=(-2, -1), keepdim=True).clamp_min(1e-15)
    x_KMN: Tensor = (matrices_KMN / norm_K11).to(_compute_dtype(matrices_KMN))
    a, b, c = COEFFICIENTS
    num_rows, num_columns = x_KMN.shape[-2:]
    if x_KMN.dtype is not torch.bfloat16 and 2 * num_columns > 3 * num_rows:
        return _through_gram(x_KMN, num_iterations)
    for _ in range(num_iterations):
        gram_KMM = torch.bmm(x_KMN, x_KMN.mT)
        step_KMM = torch.baddbmm(gram_KMM, gram_KMM, gram_KMM, beta=b, alpha=c)
        x_KMN = torch.baddbmm(x_KMN, step_KMM, x_KMN, beta=a)
    return x_KMN


def _through_gram(x_KMN: Tensor, num_iterations: int) -> Tensor:
    """The same iteration carried by the M x M Gram matrix and applied to `x` once, at the end.

    Five iterations cost 34 M^3 + 4 M^2 N FLOPs instead of 10 M^3 + 20 M^2 N: less from N = 1.5 M on, two thirds at
    N = 3 M. All factors are polynomials of one symmetric matrix and commute. Squaring the condition number
    costs digits: about 4e-4 of relative error in fp32, where bf16's own is 1e-1, so bf16 does not come here.
    """
    a, b, c = COEFFICIENTS
    gram_KMM = torch.bmm(x_KMN, x_KMN.mT)
    product_KMM: Tensor | None = None
    for iteration in range(num_iterations):
        step_KMM = torch.baddbmm(gram_KMM, gram_KMM, gram_KMM, beta=b, alpha=c)
        step_KMM.diagonal(dim1=-2, dim2=-1).add_(a)
        product_KMM = step_KMM if product_KMM is None else torch.bmm(step_KMM, product_KMM)
        if iteration < num_iterations - 1:
            gram_KMM = torch.bmm(step_KMM, torch.bmm(gram_KMM, step_KMM))
    assert product_KMM is not None
    update_KMN: Tensor = torch.bmm(product_KMM, x_KMN)
    return update_KMN


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    if tensor.dtype is torch.float64:
        return torch.float64
    has_fast_bf16 = tensor.device.type != "cpu" or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if has_fast_bf16 else torch.float32


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[-2] > matrix.shape[-1]


def _exchange(slots: Sequence[_Slot]) -> Exchange | None:
    """How matrices that are cut come together; None where every rank holds its matrices whole."""
    places = [slot.param.place for slot in slots if slot.param.place is not None]
    if not any(place.layout.is_cut_along(axis) and place.mesh.size(axis) > 1 for place in places for axis in AXES):
        return None
    return Exchange(places[0].mesh, places, [cost_of(place.shape) for place in places])


def cost_of(shape: tuple[int, ...]) -> float:
    """What the orthogonalisation of one weight costs, up to a factor."""
    return math.prod(shape) * min(shape[-2:])


def _stacks(matrices: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indexes of matrices that agree up to transposition, device and dtype, in pieces of a bounded size."""
    alike: dict[object, list[int]] = {}
    for index, matrix in enumerate(matrices):
        alike.setdefault((*sorted(matrix.shape[-2:]), matrix.device, matrix.dtype), []).append(index)
    for members in alike.values():
        limit = _CPU_STACK_ELEMENTS if matrices[members[0]].device.type == "cpu" else _STACK_ELEMENTS
        piece: list[int] = []
        for index in members:
            if piece and sum(matrices[other].numel() for other in piece) + matrices[index].numel() > limit:
                yield piece
                piece = []
            piece.append(index)
        yield piece
