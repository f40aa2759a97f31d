"""The small published models in tests/refs, with the logits, loss, gradients and tokens that transformers 5.23 gave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surefoot.checkpoint.hub import open_published, read_published
from surefoot.models.decoder import Decoder, DecoderConfig
from surefoot.models.hf.family import Family, family_of

REFS = Path(__file__).parents[2] / "refs"
NAMES = sorted(path.name for path in REFS.iterdir())


class Reference(NamedTuple):
    """A published model as we read it, and what is known of it."""

    path: Path
    family: Family
    config: DecoderConfig
    model: Decoder
    tokens_BL: Tensor
    stored: dict[str, Tensor]
    meta: dict[str, Any]


def reference(name: str, dtype: torch.dtype = torch.float32) -> Reference:
    """By the name of its folder."""
    path = REFS / name
    published = open_published(path)
    family = family_of(published.settings, name)
    config = family.decoder(published.settings, name)
    return Reference(
        path,
        family,
        config,
        filled(config, read_published(published, family, config, dtype)),
        torch.load(path / "inputs.pt", weights_only=True)["input_ids"],
        torch.load(path / "logits.pt", weights_only=True),
        json.loads((path / "meta.json").read_text()),
    )


def filled(config: DecoderConfig, weights: dict[str, Tensor]) -> Decoder:
    """The model with these weights, in their dtype; a tied head is not among them."""
    model = config.build().to(weights["embedding.weight"].dtype)
    lacking = model.load_state_dict(weights, strict=False)
    assert not lacking.unexpected_keys
    assert set(lacking.missing_keys) <= ({"head.weight"} if config.tied else set())
    return model
