"""The architectures that are set side by side cost the same to train, and their table says what they cost to serve."""

from __future__ import annotations

import pytest

from benchmarks.architectures import NAMES, table
from surefoot.models.count import build_meta, flops_per_token
from surefoot.recipes.find import shipped


@pytest.mark.parametrize("name", NAMES)
def test_training_flops_are_equal(name: str) -> None:
    flops = [flops_per_token(build_meta(shipped()[each]().model), 256)["causal"] for each in (name, "quickstart")]
    assert flops[0] == pytest.approx(flops[1], rel=0.005)


def test_the_table_has_a_row_for_each() -> None:
    text = table({"quickstart": [1.5, 1.6], "quickstart-mla": [1.5, 1.7]}, 10)
    assert "| quickstart | 1.5500 ± 0.0500 |" in text
    assert "| quickstart-mla | 1.6000 ± 0.1000 |" in text
    assert "8,388,608 | 2,048 |" in text  # 4 layers x 2 x 128 x 2 bytes, times 4,096
