"""Recomputation changes no bit of any gradient, counts routers once and keeps as many bytes as it says."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from surefoot.blocks.ffn.moe import MoEConfig
from surefoot.blocks.routers.sigmoid import SigmoidConfig
from surefoot.blocks.routers.topk import TopKConfig
from surefoot.dist.mesh import own_mesh
from surefoot.dist.pool import Pool
from surefoot.models import routing
from surefoot.models.decoder import DecoderConfig
from surefoot.models.routing import routers
from surefoot.parallel.apply import Laid, lay_out
from surefoot.parallel.plan import Plan
from surefoot.parallel.recompute import RecomputeConfig
from tests.parallel.parity import BATCH, LENGTH, decoder, ragged_batch

CPU = torch.device("cpu")
MODES = [
    RecomputeConfig(mode="full"),
    RecomputeConfig(mode="full", every=2),
    RecomputeConfig(mode="selective"),
    RecomputeConfig(mode="budget", budget="300KiB"),
]


def routed(router: TopKConfig | SigmoidConfig | None = None) -> DecoderConfig:
    ffn = MoEConfig(num_experts=6, top_k=2, hidden=12, shared_hidden=8, router=router or TopKConfig(balance_loss=0.3))
    return decoder().model_copy(update={"ffn": ffn})


def laid_out(plan: Plan, config: DecoderConfig, dtype: torch.dtype = torch.float32) -> Laid | None:
    mesh = own_mesh(plan.grid)
    if mesh is None:
        return None
    return lay_out(plan, config, mesh, sequence_length=LENGTH, dtype=dtype, device=CPU, seed=0)


def gradients(
    plan: Plan, config: DecoderConfig, dtype: torch.dtype, compute: torch.dtype
) -> tuple[dict[str, Tensor], list[float]] | None:
    """Of two steps over two or four micro-batches each: the gradients, and what the routers counted."""
    laid = laid_out(plan, config, dtype)
    if laid is None:
        return None
    size = BATCH // plan.num_data_ranks
    first = laid.mesh.index("replicate", "shard", "expert") * size
    own = [tensor[first : first + size] for tensor in ragged_batch(config.vocab_size)]
    micro = list(zip(*(tensor.chunk(4 if plan.pipeline > 1 else 2) for tensor in own), strict=True))
    for _ in range(2):
        laid.accumulate(micro, 100, compute)
    found = {local.name: local.part.grad.clone() for local in laid.locals if local.part.grad is not None}
    assert len(found) == len(laid.locals)
    assert all(router._pending is None for router in routers(laid.model))
    return found, routing.drain(laid.model)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("mode", MODES, ids=RecomputeConfig.describe)
@pytest.mark.parametrize(
    "config", [decoder(), routed(), routed(SigmoidConfig(balance_loss=0.3))], ids=["plain", "softmax", "sigmoid"]
)
def test_no_bit_of_a_gradient_changes(
    config: DecoderConfig, mode: RecomputeConfig, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    expected, found = gradients(Plan(), config, *dtypes), gradients(Plan(recompute=mode), config, *dtypes)
    assert expected is not None
    assert found is not None
    for name, gradient in expected[0].items():
        assert torch.equal(found[0][name], gradient), name
    assert found[1] == expected[1]


PLANS: list[dict[str, Any]] = [
    {"shard": 2, "zero": 1},
    {"shard": 2, "zero": 3},
    {"tensor": 2},
    {"shard": 2, "tensor": 2, "zero": 2},
    {"context": 2},
    {"context": 2, "context_kind": "ring"},
    {"context": 2, "context_kind": "ulysses"},
    {"pipeline": 2},
    {"pipeline": 2, "schedule": "zbv"},
    {"pipeline": 2, "schedule": "interleaved", "shard": 2},
]


@pytest.mark.parametrize("mode", MODES, ids=RecomputeConfig.describe)
@pytest.mark.parametrize("axes", [*PLANS, {"expert": 2}, {"expert": 2, "shard": 2}], ids=str)
@pytest.mark.parametrize("is_routed", [False, True], ids=["plain", "routed"])
def test_no_bit_changes_under_layouts(pool: Pool, axes: dict[str, Any], mode: RecomputeConfig, is_routed: bool) -> None:
    if (mode.mode == "budget" and "pipeline" in axes) or ("expert" in axes and not is_routed):
        return
    config, dtypes = routed() if is_routed else decoder(), (torch.float32, torch.float32)
    expected = pool.run(gradients, Plan(**axes), config, *dtypes)
    found = pool.run(gradients, Plan(**axes, recompute=mode), config, *dtypes)
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert all(torch.equal(other[0][name], gradient) for name, gradient in one[0].items())
            assert other[1] == one[1]


class Alive(TorchDispatchMode):
    """Bytes of the storages that operations made and that are alive, seen from below everything under test."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self.made.setdefault(storage._cdata, (weakref.ref(storage), storage.nbytes()))
        return result
