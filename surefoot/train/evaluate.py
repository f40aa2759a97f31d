"""Evaluation: the exact token-weighted mean over held-out text."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable

import numpy as np
import torch

from surefoot.data.dataset import Batch
from surefoot.data.packing import IGNORED
from surefoot.observe.schema import EvaluationReport
from surefoot.parallel.apply import Laid
from surefoot.train.agree import Ranks
from surefoot.train.step import micro_batches


def evaluate(
    laid: Laid,
    ranks: Ranks,
    batches: Iterable[Batch],
    *,
    step: int,
    max_batches: int | None,
    batch: int,
    micro_batch: int,
    device: torch.device,
    dtype: torch.dtype,
) -> EvaluationReport:
    """Loss and bits per byte over `batches` of up to `batch` samples, at most `max_batches` of them.

    Each rank reads its share of every batch; sums are divided once, at the end.
    """
    started = time.perf_counter()
    nll, num_tokens, num_bytes = 0.0, 0, 0.0
    iterator = iter(batches)
    for found in itertools.islice(iterator, max_batches):
        ranks.heartbeat.enter("evaluate")
        share = _share(found, ranks.own(batch), is_alone=ranks.group is None)
        nll += laid.evaluate(micro_batches(share, micro_batch, device), dtype)
        num_tokens += found.num_tokens
        num_bytes += found.num_bytes
    is_whole = max_batches is None or next(iterator, None) is None
    (nll,) = ranks.sums(nll)
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


def _share(batch: Batch, own: slice, *, is_alone: bool) -> Batch:
    """One rank's samples. Every rank runs as many passes, so a short batch is filled up with samples that count nothing."""
    missing = own.stop - len(batch.tokens_BL)
    tokens_BL, targets_BL, documents_BL = batch.tokens_BL, batch.targets_BL, batch.documents_BL
    if missing > 0 and not is_alone:
        rows = [0] * missing
        tokens_BL = np.concatenate([tokens_BL, tokens_BL[rows]])
        documents_BL = np.concatenate([documents_BL, documents_BL[rows]])
        targets_BL = np.concatenate([targets_BL, np.full_like(targets_BL[rows], IGNORED)])
    return Batch(
        tokens_BL[own], targets_BL[own], documents_BL[own], batch.sources_B[own], batch.num_tokens, batch.num_bytes
    )


def bits_per_byte(nll: float, num_bytes: float) -> float | None:
    """Nats over a text to bits a byte of it; `None` where the text has no bytes."""
    return nll / math.log(2) / num_bytes if num_bytes else None
