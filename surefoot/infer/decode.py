"""Decoding measured: milliseconds a token and bytes held, against the context. Legend: B batch, L length."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from surefoot.infer.states import stored_bytes
from surefoot.models.decoder import Decoder, DecoderConfig
from surefoot.models.initialise import initialise
from surefoot.ops.documents import Documents

CHUNK = 512
"""Tokens that fill the context at once: few enough that a long context needs no more memory than its state."""


@dataclass(frozen=True)
class Decoding:
    """One context: the median and the range of seconds a step of `batch` tokens took, and the bytes of all states.

    `state_bytes` is what their storages hold, `formula_bytes` what the mixers say they would.
    """

    context: int
    batch: int
    seconds: float
    fastest: float
    slowest: float
    state_bytes: int
    formula_bytes: int


@torch.no_grad()
def measure(
    config: DecoderConfig,
    contexts: Sequence[int],
    batch: int,
    num_steps: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    announce: Callable[[str], None],
) -> Iterator[Decoding]:
    """Fill each context with random tokens and decode `num_steps` more. Weights are drawn, for speed does not depend on them."""
    model = config.build()
    initialise(model, 0)
    model.to(device, dtype)
    generator = torch.Generator().manual_seed(0)
    for context in contexts:
        length = context + num_steps
        tokens_BL = torch.randint(config.vocab_size, (batch, length), generator=generator).to(device)
        states = model.new_states(batch, length, dtype)
        for start in range(0, context, CHUNK):
            announce(f"filling {start:,} of {context:,}")
            _step(model, tokens_BL[:, start : min(start + CHUNK, context)], start, states, dtype)
        announce(f"decoding after {context:,}")
        seconds = []
        for position in range(context, length):
            begin = time.perf_counter()
            _step(model, tokens_BL[:, position : position + 1], position, states, dtype)
            seconds.append(time.perf_counter() - begin)
        formula = batch * sum(mixer.state_bytes(length, dtype) for mixer in model.mixers())
        yield Decoding(
            context, batch, statistics.median(seconds), min(seconds), max(seconds), stored_bytes(states), formula
        )


def _step(model: Decoder, tokens_BL: torch.Tensor, start: int, states: object, dtype: torch.dtype) -> None:
    docs = Documents(None, tokens_BL.shape[1], start=start, device=tokens_BL.device)
    hidden_BLD = model(tokens_BL, docs, states, dtype=dtype)
    model.logits(hidden_BLD[:, -1]).argmax(-1).tolist()  # waits for the device
