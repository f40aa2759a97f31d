"""Norm, clipping, update ratio and the optimizers' updates are those of one process, whatever holds which part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from surefoot.dist.layout import Box, Layout, Place
from surefoot.dist.mesh import AXES, Grid, own_mesh
from surefoot.dist.pool import Pool
from surefoot.models.initialise import generator_for
from surefoot.optim.adamw import AdamWConfig
from surefoot.optim.base import OptimizerConfig, Param
from surefoot.optim.clip import clip_, global_norm, gradient_norm
from surefoot.optim.exchange import Exchange, balanced
from surefoot.optim.muon import MuonConfig
from surefoot.optim.update import UpdateMeter

# name -> (shape, axes, dimension that tensor parallelism cuts)
WEIGHTS: dict[str, tuple[tuple[int, ...], tuple[str, ...], int | None]] = {
    "embedding": ((13, 8), ("vocab", "embed"), 0),
    "wq": ((8, 8), ("heads", "embed"), 0),
    "wo": ((8, 8), ("embed", "heads"), 1),
    "gate": ((12, 8), ("ffn", "embed"), 0),
    "down": ((8, 12), ("embed", "ffn"), 1),
    "plain": ((6, 8), ("latent", "embed"), None),
    "experts": ((4, 6, 8), ("experts", "ffn", "embed"), None),
    "scale": ((8,), ("embed",), None),
}


class Outcome(NamedTuple):
    norm: float
    coefficient: float
    ratios: dict[str, float]
    parts: dict[str, tuple[Box, Tensor]]


def full(name: str, what: str, step: int = 0) -> Tensor:
    return torch.randn(WEIGHTS[name][0], generator=generator_for(step, f"{name}/{what}"), dtype=torch.float64)


def train(sizes: dict[str, int], shards: bool, config: OptimizerConfig) -> Outcome | None:
    """Three steps on given gradients."""
    mesh = own_mesh(Grid(sizes))
    if mesh is None:
        return None
    params = []
    for name, (shape, axes, dim) in WEIGHTS.items():
        layout = Layout(shape) if dim is None else Layout(shape).split(dim, "tensor")
        place = Place(layout.split(0, "shard", "context") if shards else layout, mesh)
        params.append(Param(name, full(name, "weight")[place.box.slices].clone(), axes, place))
    world = mesh.group(*AXES)
    optimizer, meter = config.build(params), UpdateMeter(params, group=world)
    norm, coefficient, ratios = torch.zeros(()), 1.0, {}
    for step in range(3):
        for param in params:
            assert param.place is not None
            param.tensor.grad = full(param.name, "gradient", step)[param.place.box.slices].clone()
        norm = global_norm(params, world)
        coefficient = clip_([p.tensor.grad for p in params if p.tensor.grad is not None], norm, 3.0)
        meter.before()
        optimizer.step(0.5)
        ratios = meter.after()
    assert all(param.place is not None for param in params)
    return Outcome(
        float(norm), coefficient, ratios, {p.name: (p.place.box, p.tensor) for p in params if p.place is not None}
    )


def whole(outcomes: Sequence[Outcome | None]) -> dict[str, Tensor]:
    found = {name: torch.full(shape, float("nan"), dtype=torch.float64) for name, (shape, _, _) in WEIGHTS.items()}
    for outcome in outcomes:
        for name, (box, part) in (outcome.parts if outcome else {}).items():
            there = found[name][box.slices]
            if part.numel() and not there.isnan().all():
                assert torch.equal(there, part), f"copies of {name} differ"
            found[name][box.slices] = part
    return found


@pytest.mark.parametrize(
    ("sizes", "shards"),
    [
        ({"replicate": 2}, False),
        ({"shard": 2}, True),
        ({"shard": 8}, True),
        ({"tensor": 2}, False),
        ({"tensor": 4}, False),
        ({"tensor": 2, "shard": 3}, True),
        ({"tensor": 2, "context": 2, "shard": 2}, True),
        ({"tensor": 2, "replicate": 2, "shard": 2}, True),
        ({"replicate": 2, "tensor": 2}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "config",
    [MuonConfig(lr=0.1), MuonConfig(lr=0.1, scaling="spectral"), AdamWConfig(lr=0.1)],
    ids=["muon", "spectral", "adamw"],
)
def test_updates_are_those_of_one_process(
    pool: Pool, sizes: dict[str, int], shards: bool, config: OptimizerConfig
) -> None:
    expected = train({}, False, config)
    outcomes = pool.run(train, sizes, shards, config)
    assert expected is not None
    found, reference = whole(outcomes), whole([expected])
    for name, value in reference.items():
        assert not found[name].isnan().any(), name
        torch.testing.assert_close(
            found[name], value, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )
    present = [outcome for outcome in outcomes if outcome is not None]
    assert len({(outcome.norm, outcome.coefficient) for outcome in present}) == 1, "ranks disagree"
    assert present[0].norm == pytest.approx(expected.norm, rel=1e-12)
    assert present[0].coefficient == pytest.approx(expected.coefficient, rel=1e-12)
    for role, ratio in expected.ratios.items():
        assert present[0].ratios[role] == pytest.approx(ratio, rel=1e-9)


def events_of(num_matrices: int) -> tuple[list[str], bool] | None:
    """What a rank does of an exchange in which updates double their matrices, and whether its parts came back doubled."""
    mesh = own_mesh(Grid({"shard": 2}))
    if mesh is None:
        return None
    place = Place(Layout((4, 3)).split(0, "shard"), mesh)
    parts = [torch.full((2, 3), float(number)) for number in range(num_matrices)]
    seen: list[str] = []
    started = torch.distributed.all_to_all_single

    def start(*arguments: Any, **options: Any) -> Any:
        seen.append("start")
        return started(*arguments, **options)

    def update(matrices: list[Tensor]) -> list[Tensor]:
        seen.append(f"work on {len(matrices)}")
        return [2 * matrix for matrix in matrices]

    torch.distributed.all_to_all_single = start
    try:
        exchange = Exchange(mesh, [place] * num_matrices, [1.0] * num_matrices)
        found = exchange.apply(parts, update, meanwhile=lambda: seen.append("meanwhile"))
    finally:
        torch.distributed.all_to_all_single = started
    return seen, all(torch.equal(after, 2 * before) for after, before in zip(found, parts, strict=True))


@pytest.mark.parametrize(
    ("num_matrices", "expected"),
    [
        (1, {"start, meanwhile, work on 1, start", "start, meanwhile, work on 0, start"}),
        (4, {"start, meanwhile, start, work on 1, start, work on 1, start"}),
        (
            16,
            {
                "start, meanwhile, start, work on 2, start, start, work on 2, start, start, work on 2, start, work on 2, start",
            },
        ),
    ],
)
def test_the_next_matrices_travel_while_the_last_are_worked_on(
    pool: Pool, num_matrices: int, expected: set[str]
) -> None:
    found = [outcome for outcome in pool.run(events_of, num_matrices) if outcome is not None]
    assert {", ".join(seen) for seen, _ in found} == expected
    assert all(are_doubled for _, are_doubled in found)


def test_the_norm_of_known_numbers(pool: Pool) -> None:
    """One in every entry: the norm is the root of the number of entries, however many copies there are."""
    for sizes in ({}, {"replicate": 2, "tensor": 2}, {"tensor": 2, "shard": 4}):
        norms = pool.run(_norm_of_ones, sizes)
        total = sum(torch.Size(shape).numel() for shape, _, _ in WEIGHTS.values())
        found = {norm for norm in norms if norm is not None}
        assert len(found) == 1
        assert found.pop() == pytest.approx(total**0.5, rel=1e-15)


def _norm_of_ones(sizes: dict[str, int]) -> float | None:
    mesh = own_mesh(Grid(sizes))
    if mesh is None:
        return None
    params = []
    for name, (shape, axes, dim) in WEIGHTS.items():
        layout = (Layout(shape) if dim is None else Layout(shape).split(dim, "tensor")).split(0, "shard", "context")
        place = Place(layout, mesh)
        tensor = torch.zeros(place.box.shape, dtype=torch.float64)
        tensor.grad = torch.ones_like(tensor)
        params.append(Param(name, tensor, axes, place))
    return float(global_norm(params, mesh.group(*AXES)))


def test_one_process_has_the_plain_norm() -> None:
    tensor = torch.zeros(5)
    tensor.grad = torch.arange(5.0)
    assert global_norm([Param("w", tensor, ("embed",))], None) == gradient_norm([tensor.grad])


def test_work_is_shared_out() -> None:
    assert balanced([1, 1, 1, 1], 2) == [0, 1, 0, 1]
    assert balanced([5, 1, 1, 1, 1, 1], 2) == [0, 1, 1, 1, 1, 1]
    costs = [float((7 * k) % 11 + 1) for k in range(40)]
    owners = balanced(costs, 8)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(8)]
    assert max(loads) - min(loads) <= max(costs)
