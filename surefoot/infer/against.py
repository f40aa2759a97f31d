"""An exported model read by transformers, and compared with the one it was made of (extra `hf`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from surefoot.config import CheckpointError
from surefoot.infer.engine import generate
from surefoot.models.decoder import Decoder, DecoderConfig
from surefoot.ops.documents import Documents

TOLERANCE = 2e-4
"""Of the largest logit's size, in fp32: two orders of summation differ by a hundredth of it."""


@torch.no_grad()
def compare(path: Path, config: DecoderConfig, weights: Mapping[str, Tensor]) -> str:
    """Read a folder back with transformers: names, logits and greedy tokens. Says what was found, or that it is not installed.

    `CheckpointError` where transformers finds another model.
    """
    try:
        import transformers  # noqa: PLC0415 - an extra
    except ImportError:
        return "written; not checked, because transformers is not installed (pip install surefoot[hf])"
    transformers.logging.set_verbosity_error()
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(kind):
            raise CheckpointError(
                f"{path}: transformers reports {kind} {sorted(map(str, info[kind]))[:3]}; report this"
            )
    ours = _built(path, config, weights)
    tokens_BL = torch.randint(config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    own = ours.logits(ours(tokens_BL, Documents(None, 24, device=tokens_BL.device)))
    other = theirs(tokens_BL).logits
    difference = float((own - other).abs().max() / other.abs().max())
    if not difference <= TOLERANCE:
        raise CheckpointError(f"{path}: transformers computes other logits (relative {difference:.1e}); report this")
    prompt = tokens_BL[0, :8].tolist()
    greedy = list(generate(ours, prompt, 16, lambda logits: logits.argmax(-1), dtype=torch.float32))
    scores_LV = theirs(torch.tensor([[*prompt, *greedy]])).logits[0, len(prompt) - 1 : -1]
    short_L = scores_LV.amax(-1) - scores_LV.gather(1, torch.tensor(greedy)[:, None])[:, 0]
    if not float(short_L.max() / scores_LV.abs().max()) <= TOLERANCE:  # of two that are as likely either may come
        raise CheckpointError(f"{path}: transformers would not go on with {greedy}; report this")
    return (
        f"the same in transformers {transformers.__version__}: no key missing or left over, "
        f"logits within {difference:.0e}, 16 greedy tokens equal"
    )


def _built(path: Path, config: DecoderConfig, weights: Mapping[str, Tensor]) -> Decoder:
    model = config.build()
    lacking = model.load_state_dict({name: weight.float() for name, weight in weights.items()}, strict=False)
    if lacking.unexpected_keys or set(lacking.missing_keys) - {"head.weight"}:
        raise CheckpointError(f"{path}: the checkpoint is not of this model ({lacking}); report this")
    return model
