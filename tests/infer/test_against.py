"""An export is what transformers reads, and the check of it notices another model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from surefoot.checkpoint.hub import open_published, read_published
from surefoot.config import CheckpointError
from surefoot.infer.against import compare
from surefoot.models.hf.family import family_of

REFS = Path(__file__).parents[1] / "refs"


@pytest.mark.parametrize("name", sorted(path.name for path in REFS.iterdir()))
def test_transformers_finds_the_same_model_and_no_other(name: str) -> None:
    pytest.importorskip("transformers")
    published = open_published(REFS / name)
    family = family_of(published.settings, name)
    config = family.decoder(published.settings, name)
    weights = read_published(published, family, config, torch.float32)
    assert "the same in transformers" in compare(REFS / name, config, weights)
    weights["layers.1.norm_ffn.scale"] = weights["layers.1.norm_ffn.scale"] * 1.01
    with pytest.raises(CheckpointError, match="other logits"):
        compare(REFS / name, config, weights)
