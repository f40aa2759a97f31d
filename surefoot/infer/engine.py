"""Generation: prefill the prompt once, then one token at a time over cached states. Legend: B batch, L length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from surefoot.models.decoder import Decoder
from surefoot.ops.documents import Documents


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: Sequence[int],
    num_tokens: int,
    choose: Callable[[Tensor], Tensor],
    *,
    dtype: torch.dtype,
    end: int | None = None,
    cached: bool = True,
    vocab_size: int | None = None,
) -> Iterator[int]:
    """Yield up to `num_tokens` ids that continue `prompt`, stopping before `end`.

    `choose` turns logits (1, V) into an id (1). Without `cached` every token reads the whole text again: slow, and the
    reference that the cached path must equal. Ids from `vocab_size` up are padding and never chosen.
    """
    if not prompt:
        raise ValueError("the prompt is empty: give at least the document separator")
    device = model.embedding.weight.device
    text = list(prompt)
    states = model.new_states(1, len(prompt) + num_tokens, dtype) if cached else None
    unread = text
    for _ in range(num_tokens):
        tokens_BL = torch.tensor([unread if states is not None else text], device=device)
        start = len(text) - len(unread) if states is not None else 0
        docs = Documents(None, tokens_BL.shape[1], start=start, device=device)
        hidden_BLD = model(tokens_BL, docs, states, dtype=dtype)
        logits_BV = model.logits(hidden_BLD[:, -1])
        chosen = int(choose(logits_BV[:, :vocab_size]))
        if chosen == end:
            return
        yield chosen
        text.append(chosen)
        unread = [chosen]
