"""Collectives along one dimension of a tensor, each with its transpose as gradient.

    forward            backward
    gather             reduce_scatter
    reduce_scatter     gather
    all_to_all         all_to_all, the other way
    exchange_rows      exchange_rows, the other way
    pass_on            none: a ring's caller writes its own

A group of None stands for one rank: the tensor comes back as it went in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup

# torch 2.13 renamed the two; earlier versions know the old names only.
gather_flat: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(grads[0], ctx.dim, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grads[0], ctx.dim, ctx.group), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split_dim: int, concat_dim: int, group: ProcessGroup) -> Tensor:
        ctx.split_dim, ctx.concat_dim, ctx.group = split_dim, concat_dim, group
        return _all_to_all(x, split_dim, concat_dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.concat_dim, ctx.split_dim, ctx.group), None, None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange_rows(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange_rows(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def gather(x: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    """The ranks' tensors joined along `dim` in rank order, on every rank; gradients are summed over ranks and split."""
    return x if group is None else _apply(_Gather, x, dim, group)


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    """This rank's equal part along `dim` of the sum over ranks."""
    return x if group is None else _apply(_ReduceScatter, x, dim, group)


def all_to_all(x: Tensor, split_dim: int, concat_dim: int, group: ProcessGroup | None) -> Tensor:
    """Split along one dimension, send each part to its rank, join what arrives along another."""
    return x if group is None else _apply(_AllToAll, x, split_dim, concat_dim, group)


def exchange_rows(x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """Send the first `sent[0]` rows to rank 0 of the group, the next `sent[1]` to rank 1 and so on; what arrives, by rank.

    `received` says how many rows come from each; any of the numbers may be 0.
    """
    return _apply(_ExchangeRows, x, sent, received, group)


def pass_on(x: Tensor, group: ProcessGroup, tag: int = 0) -> Callable[[], Tensor]:
    """Start to send `x` to the next rank of a ring; what comes back waits for, and returns, the previous rank's tensor.

    No gradient. `x` must stay as it is until then. Transfers of one `tag` arrive in the order in which they were started.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    sent, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, group=group, tag=tag, group_peer=(rank + 1) % num_ranks),
            dist.P2POp(dist.irecv, received, group=group, tag=tag, group_peer=(rank - 1) % num_ranks),
        ]
    )

    def wait() -> Tensor:
        for work in works:
            work.wait()
        del sent_alive[:]
        return received

    sent_alive = [sent]  # the transfer reads it until it ends
    return wait


def sum_(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Replace `x` by its sum over ranks; no gradient."""
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


def max_(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Replace `x` by its largest over ranks; no gradient."""
    if group is not None:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    return x


def sum_all_(tensors: Sequence[Tensor], group: ProcessGroup | None) -> None:
    """Replace each tensor by its sum over ranks, in one collective for each dtype and device."""
    if group is None:
        return
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for members in alike.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in members])
        dist.all_reduce(flat, group=group)
        parts = flat.split([tensor.numel() for tensor in members])
        torch._foreach_copy_(members, [part.view_as(tensor) for part, tensor in zip(parts, members, strict=True)])


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    if torch.compiler.is_dynamo_compiling():  # as in `ops.autograd`
        return _untraced(function, arguments)
    result: Tensor = function.apply(*arguments)
    return result


@_disable_dynamo
def _untraced(function: type[torch.autograd.Function], arguments: tuple[Any, ...]) -> Tensor:
    return _apply(function, *arguments)


def _gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    num_ranks = dist.get_world_size(group)
    flat = x.new_empty((num_ranks * x.shape[0], *x.shape[1:]))
    gather_flat(flat, x.contiguous(), group=group)
    return flat if dim == 0 else torch.cat(flat.chunk(num_ranks), dim)


def _reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    num_ranks = dist.get_world_size(group)
    if x.shape[dim] % num_ranks:
        raise ValueError(f"{num_ranks} ranks cannot share dimension {dim} of {tuple(x.shape)} equally")
    parts = x if dim == 0 else torch.cat(x.chunk(num_ranks, dim))
    own = x.new_empty((parts.shape[0] // num_ranks, *parts.shape[1:]))
    reduce_scatter_flat(own, parts.contiguous(), group=group)
    return own


def _exchange_rows(x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    arrived = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(arrived, x.contiguous(), received, sent, group=group)
    return arrived


def _all_to_all(x: Tensor, split_dim: int, concat_dim: int, group: ProcessGroup) -> Tensor:
    num_ranks = dist.get_world_size(group)
    if x.shape[split_dim] % num_ranks:
        raise ValueError(f"{num_ranks} ranks cannot share dimension {split_dim} of {tuple(x.shape)} equally")
    sent = torch.stack(x.chunk(num_ranks, split_dim))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(list(received), concat_dim)
