"""Generation: prefill the prompt once, then one token at a time over cached states. Legend: B batch, L length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from surefoot.models.decoder import Decoder
from surefoot.models.multimodal import Seeing
from surefoot.ops.documents import Documents


@torch.no_grad()
def generate(
    model: Decoder | Seeing,
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


@torch.no_grad()
def generate_batch(
    model: Decoder | Seeing,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    choose: Callable[[Tensor], Tensor],
    *,
    dtype: torch.dtype,
    end: int | None = None,
    vocab_size: int | None = None,
) -> list[list[int]]:
    """Up to `num_tokens` ids after each of several prompts of any lengths, those of a row up to its `end`.

    What all prompts have is read at once; then a row that still has a prompt takes its next id from there and not from
    `choose`. So no row is padded, and every kind of state is that of the row by itself.
    """
    if not prompts or not all(prompts):
        raise ValueError("each prompt needs at least one id: give at least the document separator")
    device = model.embedding.weight.device
    texts = [list(prompt) for prompt in prompts]
    lengths = [len(text) for text in texts]
    states = model.new_states(len(texts), max(lengths) + num_tokens, dtype)
    shortest, start = min(lengths), 0
    unread_BL = torch.tensor([text[:shortest] for text in texts], device=device)
    is_done = [num_tokens == 0] * len(texts)
    while not all(is_done):
        docs = Documents(None, unread_BL.shape[1], start=start, device=device)
        hidden_BLD = model(unread_BL, docs, states, dtype=dtype)
        start += unread_BL.shape[1]
        drawn = choose(model.logits(hidden_BLD[:, -1])[:, :vocab_size]).tolist()
        for row, (text, token) in enumerate(zip(texts, drawn, strict=True)):
            if start < len(text) or is_done[row]:
                continue
            text.append(token)
            is_done[row] = token == end or len(text) == lengths[row] + num_tokens
        # A row that is done goes along with its last id; what comes of it is not looked at.
        unread_BL = torch.tensor([[text[min(start, len(text) - 1)]] for text in texts], device=device)
    return [
        text[length:-1] if num_tokens and text[-1] == end else text[length:]
        for text, length in zip(texts, lengths, strict=True)
    ]
