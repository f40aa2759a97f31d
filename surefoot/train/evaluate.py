"""Evaluation: the exact token-weighted mean over held-out text."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable

import torch

from surefoot.data.dataset import Batch
from surefoot.models.decoder import Decoder
from surefoot.observe.schema import EvaluationReport
from surefoot.train.step import micro_batches


@torch.no_grad()
def evaluate(
    model: Decoder,
    batches: Iterable[Batch],
    *,
    step: int,
    max_batches: int | None,
    micro_batch: int,
    device: torch.device,
    dtype: torch.dtype,
) -> EvaluationReport:
    """Loss and bits per byte over `batches`, at most `max_batches` of them; sums are divided once, at the end."""
    started = time.perf_counter()
    nll, num_tokens, num_bytes = 0.0, 0, 0.0
    iterator = iter(batches)
    for batch in itertools.islice(iterator, max_batches):
        for tokens_BL, targets_BL, docs in micro_batches(batch, micro_batch, device):
            nll += model.loss(tokens_BL, targets_BL, docs, dtype=dtype)[1].nll.item()
        num_tokens += batch.num_tokens
        num_bytes += batch.num_bytes
    is_whole = max_batches is None or next(iterator, None) is None
    return EvaluationReport(
        step=step,
        split="heldout",
        loss=nll / num_tokens if num_tokens else math.nan,
        bits_per_byte=bits_per_byte(nll, num_bytes),
        tokens=num_tokens,
        bytes=num_bytes,
        seconds=time.perf_counter() - started,
        is_whole=is_whole,
    )


def bits_per_byte(nll: float, num_bytes: float) -> float | None:
    """Nats over a text to bits a byte of it; `None` where the text has no bytes."""
    return nll / math.log(2) / num_bytes if num_bytes else None
