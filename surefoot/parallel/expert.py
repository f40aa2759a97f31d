"""Expert parallelism (Lepikhin et al., 2021): the experts of a routed network are shared out over the `expert` ranks.

Those ranks see different samples, as other data ranks do, and hold the same part of every other weight. Each token's rows go to
the ranks that have its experts and come back, by an all-to-all whose parts are as uneven as the routing; how many rows will
come is told first. An expert's weight is cut by the experts, then kept by ZeRO over the remaining data ranks: on a mesh of
its own, since its gradient is whole once its rank has seen the rows of the whole group.

What is sent never depends on the data, only how much: a rank of padding and an expert without tokens take part like any other.

Legend: T tokens, K experts a token, R rows of this rank's tokens, S rows that arrive here, D width, E experts, N ranks, H = E/N
experts held here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from surefoot.blocks.base import Block, Dispatch, Routed, Routing
from surefoot.config import ConfigError
from surefoot.dist.collectives import exchange_rows
from surefoot.dist.layout import Layout
from surefoot.dist.mesh import Mesh
from surefoot.models.initialise import named_weights
from surefoot.ops.grouped import sizes_of
from surefoot.ops.rows import copy_rows

EXPERTS = "experts"
"""The logical axis that is cut."""


def check(model: nn.Module, size: int) -> None:
    """`ConfigError` where `size` ranks cannot share the experts. The model is whole and may be on meta."""
    if size == 1:
        return
    counts = {name: getattr(block, own_name).shape[0] for name, block, own_name in _expert_weights(model)}
    if not counts:
        raise ConfigError("plan.expert", size, "the model has no experts to share out; use plan.expert=1")
    for name, count in counts.items():
        if count % size:
            nearest = min((d for d in range(1, count + 1) if count % d == 0), key=lambda d: (abs(d - size), d))
            raise ConfigError(
                "plan.expert", size, f"must divide {count} experts of {name}; nearest that does: {nearest}"
            )


def cut(model: nn.Module, layouts: Mapping[str, Layout], size: int) -> dict[str, Layout]:
    """The layouts, those of experts cut once more."""
    found = dict(layouts)
    if size > 1:
        for name, _, _ in _expert_weights(model):
            found[name] = found[name].split(0, "expert")
    return found


def apply(model: nn.Module, mesh: Mesh) -> None:
    """Swap the dispatch of every routed network."""
    group = mesh.group("expert")
    if group is None:
        return
    for block in model.modules():
        if isinstance(block, Routed):
            block.dispatch = Exchange(block.dispatch, group)


class Exchange:
    """Sorts by expert as on one process, then sends each expert's rows to the rank that holds it."""

    def __init__(self, local: Dispatch, group: ProcessGroup) -> None:
        self.local, self.group = local, group
        self.num_ranks = dist.get_world_size(group)

    def send(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """See `Dispatch.send`: rows of all ranks of the group, for the experts held here."""
        x_RD, counts_E, local_back = self.local.send(x_TD, routing)
        sent_NH = counts_E.view(self.num_ranks, -1).contiguous()
        received_NH = torch.empty_like(sent_NH)
        dist.all_to_all_single(received_NH, sent_NH, group=self.group)
        sent = sizes_of(sent_NH.sum(1), x_RD.shape[0])
        received = sizes_of(received_NH.sum(1), x_RD.shape[0])
        # A token may be denied some of its choices. Rows of no expert lie last and go nowhere.
        num_denied = x_RD.shape[0] - sum(sent)
        arrived_SD = exchange_rows(x_RD[: sum(sent)], sent, received, self.group)
        # They lie rank by rank, and by expert within a rank.
        num_held = received_NH.shape[1]
        experts_S = torch.arange(num_held, device=x_RD.device).repeat(self.num_ranks)
        experts_S = experts_S.repeat_interleave(received_NH.flatten(), output_size=sum(received))
        order_S = experts_S.argsort(stable=True)
        places_S = torch.empty_like(order_S)
        places_S[order_S] = torch.arange(len(order_S), device=x_RD.device)

        def back(y_SD: Tensor) -> Tensor:
            by_rank_SD = copy_rows(y_SD, places_S, order_S[:, None])
            returned_RD = exchange_rows(by_rank_SD, received, sent, self.group)
            return local_back(F.pad(returned_RD, (0, 0, 0, num_denied)) if num_denied else returned_RD)

        return copy_rows(arrived_SD, order_S, places_S[:, None]), received_NH.sum(0), back


def _expert_weights(model: nn.Module) -> list[tuple[str, Block, str]]:
    return [found for found in named_weights(model) if found[1].axes[found[2]][0] == EXPERTS]
