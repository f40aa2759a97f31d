"""What `benchmarks/blocks.py` times side by side is the same function, and MLA's bytes are counted."""

from __future__ import annotations

import pytest
import torch

from benchmarks.blocks import MIXERS, latent, main, one_by_one
from surefoot.models.initialise import initialise
from surefoot.ops.documents import Documents


@pytest.mark.parametrize("name", MIXERS)
def test_blocks_and_single_positions_are_one_function(name: str) -> None:
    mixer = MIXERS[name].build(width=32, output_scale=1.0).double()
    initialise(mixer, 0)
    x_BLD, docs = torch.randn(1, 80, 32, dtype=torch.float64), Documents(None, 80)
    in_blocks = mixer(x_BLD, docs)
    with one_by_one():
        single = mixer(x_BLD, docs)
    torch.testing.assert_close(single, in_blocks, rtol=1e-9, atol=1e-10)
    assert not torch.equal(single, in_blocks), "the same path was timed twice"


def test_mla_decodes_from_the_latent() -> None:
    assert all(holds for _, _, holds in latent(1))


def test_what_is_asked_for_wrongly(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in ((["nothing"], "is none of experts, mixers, latent"), (["--rounds", "0"], "at least 1")):
        with pytest.raises(SystemExit):
            main(arguments)
        assert said in capsys.readouterr().err
