"""Layouts against one process with every kind of narrow product: gradients, and what the meter sees."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
import torch
from torch import Tensor

from surefoot.blocks.ffn.moe import MoEConfig
from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.config import ConfigError
from surefoot.dist.mesh import DATA, own_mesh
from surefoot.dist.pool import Pool
from surefoot.models.decoder import DecoderConfig
from surefoot.parallel.apply import check, lay_out
from surefoot.parallel.plan import Plan
from surefoot.parallel.recompute import RecomputeConfig
from surefoot.precision.kinds import Name
from surefoot.precision.policy import PrecisionConfig
from surefoot.train.agree import Ranks
from tests.spread import spread

BATCH, LENGTH = 8, 128
PLANS = [
    Plan(tensor=2),
    Plan(tensor=4),
    Plan(context=2),
    Plan(context=2, context_kind="ulysses", tensor=2),
    Plan(replicate=2, tensor=2),
    Plan(shard=2, zero=1),
    Plan(shard=4, tensor=2),
    Plan(pipeline=2, shard=2),
    Plan(shard=2, context=2, context_kind="ring", tensor=2),
    Plan(recompute=RecomputeConfig(mode="selective"), tensor=2),
    Plan(recompute=RecomputeConfig(mode="full"), shard=2, zero=3),
]
EACH = get_args(Name)


def decoder(**changes: object) -> DecoderConfig:
    values = {
        "vocab_size": 61,
        "width": 128,
        "depth": 2,
        "mixer": AttentionConfig(num_heads=4, num_kv_heads=4, head_size=32),
        "ffn": SwiGLUConfig(hidden=128),
        **changes,
    }
    return DecoderConfig(**values)


def narrow(name: Name) -> PrecisionConfig:
    tile = {"tile": 32} if name == "blockwise" else {}
    return PrecisionConfig(compute="fp64", products=name, keep_first=0, keep_last=0, **tile)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens_BL, targets_BL = (torch.randint(61, (BATCH, LENGTH), generator=generator) for _ in range(2))
    return tokens_BL, targets_BL, (torch.rand(BATCH, LENGTH, generator=generator) < 0.05).long().cumsum(1)


Seen = tuple[float, dict[str, float], dict[str, tuple[object, Tensor]]]


def seen(plan: Plan, config: DecoderConfig, precision: PrecisionConfig) -> Seen | None:
    """The second pass (the first fills delayed histories): loss, largest magnitudes, and this rank's parts of gradients.

    Every rank's micro-batches are those of one process that has as many: where scales are of what a pass holds, they say
    which samples share one.
    """
    mesh = own_mesh(plan.grid)
    if mesh is None:
        return None
    check(plan, config, LENGTH, precision)
    laid = lay_out(
        plan,
        config,
        mesh,
        sequence_length=LENGTH,
        dtype=torch.float64,
        device=torch.device("cpu"),
        seed=0,
        precision=precision,
    )
    ranks = Ranks(mesh, torch.device("cpu"))
    size, index = BATCH // 2 // plan.num_data_ranks, mesh.index(*DATA)
    micro_batches = [
        tuple(half[index * size :][:size] for half in halves)
        for halves in zip(*(t.chunk(2) for t in batch()), strict=True)
    ]
    assert laid.meter is not None
    for _ in range(2):
        for local in laid.locals:
            local.part.grad = local.weight.grad = None
        sums = ranks.sums(*laid.accumulate(micro_batches, BATCH * LENGTH, torch.float64))
        found = ranks.end_step(laid.meter)
    gradients = {
        local.name: (local.layout.box(mesh.grid, mesh.coordinates), local.part.grad.clone()) for local in laid.locals
    }
    return sums[0], {name: row["amax"] for name, row in found.items()}, gradients


ONE: dict[str, Seen] = {}


def assert_same(pool: Pool, plan: Plan, config: DecoderConfig, precision: PrecisionConfig) -> None:
    key = repr((config, precision))
    if key not in ONE:
        one = seen(Plan(), config, precision)
        assert one is not None
        ONE[key] = one
    loss, amaxes, gradients = ONE[key]
    for found in pool.run(seen, plan, config, precision):
        if found is None:
            continue
        # The largest of the same fp64 numbers, which differ by a few units in the last place, in fp32.
        assert found[1] == pytest.approx(amaxes, rel=2**-22), "largest magnitudes"
        assert found[0] == pytest.approx(loss, rel=1e-12)
        for name, (box, gradient) in found[2].items():
            expected = gradients[name][1][box.slices]
            error = float((gradient - expected).norm() / expected.norm().clamp_min(1e-300))
            assert error < 1e-11, f"gradient of {name} is off by {error:.1e}"


@pytest.mark.parametrize(("plan", "name"), spread(itertools.product(PLANS, EACH), 5))
def test_layouts_share_scales(pool: Pool, plan: Plan, name: Name) -> None:
    assert_same(pool, plan, decoder(), narrow(name))


EXPERT_PLANS = [
    Plan(tensor=2),
    Plan(shard=2),
    Plan(context=2),
    Plan(shard=2, tensor=2),
    Plan(expert=2, zero=1),
    Plan(expert=2, replicate=2, tensor=2),
    Plan(expert=2, shard=2, recompute=RecomputeConfig(mode="full")),
]
WITH_EXPERTS = ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"]


@pytest.mark.parametrize(("plan", "name"), spread(itertools.product(EXPERT_PLANS, WITH_EXPERTS), 4))
def test_layouts_share_scales_of_experts(pool: Pool, plan: Plan, name: Name) -> None:
    ffn = MoEConfig(num_experts=4, top_k=2, hidden=64, shared_hidden=64)
    assert_same(pool, plan, decoder(ffn=ffn), narrow(name))


def test_a_scale_of_one_rank_alone_would_be_seen(pool: Pool) -> None:
    """The comparison is no use unless it fails without the maximum over ranks: a scale that is a power of two too small or
    large alters only what is near the ends of the format."""
    config, precision = decoder(), narrow("rowwise")
    one = seen(Plan(), config, precision)
    assert one is not None
    errors = [
        float((gradient - one[2][name][1][box.slices]).norm() / one[2][name][1][box.slices].norm())
        for found in pool.run(seen_alone, Plan(tensor=2), config, precision)
        if found is not None
        for name, (box, gradient) in found[2].items()
    ]
    assert max(errors) > 1e-8


def seen_alone(plan: Plan, config: DecoderConfig, precision: PrecisionConfig) -> Seen | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("surefoot.parallel.apply.max_", lambda amax, _group: amax)
        return seen(plan, config, precision)


@pytest.mark.parametrize(
    ("plan", "values", "words"),
    [
        (Plan(), {"products": "rowwise"}, ("precision.products: 'rowwise'", "of 2")),
        (Plan(), {"products": "mxfp8", "keep_first": 0, "keep_layers": (2,)}, ("precision.keep_layers: 2",)),
        (Plan(tensor=2), {"products": "blockwise", "keep_first": 0}, ("plan.tensor: 2", "smaller precision.tile")),
        (Plan(context=2), {"products": "blockwise", "keep_first": 0}, ("precision.products", "plan.context 2")),
    ],
)  # fmt: skip
def test_refused_before_any_process_group(plan: Plan, values: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        check(plan, decoder(), LENGTH, PrecisionConfig(**values))
    assert all(word in str(error.value) for word in words)
