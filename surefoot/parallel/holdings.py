"""What a rank holds in a step beside activations and optimizer state, in closed form: the formulas by which recomputation fits
a device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch.distributed.tensor import DTensor

from surefoot.parallel.plan import Plan
from surefoot.parallel.shard import DataParallel, Local


@dataclass(frozen=True)
class Held:
    """Bytes while the last micro-batch of a step goes backward: weights as they lie, gradients, and what FSDP2 has gathered."""

    parameters: int
    gradients: int
    gathered: int


def held_bytes(plan: Plan, data_parallel: DataParallel, num_micro_batches: int) -> Held:
    """For a model on one pipeline rank.

    Weights that FSDP2 does not hold have whole gradients. Of its own, gradients stay whole over several micro-batches; in the
    last one those of a layer exist beside the parts. Gathered are all weights (ZeRO-2), or what surrounds the layers, which
    stays, and two layers: one computes, the next is fetched.
    """
    sharded = [local for local in data_parallel.everything if isinstance(local.weight, DTensor)]
    others = [local for local in data_parallel.everything if not isinstance(local.weight, DTensor)]
    parameters = _bytes(others) + sum(local.part.nbytes for local in sharded)
    gradients = _bytes(others, of_gradient=True)
    around = [local for local in sharded if not local.name.startswith("layers.")]
    layers: dict[str, list[Local]] = {}
    for local in sharded:
        if local.name.startswith("layers."):
            layers.setdefault(local.name.split(".")[1], []).append(local)
    if num_micro_batches > 1:
        gradients += _bytes(sharded, of_gradient=True)
    else:
        gradients += sum(local.part.numel() * local.types.accumulate.itemsize for local in sharded)
        gradients += _bytes(around, of_gradient=True)
        gradients += max((_bytes(layer, of_gradient=True) for layer in layers.values()), default=0)
    if plan.keeps_weights_cut:
        gathered = _bytes(around) + 2 * max((_bytes(layer) for layer in layers.values()), default=0)
    else:
        gathered = _bytes(sharded)
    return Held(parameters, gradients, gathered)


def _bytes(those: Iterable[Local], *, of_gradient: bool = False) -> int:
    """Of whole weights, as tensor and expert parallelism have cut them, or of their gradients."""
    return sum(
        local.weight.numel() * (local.types.accumulate.itemsize if of_gradient else local.weight.element_size())
        for local in those
    )
