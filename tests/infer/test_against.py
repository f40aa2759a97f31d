"""An export is what transformers reads, and the check of it notices another model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from surefoot.checkpoint.hub import open_published, read_published
from surefoot.config import CheckpointError
from surefoot.infer.against import Probe, compare
from surefoot.models.decoder import DecoderConfig
from surefoot.models.hf.family import family_of
from surefoot.ops.documents import Documents

REFS = Path(__file__).parents[1] / "refs"


class Double(TorchFunctionMode):
    """Every cast to fp32 becomes one to fp64. Models of transformers hold many: in norms, softmaxes, positions, states."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widened(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(widened, args), **{key: widened(value) for key, value in (kwargs or {}).items()})


@pytest.mark.parametrize("name", sorted(path.name for path in REFS.iterdir()))
def test_transformers_finds_the_same_model_and_no_other(name: str) -> None:
    pytest.importorskip("transformers")
    published = open_published(REFS / name)
    family = family_of(published.settings, name)
    config = family.model(published.settings, name)
    weights = read_published(published, family, config, torch.float32)
    assert "the same in transformers" in compare(REFS / name, config, weights)
    one = "layers.1.norm_ffn.scale" if isinstance(config, DecoderConfig) else "text.layers.1.norm_ffn.scale"
    weights[one] = weights[one] * 1.01
    with pytest.raises(CheckpointError, match="other logits"):
        compare(REFS / name, config, weights)


@pytest.mark.parametrize("name", sorted(path.name for path in REFS.iterdir()))
def test_both_compute_the_same_numbers_in_fp64(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    published = open_published(REFS / name)
    family = family_of(published.settings, name)
    config = family.model(published.settings, name)
    ours = config.build().double()
    # A tied head is not among the weights.
    ours.load_state_dict(read_published(published, family, config, torch.float64), strict=False)
    probe = Probe(config, 70, torch.float64, seed=1)
    tokens_BL, seeing = probe.tokens_BL, probe.seeing(ours)
    is_text = isinstance(config, DecoderConfig)
    kind = transformers.AutoModelForCausalLM if is_text else transformers.AutoModelForImageTextToText
    with Double():
        theirs = kind.from_pretrained(
            REFS / name, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        wanted_BLV = theirs(tokens_BL, **probe.theirs(tokens_BL.shape[1])).logits
    found_BLV = seeing.logits(seeing(tokens_BL, Documents(None, tokens_BL.shape[1], device=tokens_BL.device)))
    assert wanted_BLV.dtype == found_BLV.dtype == torch.float64
    assert (found_BLV - wanted_BLV).abs().max() < 1e-9
    found_BLV.square().mean().backward()
    with Double():
        wanted_BLV.square().mean().backward()
    embedding_VD = theirs.get_input_embeddings().weight.grad
    assert (seeing.embedding.weight.grad - embedding_VD).abs().max() < 1e-9 * (1 + embedding_VD.abs().max())
