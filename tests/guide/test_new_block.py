"""The block that docs/guide/new-block.md writes keeps every contract, and the page says truly which one a fault breaks."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from surefoot.blocks.base import MixerConfig
from surefoot.dist.pool import Pool
from surefoot.study.contracts import SINGLE, Example, examples_of, try_on
from surefoot.study.laid_contracts import LAYOUTS, on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "new-block.md"
NAME = "surefoot.blocks.mixers.average"


def source() -> str:
    return "\n\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))


def install(text: str) -> type[MixerConfig]:
    """What the page's file would be, under its name, in this process."""
    module = types.ModuleType(NAME)
    sys.modules[NAME] = module
    exec(compile(text, str(PAGE), "exec"), module.__dict__)
    found: type[MixerConfig] = module.AverageConfig
    return found


def install_on_rank(text: str) -> None:
    install(text)


@pytest.fixture(scope="module")
def example() -> Example:
    (only,) = examples_of(install(source()))
    return only


@pytest.mark.parametrize("contract", SINGLE)
def test_the_block_of_the_page_keeps_every_contract(example: Example, contract: str) -> None:
    finding = try_on(example, SINGLE[contract])
    assert (finding.failure, finding.reason) == (None, None)


def test_layouts_train_it_alike_or_are_refused(example: Example, pool: Pool) -> None:
    pool.run(install_on_rank, source())
    findings = {name: try_on(example, on_ranks(plans, pool)) for name, plans in LAYOUTS.items()}
    assert {name: finding.failure for name, finding in findings.items()} == dict.fromkeys(LAYOUTS)
    assert {name for name, finding in findings.items() if finding.reason} == {"context", "expert"}


def test_the_fault_that_the_page_names_breaks_packing() -> None:
    line = "h_BH = torch.where(is_first_B[:, None], 0, h_BH) * keep_H + v_BH"
    assert line in source()
    real = sys.modules.get(NAME)
    try:
        (broken,) = examples_of(install(source().replace(line, "h_BH = h_BH * keep_H + v_BH")))
        assert "see each other" in (try_on(broken, SINGLE["packing"]).failure or "")
        assert try_on(broken, SINGLE["causal"]).failure is None
    finally:
        if real is not None:
            sys.modules[NAME] = real
