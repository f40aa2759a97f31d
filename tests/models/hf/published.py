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
from surefoot.models.multimodal import ModelConfig, Multimodal, Seeing
from surefoot.ops.documents import Documents

REFS = Path(__file__).parents[2] / "refs"
NAMES = sorted(path.name for path in REFS.iterdir())


class Reference(NamedTuple):
    """A published model as we read it, and what is known of it."""

    path: Path
    family: Family
    config: ModelConfig
    model: Decoder | Multimodal
    inputs: dict[str, Tensor]
    stored: dict[str, Tensor]
    meta: dict[str, Any]

    @property
    def tokens_BL(self) -> Tensor:
        return self.inputs["input_ids"]

    def seeing(self, model: Decoder | Multimodal, rows: slice = slice(None)) -> Decoder | Seeing:
        """The model as it reads tokens, with the stored images of those rows before it where it reads images."""
        if isinstance(model, Decoder):
            return model
        images, seen_BLN = self.inputs["pixel_values"], self.inputs.get("image_attention_mask")
        images_BNCYX = images if images.dim() == 5 else images[:, None]
        return model.seeing(images_BNCYX[rows], None if seen_BLN is None else seen_BLN[rows])

    def logits(self, model: Decoder | Multimodal) -> Tensor:
        """Of the stored inputs."""
        seeing = self.seeing(model)
        docs = Documents(None, self.tokens_BL.shape[1], device=self.tokens_BL.device)
        return seeing.logits(seeing(self.tokens_BL, docs))


def reference(name: str, dtype: torch.dtype = torch.float32) -> Reference:
    """By the name of its folder."""
    path = REFS / name
    published = open_published(path)
    family = family_of(published.settings, name)
    config = family.model(published.settings, name)
    return Reference(
        path,
        family,
        config,
        filled(config, read_published(published, family, config, dtype)),
        torch.load(path / "inputs.pt", weights_only=True),
        torch.load(path / "logits.pt", weights_only=True),
        json.loads((path / "meta.json").read_text()),
    )


def filled(config: ModelConfig, weights: dict[str, Tensor]) -> Decoder | Multimodal:
    """The model with these weights, in their dtype; a tied head is not among them."""
    is_text = isinstance(config, DecoderConfig)
    model = config.build().to(weights["embedding.weight" if is_text else "text.embedding.weight"].dtype)
    lacking = model.load_state_dict(weights, strict=False)
    assert not lacking.unexpected_keys
    assert set(lacking.missing_keys) <= ({"head.weight"} if is_text and config.tied else set())
    return model
