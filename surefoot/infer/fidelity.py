"""What a narrower cache costs in quality: the loss of a text that is read piece by piece over cached states.

Legend: B batch, L length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.blocks.mixers.cache import NarrowKind
from surefoot.infer.states import narrow, stored_bytes
from surefoot.models.decoder import Decoder
from surefoot.ops.documents import Documents


@dataclass(frozen=True)
class CacheLoss:
    """Nats a token, over `tokens` of them, and the bytes of one batch's states."""

    nll: float
    tokens: int
    state_bytes: int


@torch.no_grad()
def cache_loss(
    model: Decoder, batches_BL: Iterable[Tensor], kind: NarrowKind | None, *, dtype: torch.dtype, piece: int = 16
) -> CacheLoss:
    """Each row one document, `piece` tokens at a time: a token sees its own piece as computed and the rest from the cache.

    `ValueError` where the model keeps no keys or values that could be narrowed.
    """
    nll, count, held = 0.0, 0, 0
    for tokens_BL in batches_BL:
        batch, length = tokens_BL.shape
        states = model.new_states(batch, length, dtype)
        if kind is not None and not narrow(states, kind):
            raise ValueError("no layer of this model keeps keys and values, so its states cannot be narrowed")
        hidden = []
        for start in range(0, length, piece):
            part_BL = tokens_BL[:, start : start + piece]
            docs = Documents(None, part_BL.shape[1], start=start, device=tokens_BL.device)
            hidden.append(model(part_BL, docs, states, dtype=dtype))
        logits_BLV = model.logits(torch.cat(hidden, 1)[:, :-1]).float()
        nll += float(F.cross_entropy(logits_BLV.flatten(0, 1), tokens_BL[:, 1:].flatten(), reduction="sum"))
        count += batch * (length - 1)
        held = stored_bytes(states)
    return CacheLoss(nll / count, count, held)
