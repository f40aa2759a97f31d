"""An outlier in a weight raises a counter in every layout and leaves the loss a number; narrow losses stay near fp32's."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from surefoot.dist.mesh import DATA, own_mesh
from surefoot.dist.pool import Pool
from surefoot.parallel.apply import lay_out
from surefoot.parallel.plan import Plan
from surefoot.precision.kinds import Name
from surefoot.precision.policy import PrecisionConfig
from surefoot.train.agree import Ranks
from tests.precision.test_narrow_layouts import BATCH, LENGTH, batch, decoder
from tests.spread import spread

WEIGHT, OUTLIER = "layers.1.ffn.w_up", 1e5
FP8 = [name for name in get_args(Name) if "4" not in name]
Seen = tuple[float, dict[str, float], float, dict[str, float]]


def precision(name: Name, compute: str = "fp64") -> PrecisionConfig:
    tile = {"tile": 32} if name == "blockwise" else {}
    return PrecisionConfig(compute=compute, products=name, keep_first=0, keep_last=0, **tile)


def seen(plan: Plan, config: PrecisionConfig) -> Seen | None:
    """Loss and counters of the weight, as it starts and with one entry far beyond the others."""
    mesh = own_mesh(plan.grid)
    if mesh is None:
        return None
    laid = lay_out(
        plan,
        decoder(),
        mesh,
        sequence_length=LENGTH,
        dtype=config.weight_dtype,
        device=torch.device("cpu"),
        seed=0,
        precision=config,
    )
    ranks, meter = Ranks(mesh, torch.device("cpu")), laid.meter
    assert meter is not None
    size = BATCH // plan.num_data_ranks
    own = slice(mesh.index(*DATA) * size, (mesh.index(*DATA) + 1) * size)

    def step() -> tuple[float, dict[str, float]]:
        for local in laid.locals:
            local.part.grad = local.weight.grad = None
        micro_batch = tuple(tensor[own] for tensor in batch())
        sums = ranks.sums(*laid.accumulate([micro_batch], BATCH * LENGTH, config.compute_dtype))
        return sums[0] / (BATCH * LENGTH), ranks.end_step(meter)[f"{WEIGHT}/weight"]

    step()  # fills delayed histories
    calm_loss, calm = step()
    for local in laid.locals:
        if local.name == WEIGHT:
            box = local.layout.box(mesh.grid, mesh.coordinates)
            if all(start == 0 and extent for start, extent in zip(box.offset, box.shape, strict=True)):
                local.part.detach()[0, 0] = OUTLIER
    laid.after_step()
    return calm_loss, calm, *step()


CASES = [(plan, name) for plan in (Plan(tensor=2), Plan(shard=2), Plan(shard=2, zero=1)) for name in FP8]


@pytest.mark.parametrize(("plan", "name"), spread(CASES, 4))
def test_an_outlier_raises_a_counter_and_no_nan(pool: Pool, plan: Plan, name: Name) -> None:
    one = seen(Plan(), precision(name))
    assert one is not None
    _, calm, loss, found = one
    # Where scales look back the outlier saturates; where they follow it, what shares its scale vanishes beside it.
    counter = "saturated" if name == "delayed" else "underflowed"
    assert found[counter] > calm[counter]
    assert found["amax"] == pytest.approx(max(calm["amax"], OUTLIER) if name != "delayed" else OUTLIER)
    assert math.isfinite(loss)
    for other in pool.run(seen, plan, precision(name)):
        if other is not None:
            assert other[2] == pytest.approx(loss, rel=1e-11)
            # Underflow is counted on a sample of entries, of which each rank takes its own.
            exact = {key: value for key, value in found.items() if key != "underflowed"}
            assert {key: other[3][key] for key in exact} == pytest.approx(exact, rel=2**-22)
            assert other[3][counter] > other[1][counter]


@pytest.mark.parametrize("name", FP8)
def test_the_loss_is_within_half_a_percent_of_fp32(name: Name) -> None:
    narrow = seen(Plan(), precision(name, "bf16"))
    exact = seen(Plan(), precision(name))
    plain = reference_loss()
    assert narrow is not None
    assert exact is not None
    assert 0 < abs(narrow[0] - plain) < 5e-3 * plain
    assert 0 < abs(exact[0] - plain) < 5e-3 * plain


def reference_loss() -> float:
    mesh = own_mesh(Plan().grid)
    assert mesh is not None
    laid = lay_out(
        Plan(), decoder(), mesh, sequence_length=LENGTH, dtype=torch.float32, device=torch.device("cpu"), seed=0
    )
    return laid.accumulate([batch()], BATCH * LENGTH, torch.float32)[0] / (BATCH * LENGTH)
