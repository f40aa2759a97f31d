"""Every block's matrices are narrow where they are said to be, and a pass that is run again counts nothing twice."""

from __future__ import annotations

import pytest
import torch

from surefoot.dist.mesh import Mesh
from surefoot.models.decoder import DecoderConfig
from surefoot.parallel.apply import lay_out
from surefoot.parallel.plan import Plan
from surefoot.parallel.recompute import RecomputeConfig
from surefoot.precision.policy import PrecisionConfig
from surefoot.study.contracts import Example, examples_of, find_blocks
from surefoot.train.agree import Ranks
from tests.precision.test_narrow_layouts import LENGTH, batch, decoder, narrow

CPU = torch.device("cpu")


def found(plan: Plan, config: DecoderConfig, precision: PrecisionConfig) -> tuple[list[list[float]], list[str]]:
    """All counts of one training pass, and what the first step says."""
    mesh = Mesh(plan.grid)
    laid = lay_out(
        plan, config, mesh, sequence_length=LENGTH, dtype=torch.float64, device=CPU, seed=0, precision=precision
    )
    assert laid.meter is not None
    tokens_BL, targets_BL, docs_BL = batch()
    laid.accumulate([(tokens_BL[:2], targets_BL[:2], docs_BL[:2])], 2 * LENGTH, torch.float64)
    counts = laid.meter._counts_G5.tolist()
    return counts, laid.meter.describe(Ranks(mesh, CPU).end_step(laid.meter))


EXAMPLES = [example for cls in find_blocks() for example in examples_of(cls)]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_no_matrix_is_silently_wide(example: Example) -> None:
    _, lines = found(Plan(), example.model, narrow("tensorwise"))
    assert len(lines) == 1, lines


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_what_is_run_again_is_counted_once(mode: str) -> None:
    again = Plan(recompute=RecomputeConfig(mode=mode))
    assert found(again, decoder(), narrow("rowwise")) == found(Plan(), decoder(), narrow("rowwise"))
