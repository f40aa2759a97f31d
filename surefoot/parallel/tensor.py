"""Tensor and sequence parallelism (Shoeybi et al., 2019; Korthikanti et al., 2022), derived from axes.

A weight with an axis in `CUT` holds this rank's part of it. Between mixers, feed-forward networks and head the sequence is
cut: a hook before each gathers it, a hook after sums the ranks' partial outputs and cuts it again. Every other weight is
a copy that saw part of the sequence or of the heads, so its gradient is partial and is summed over the ranks
(`shard`).

What lies under an `ImagePart` is whole on every rank, and its hidden sequence too: encoders and what joins them are small beside
a language model, and are done once an image and not once a token. Each rank uses the features for its own run of the text only,
so gradients of these weights are partial like the others'.

Legend: B batch, L length, T tokens, D width, V vocabulary (this rank's part), C rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from surefoot.blocks.base import Block, FeedForward, Mixer
from surefoot.blocks.embedding import Embedding
from surefoot.blocks.head import Head
from surefoot.blocks.images import ImagePart
from surefoot.blocks.norm import HeadsNorm
from surefoot.config import ConfigError
from surefoot.dist.collectives import gather, max_, reduce_scatter, sum_
from surefoot.dist.layout import Layout
from surefoot.dist.mesh import Mesh
from surefoot.models.initialise import named_weights
from surefoot.models.multimodal import Multimodal
from surefoot.ops.lookup import lookup
from surefoot.ops.loss import LossSums, VocabularyPart, linear_cross_entropy

CUT = frozenset({"heads", "kv_heads", "per_head", "norm_heads", "ffn", "vocab"})
"""Logical axes that tensor parallelism cuts. All but the vocabulary must divide: a head is never split."""

_SEQUENCE = 1


def cut_dim(axes: tuple[str, ...]) -> int | None:
    """The dimension of a weight that tensor parallelism cuts, if any."""
    found = [dim for dim, axis in enumerate(axes) if axis in CUT]
    return found[0] if found else None


def check(model: nn.Module, size: int, sequence_length: int) -> None:
    """`ConfigError` where `size` ranks cannot share what they would cut. The model is whole and may be on meta."""
    if size == 1:
        return
    if sequence_length % size:
        raise _refusal(size, sequence_length, "data.sequence_length (the sequence is cut between layers)")
    whole = _whole(model)
    for name, block in model.named_modules():
        if not isinstance(block, Block) or block in whole:
            continue
        cut = [(weight, dim) for weight, axes in block.axes.items() if (dim := cut_dim(axes)) is not None]
        parts = [part for part in block.modules() if isinstance(part, Block)]
        if isinstance(block, Mixer | FeedForward) and all(
            cut_dim(axes) is None for part in parts for axes in part.axes.values()
        ):
            raise ConfigError("plan.tensor", size, f"{name} has no axis among {sorted(CUT)} to cut; use plan.tensor=1")
        for weight, dim in cut:
            axis, length = block.axes[weight][dim], getattr(block, weight).shape[dim]
            count = length // block.units.get(axis, 1)
            if axis == "vocab":
                if -(-count // size) * (size - 1) >= count:
                    raise ConfigError("plan.tensor", size, f"leaves a rank without any of the {count} rows of {name}")
            elif count % size:
                raise _refusal(size, count, f"{axis} of {name}")


def _whole(model: nn.Module) -> set[nn.Module]:
    """All modules that are parts for images, or lie in one."""
    return {module for part in model.modules() if isinstance(part, ImagePart) for module in part.modules()}


def layouts_of(model: nn.Module, size: int) -> dict[str, Layout]:
    """How tensor parallelism cuts each weight of a whole model, by full name."""
    layouts, whole = {}, _whole(model)
    for full_name, block, name in named_weights(model):
        shape, dim = tuple(getattr(block, name).shape), None if block in whole else cut_dim(block.axes[name])
        layout = Layout(shape)
        layouts[full_name] = layout if dim is None or size == 1 else layout.split(dim, "tensor")
    return layouts


def apply(model: nn.Module, mesh: Mesh, layouts: Mapping[str, Layout]) -> None:
    """Put the collectives around the blocks of a model whose weights are cut."""
    group = mesh.group("tensor")
    if group is None:
        return
    vocabulary = next(layouts[name] for name, block, own in named_weights(model) if "vocab" in block.axes[own])
    start = vocabulary.box(mesh.grid, mesh.coordinates).offset[0]
    num_rows = -(-vocabulary.shape[0] // mesh.size("tensor"))
    whole = _whole(model)
    for module in model.modules():
        if module in whole:
            continue
        if isinstance(module, Mixer | FeedForward) and not (isinstance(module, Mixer) and module.is_composite):
            module.register_forward_pre_hook(_Gather(group))
            module.register_forward_hook(_Scatter(group))
            if isinstance(module, Mixer):
                module.part = mesh.index("tensor")
        elif isinstance(module, HeadsNorm):
            module.pool = lambda sums: gather(sums, -1, group).sum(-1, keepdim=True)
        elif isinstance(module, Embedding):
            module.lookup = _Lookup(group, start)
        elif isinstance(module, Head):
            module.objective = _Objective(group, start, num_rows)
        elif isinstance(module, Multimodal):
            module.own_run = _OwnRun(mesh.index("tensor"), mesh.size("tensor"))


class _OwnRun:
    """Of what there is a token, this rank's run of the sequence, as `_Lookup` leaves it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def __call__(self, x: Tensor) -> Tensor:
        return x.chunk(self.size, _SEQUENCE)[self.rank]


class _Gather:
    """Before a mixer or feed-forward network: the whole sequence."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, _block: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x_BLD, *rest = arguments
        return gather(x_BLD, _SEQUENCE, self.group), *rest


class _Scatter:
    """After it: this rank's run of the sequence, summed over the ranks' heads or hidden units."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, _block: nn.Module, _arguments: tuple[Any, ...], y_BLD: Tensor) -> Tensor:
        return reduce_scatter(y_BLD, _SEQUENCE, self.group)


class _Lookup:
    """Embedding over rows `start` to `start` + V of the vocabulary."""

    def __init__(self, group: ProcessGroup, start: int) -> None:
        self.group, self.start = group, start

    def __call__(self, tokens_BL: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
        own_BL = tokens_BL - self.start
        is_here_BL = (own_BL >= 0) & (own_BL < weight_VD.shape[0])
        x_BLD = lookup(own_BL.clamp(0, weight_VD.shape[0] - 1), weight_VD, dtype)
        # One rank has the row and the others add zeros, so the sum is exact in any dtype.
        return reduce_scatter(torch.where(is_here_BL[..., None], x_BLD, 0), _SEQUENCE, self.group)


class _Objective:
    """Cross-entropy over a vocabulary whose rows are spread over the group; the logits are never gathered."""

    def __init__(self, group: ProcessGroup, start: int, num_rows: int) -> None:
        self.group = group
        self.part = VocabularyPart(start, num_rows, lambda x: max_(x, group), lambda x: sum_(x, group))

    def __call__(
        self, x_BLD: Tensor, weight_VD: Tensor, targets_BL: Tensor, z_weight: float, softcap: float | None
    ) -> tuple[Tensor, LossSums]:
        x_TD = gather(x_BLD, _SEQUENCE, self.group).flatten(0, 1)
        return linear_cross_entropy(x_TD, weight_VD, targets_BL.flatten(), z_weight, self.part, softcap=softcap)


def _refusal(size: int, count: int, what: str) -> ConfigError:
    nearest = min((d for d in range(1, count + 1) if count % d == 0), key=lambda d: (abs(d - size), d))
    return ConfigError("plan.tensor", size, f"must divide {count} {what}; nearest that does: {nearest}")
