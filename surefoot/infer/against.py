"""An exported model read by transformers, and compared with the one it was made of (extra `hf`)."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from pathlib import Path

import torch
from torch import Tensor

from surefoot.config import CheckpointError
from surefoot.infer.engine import generate
from surefoot.models.decoder import Decoder, DecoderConfig
from surefoot.models.late_fusion import LateFusionConfig
from surefoot.models.multimodal import ModelConfig, Multimodal, Seeing
from surefoot.ops.documents import Documents

TOLERANCE = 2e-4
"""Of the largest logit's size, in fp32: two orders of summation differ by a hundredth of it."""


@torch.no_grad()
def compare(path: Path, config: ModelConfig, weights: Mapping[str, Tensor]) -> str:
    """Read a folder back with transformers: names, logits and greedy tokens. Says what was found, or that it is not installed.

    `CheckpointError` where transformers finds another model.
    """
    try:
        import transformers  # noqa: PLC0415 - an extra
    except ImportError:
        return "written; not checked, because transformers is not installed (pip install surefoot[hf])"
    transformers.logging.set_verbosity_error()
    # Images need a class of their own there.
    kind_of_model = "AutoModelForCausalLM" if isinstance(config, DecoderConfig) else "AutoModelForImageTextToText"
    theirs, info = getattr(transformers, kind_of_model).from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(kind):
            raise CheckpointError(
                f"{path}: transformers reports {kind} {sorted(map(str, info[kind]))[:3]}; report this"
            )
    ours = _built(path, config, weights)
    probe = Probe(config, 24, torch.float32)
    seeing, tokens_BL = probe.seeing(ours), probe.tokens_BL
    own = seeing.logits(seeing(tokens_BL, Documents(None, tokens_BL.shape[1], device=tokens_BL.device)))
    other = theirs(tokens_BL, **probe.theirs(tokens_BL.shape[1])).logits
    difference = float((own - other).abs().max() / other.abs().max())
    if not difference <= TOLERANCE:
        raise CheckpointError(f"{path}: transformers computes other logits (relative {difference:.1e}); report this")
    prompt = tokens_BL[0, :-16].tolist()
    first = probe.row(0)
    greedy = list(generate(first.seeing(ours), prompt, 16, lambda logits: logits.argmax(-1), dtype=torch.float32))
    scores_LV = theirs(torch.tensor([[*prompt, *greedy]]), **first.theirs(len(prompt) + 16)).logits[
        0, len(prompt) - 1 : -1
    ]
    short_L = scores_LV.amax(-1) - scores_LV.gather(1, torch.tensor(greedy)[:, None])[:, 0]
    if not float(short_L.max() / scores_LV.abs().max()) <= TOLERANCE:  # of two that are as likely either may come
        raise CheckpointError(f"{path}: transformers would not go on with {greedy}; report this")
    return (
        f"the same in transformers {transformers.__version__}: no key missing or left over, "
        f"logits within {difference:.0e}, 16 greedy tokens equal"
    )


class Probe:
    """Random tokens, two rows of `length` beside image tokens, and for a model that reads images one image a row."""

    def __init__(self, config: ModelConfig, length: int, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        decoder = config if isinstance(config, DecoderConfig) else config.text
        # From 1: transformers gives the embedding of the padding, 0, no gradient.
        tokens_BL = torch.randint(1, decoder.vocab_size, (2, length), generator=generator)
        self.images: Tensor | None = None
        self.is_flat = isinstance(config, LateFusionConfig)
        if not isinstance(config, DecoderConfig):
            vision = config.vision
            shape = (2, 1, vision.num_channels, vision.image_size, vision.image_size)
            self.images = torch.randn(shape, generator=generator).to(dtype)
        if isinstance(config, LateFusionConfig):
            tokens_BL = torch.where(
                tokens_BL == config.image_token, (config.image_token + 1) % decoder.vocab_size, tokens_BL
            )
            own_BP = torch.full((2, config.num_features), config.image_token)
            tokens_BL = torch.cat((tokens_BL[:, :2], own_BP, tokens_BL[:, 2:]), 1)
        self.tokens_BL = tokens_BL

    def row(self, number: int) -> Probe:
        """One of the rows."""
        one = copy(self)
        one.tokens_BL = self.tokens_BL[number : number + 1]
        one.images = None if self.images is None else self.images[number : number + 1]
        return one

    def seeing(self, model: Decoder | Multimodal) -> Decoder | Seeing:
        """What reads the tokens."""
        if isinstance(model, Decoder):
            return model
        assert self.images is not None
        return model.seeing(self.images)

    def theirs(self, length: int) -> dict[str, Tensor]:
        """What a model of transformers takes beside `length` tokens."""
        if self.images is None:
            return {}
        if self.is_flat:
            return {"pixel_values": self.images.flatten(0, 1)}
        mask_BLN = torch.ones((len(self.images), length, 1), dtype=torch.long)
        return {"pixel_values": self.images, "image_attention_mask": mask_BLN}


def _built(path: Path, config: ModelConfig, weights: Mapping[str, Tensor]) -> Decoder | Multimodal:
    model = config.build()
    lacking = model.load_state_dict({name: weight.float() for name, weight in weights.items()}, strict=False)
    if lacking.unexpected_keys or set(lacking.missing_keys) - {"head.weight", "text.head.weight"}:
        raise CheckpointError(f"{path}: the checkpoint is not of this model ({lacking}); report this")
    return model
