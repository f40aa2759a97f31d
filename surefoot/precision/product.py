"""Products whose operands are quantised: all three of a linear map, y = x Wᵀ, dx = g W and dW = gᵀ x.

The operands are quantised along the contraction of each product, and multiplied in the dtype of the activations: values times
scales are exact there, so this is the function that a unit for narrow numbers computes, at the cost of an emulation. It is
what runs on every device so far.

A scale is shared by a tile, and a tile that is as long as its operand may lie on several ranks: then its largest magnitude
is taken over exactly the ranks that hold parts of it.

Legend: N rows (tokens), R rows sorted by group, E groups (experts), I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.blocks.base import Exact
from surefoot.ops.autograd import apply, gradient_dtype, is_again
from surefoot.ops.grouped import outer_products, products
from surefoot.ops.matmul import mm
from surefoot.precision.formats import Tile, amax_of, quantise, scale_in_two_levels, scale_of
from surefoot.precision.kinds import Kind
from surefoot.precision.meter import Meter, Role

Maximum = Callable[[Tensor], Tensor]
"""Replaces a tensor by its largest over some ranks, in place, and returns it."""


def alone(amax: Tensor) -> Tensor:
    """No other rank holds a part."""
    return amax


@dataclass(frozen=True)
class Sharing:
    """Where tiles may go on: `tokens` are shared out over some ranks, and those axes of weights that are cut over others.
    Of the tokens of one expert, no further than its copies lie: `expert_tokens`."""

    tokens: Maximum = alone
    expert_tokens: Maximum = alone
    features: Maximum = alone


class Operand:
    """One operand of one weight's products. `cut` says for rows and columns which ranks hold the others, `of_expert` which
    hold other rows of the same group."""

    def __init__(
        self,
        kind: Kind,
        meter: Meter,
        name: str,
        role: Role,
        cut: tuple[Maximum, Maximum],
        of_expert: Maximum = alone,
    ) -> None:
        self._kind, self._meter, self._key, self._cut = kind, meter, (name, role), cut
        self._of_expert = of_expert
        self._form = kind.form(role)
        self._tiles = {along_rows: kind.tile(role, along_rows=along_rows) for along_rows in (False, True)}
        self.is_symmetric = self._tiles[False] == self._tiles[True]

    def amax(self, x_RC: Tensor, *, along_rows: bool = False) -> Tensor:
        """The largest magnitudes of all tiles, also of their parts elsewhere; as the operand holds them, if it is scaled
        by what it held before."""
        tile = self._tiles[along_rows]
        amax = amax_of(x_RC, tile)
        return amax if self._kind.is_delayed else self._over_ranks(amax, tile)

    def narrow(
        self, x_RC: Tensor, amax: Tensor, dtype: torch.dtype, *, along_rows: bool = False, is_counted: bool = False
    ) -> Tensor:
        """The matrix on its grid, as `dtype`. Largest magnitudes and losses are noted where `is_counted`."""
        if is_counted:
            self._meter.note_before(self._key, x_RC.numel(), amax)
        tile, form = self._tiles[along_rows], self._form
        if self._kind.is_delayed:
            found = self._meter.delayed_scale(self._key, form.largest)
            if found is None:
                return x_RC.to(dtype)  # the first step only looks
            scale = found.expand_as(amax)
        elif self._kind.has_two_levels:
            whole = amax.amax((-2, -1), keepdim=True)
            scale = scale_in_two_levels(amax, self._over_ranks(whole, Tile(None, None)), form)
        else:
            scale = scale_of(amax, form.largest)
        quantised = quantise(x_RC, scale, tile, form, dtype, can_saturate=self._kind.is_delayed)
        if is_counted:
            self._meter.note(self._key, quantised)
        return quantised.values

    def narrow_groups(self, x_RC: Tensor, counts_E: Tensor) -> Tensor:
        """Along rows that are sorted by group, each group by itself: of kinds whose tiles are as long as their operand."""
        tile = self._tiles[True]
        if self._kind.is_delayed or tile.columns is None:
            return self.narrow(x_RC, self.amax(x_RC), x_RC.dtype, along_rows=True)
        group_R = torch.repeat_interleave(counts_E, output_size=x_RC.shape[0])
        amax_EC = x_RC.new_zeros((counts_E.shape[0], x_RC.shape[1]))
        amax_EC.scatter_reduce_(0, group_R[:, None].expand_as(x_RC), x_RC.abs(), "amax")
        scale_RC = scale_of(self._of_expert(amax_EC.float()), self._form.largest)[group_R]
        return quantise(x_RC, scale_RC, Tile(1, 1), self._form, x_RC.dtype, can_saturate=False).values

    def _over_ranks(self, amax: Tensor, tile: Tile) -> Tensor:
        for extent, maximum in zip((tile.rows, tile.columns), self._cut, strict=True):
            if extent is None:
                amax = maximum(amax)
        return amax


@dataclass(frozen=True)
class Operands:
    """Of one weight's products."""

    input: Operand
    weight: Operand
    gradient: Operand


class Quantising:
    """The `Product` of one block: `operands` by the weight's name there; weights without stay in the dtype of activations.

    Weights side by side read one input, which is quantised once, as the first one's. `narrows_weight_gradients` says whether
    dW is a product of quantised operands too.
    """

    def __init__(self, kind: Kind, operands: Mapping[str, Operands], *, narrows_weight_gradients: bool) -> None:
        self.operands, self.narrows_weight_gradients = operands, narrows_weight_gradients
        self._exact = Exact()
        # Which tokens of an expert come to lie in one tile depends on how the batch is cut.
        self.narrows_expert_gradients = narrows_weight_gradients and not kind.has_tiles

    def linear(self, x: Tensor, weights_OI: Mapping[str, Tensor]) -> Tensor:
        """See `Product.linear`."""
        narrow = {name: weight for name, weight in weights_OI.items() if name in self.operands}
        wide = {name: weight for name, weight in weights_OI.items() if name not in self.operands}
        if not wide:
            return self._linear(x, narrow)
        parts: dict[str, Tensor] = {}
        for multiply, weights in ((self._linear, narrow), (self._exact.linear, wide)):
            if weights:
                sizes = [weight.shape[0] for weight in weights.values()]
                parts |= zip(weights, multiply(x, weights).split(sizes, -1), strict=True)
        return torch.cat([parts[name] for name in weights_OI], -1)

    def _linear(self, x: Tensor, weights_OI: Mapping[str, Tensor]) -> Tensor:
        operands = [self.operands[name] for name in weights_OI]
        y_NO: Tensor = apply(
            _Linear, self, operands, _is_first_of_training(), x.reshape(-1, x.shape[-1]), *weights_OI.values()
        )
        return y_NO.view(*x.shape[:-1], -1)

    def grouped(self, x_RI: Tensor, counts_E: Tensor, name: str, weight_EOI: Tensor) -> Tensor:
        """See `Product.grouped`."""
        if name not in self.operands:
            return self._exact.grouped(x_RI, counts_E, name, weight_EOI)
        y_RO: Tensor = apply(_Grouped, self, self.operands[name], _is_first_of_training(), x_RI, counts_E, weight_EOI)
        return y_RO


def _is_first_of_training() -> bool:
    """Whether operands are to be counted: a pass that is run again for its backward was counted the first time."""
    return torch.is_grad_enabled() and not is_again()


class _Linear(torch.autograd.Function):
    """Keeps input and weights as they came; quantises them again in backward, along what is summed over there.

    Ranks find the scales of what they share together, so all must make it again in backward, or none.
    """

    is_costly = True
    communicates = True

    @staticmethod
    def forward(
        ctx: Any,
        product: Quantising,
        operands: Sequence[Operands],
        is_training: bool,
        x_NI: Tensor,
        *weights_OI: Tensor,
    ) -> Tensor:
        amaxes = [operands[0].input.amax(x_NI)]
        narrow_NI = operands[0].input.narrow(x_NI, amaxes[0], x_NI.dtype, is_counted=is_training)
        narrow_OI = []
        for each, weight in zip(operands, weights_OI, strict=True):
            amaxes.append(each.weight.amax(weight))
            narrow_OI.append(each.weight.narrow(weight, amaxes[-1], x_NI.dtype, is_counted=is_training))
        ctx.product, ctx.operands = product, operands
        ctx.save_for_backward(x_NI, *weights_OI, *amaxes)
        return mm(narrow_NI, torch.cat(narrow_OI).t(), x_NI.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        operands = ctx.operands
        x_NI, *rest = ctx.saved_tensors
        weights_OI, (amax_x, *amaxes) = rest[: len(operands)], rest[len(operands) :]
        grads_NO = grads[0].split([weight.shape[0] for weight in weights_OI], dim=1)
        gradient_amaxes = [each.gradient.amax(grad) for each, grad in zip(operands, grads_NO, strict=True)]
        grad_x = None
        narrow_NO = [
            each.gradient.narrow(grad, amax, x_NI.dtype, is_counted=True)
            for each, grad, amax in zip(operands, grads_NO, gradient_amaxes, strict=True)
        ]
        if ctx.needs_input_grad[3]:
            narrow_OI = [
                each.weight.narrow(weight, _turned(each.weight, weight, amax), x_NI.dtype, along_rows=True)
                for each, weight, amax in zip(operands, weights_OI, amaxes, strict=True)
            ]
            grad_x = mm(torch.cat(narrow_NO, 1), torch.cat(narrow_OI), x_NI.dtype)
        if ctx.product.narrows_weight_gradients:
            first = operands[0].input
            x_NI = first.narrow(x_NI, _turned(first, x_NI, amax_x), x_NI.dtype, along_rows=True)
            grads_NO = [
                each.gradient.narrow(grad, _turned(each.gradient, grad, amax), grad.dtype, along_rows=True)
                for each, grad, amax in zip(operands, grads_NO, gradient_amaxes, strict=True)
            ]
        return (
            None,
            None,
            None,
            grad_x,
            *(mm(grad.t(), x_NI, gradient_dtype(weight)) for grad, weight in zip(grads_NO, weights_OI, strict=True)),
        )


class _Grouped(torch.autograd.Function):
    """The same for rows sorted by group and a matrix each."""

    is_costly = True
    communicates = True

    @staticmethod
    def forward(
        ctx: Any,
        product: Quantising,
        operands: Operands,
        is_training: bool,
        x_RI: Tensor,
        counts_E: Tensor,
        weight_EOI: Tensor,
    ) -> Tensor:
        amax_x, amax = operands.input.amax(x_RI), operands.weight.amax(weight_EOI)
        narrow_RI = operands.input.narrow(x_RI, amax_x, x_RI.dtype, is_counted=is_training)
        narrow_EOI = operands.weight.narrow(weight_EOI, amax, x_RI.dtype, is_counted=is_training)
        ctx.product, ctx.operands = product, operands
        ctx.save_for_backward(x_RI, counts_E, weight_EOI, amax)
        return products(narrow_RI, narrow_EOI.mT, counts_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        operands = ctx.operands
        x_RI, counts_E, weight_EOI, amax = ctx.saved_tensors
        grad_RO, grad_x_RI = grads[0].contiguous(), None
        narrow_RO = operands.gradient.narrow(grad_RO, operands.gradient.amax(grad_RO), x_RI.dtype, is_counted=True)
        if ctx.needs_input_grad[3]:
            turned = _turned(operands.weight, weight_EOI, amax)
            narrow_EOI = operands.weight.narrow(weight_EOI, turned, x_RI.dtype, along_rows=True)
            grad_x_RI = products(narrow_RO, narrow_EOI, counts_E)
        if ctx.product.narrows_expert_gradients:
            x_RI = operands.input.narrow_groups(x_RI, counts_E)
            grad_RO = operands.gradient.narrow_groups(grad_RO, counts_E)
        return None, None, None, grad_x_RI, None, outer_products(grad_RO, x_RI, counts_E, weight_EOI)


def _turned(operand: Operand, x_RC: Tensor, amax: Tensor) -> Tensor:
    """Largest magnitudes of tiles along the rows, given those along the columns, which often are the same."""
    return amax if operand.is_symmetric else operand.amax(x_RC, along_rows=True)
