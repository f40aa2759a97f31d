"""Routers of a model, seen together: what their losses add, what they chose, and how they adapt after a step.

Legend: E experts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from surefoot.blocks.base import Counts, Router


def routers(model: nn.Module) -> list[Router]:
    """In the order of layers; those of layers that lie on other ranks are on meta."""
    return [module for module in model.modules() if isinstance(module, Router)]


def takes_whole_step(model: nn.Module) -> bool:
    """Whether the loss of any of them is of the choices of a whole step."""
    return any(router.whole_step for router in routers(model))


@contextmanager
def counted_ahead(model: nn.Module, count: Callable[[], object], pool: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Around the passes of a step: what `count`, passes of the same tokens without gradients, chose, in all `pool`ed."""
    own = [router for router in routers(model) if router.whole_step and not router.loads_E.is_meta]
    for router in own:
        router.is_counting, router.step_counts = True, None
    try:
        count()
        if own:
            sizes = [router.num_experts + len(router.noted_N) for router in own]
            pooled = pool(torch.cat([_counted(router) for router in own]))
            for router, counts in zip(own, pooled.split(sizes), strict=True):
                router.is_counting, router.step_counts = False, counts
        yield
    finally:
        for router in own:
            router.is_counting, router.step_counts = False, None


def _counted(router: Router) -> Tensor:
    """What passes without gradients counted ahead; 0 where they did not come by."""
    if router.step_counts is None:
        return torch.cat((router.loads_E, router.noted_N)).zero_()
    return router.step_counts


def take_auxiliary(model: nn.Module) -> Tensor | None:
    """The auxiliary losses of the last forward pass, summed over tokens and layers; None where there are none.

    To be called once after every forward pass that is to be trained on: it counts what was chosen, too.
    """
    taken = [auxiliary for router in routers(model) if (auxiliary := router.take()) is not None]
    return torch.stack(taken).sum() if taken else None


def drain(model: nn.Module) -> list[float]:
    """What was counted since the last call, as numbers to be added up over ranks: of each router its loads, what it noted,
    choices dropped, and its losses.

    A router that lies on another rank counted nothing here.
    """
    found = routers(model)
    sums = [0.0] * sum(router.num_counts for router in found)
    here = [router for router in found if not router.loads_E.is_meta]
    if here:
        counted = torch.cat(
            [
                torch.cat((r.loads_E.double(), r.noted_N.double(), torch.stack((r.dropped, r.auxiliary)).double()))
                for r in here
            ]
        ).tolist()
        places = [place for router, run in zip(found, _places(found), strict=True) if router in here for place in run]
        for place, number in zip(places, counted, strict=True):
            sums[place] = number
        forget(model)
    return sums


def forget(model: nn.Module) -> None:
    """Count from 0 again."""
    for router in routers(model):
        for counted in (router.loads_E, router.noted_N, router.dropped, router.auxiliary):
            counted.zero_()


def balance(model: nn.Module, sums: Sequence[float]) -> None:
    """After an optimizer step: let each router adapt to what the whole step chose (`drain`, added up over ranks)."""
    for router, numbers in zip(routers(model), _parts(model, sums), strict=True):
        if not router.loads_E.is_meta:
            counted = torch.tensor(numbers[:-2], dtype=torch.float64, device=router.loads_E.device)
            router.balance(Counts(counted[: router.num_experts], counted[router.num_experts :]))


def statistics(model: nn.Module, sums: Sequence[float], num_tokens: int) -> dict[str, float]:
    """How a step's loads lie: empty for a model without routers.

    load_entropy: of the experts' shares over its maximum, the mean over layers (1: even); max_load_share: the largest
    share of a layer's choices that one expert had; dead_experts: how many in all layers no token chose; dropped_share: of
    all choices those that were not carried out, since their expert was full; auxiliary_loss: what the routers' losses add
    to the objective, on its scale.
    """
    parts = _parts(model, sums)
    if not parts:
        return {}
    entropies, peaks, dead, losses, chosen, dropped = [], [], 0, 0.0, 0.0, 0.0
    for router, numbers in zip(routers(model), parts, strict=True):
        loads, auxiliary = numbers[: router.num_experts], numbers[-1]
        chosen, dropped = chosen + sum(loads), dropped + numbers[-2]
        total = max(1.0, sum(loads))
        shares = [load / total for load in loads if load]
        most = math.log(len(loads)) or 1.0
        entropies.append(-sum(share * math.log(share) for share in shares) / most)
        peaks.append(max(loads) / total)
        dead += loads.count(0.0)
        losses += auxiliary
    return {
        "load_entropy": sum(entropies) / len(entropies),
        "max_load_share": max(peaks),
        "dead_experts": float(dead),
        "dropped_share": dropped / max(1.0, chosen),
        "auxiliary_loss": losses / num_tokens,
    }


def _parts(model: nn.Module, sums: Sequence[float]) -> list[list[float]]:
    """The numbers of each router."""
    return [[sums[place] for place in run] for run in _places(routers(model))]


def _places(found: Sequence[Router]) -> list[range]:
    """Where the numbers of each router are among those of all."""
    stops = list(itertools.accumulate(router.num_counts for router in found))
    return [range(stop - router.num_counts, stop) for router, stop in zip(found, stops, strict=True)]
