"""The workloads as surefoot recipes: a decoder on fixed rows of tokens, the same for every trainer.

    surefoot train benchmarks/workload.py:common

Legend: B rows, L positions, V vocabulary.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.checkpoint.config import CheckpointConfig
from surefoot.data.dataset import Batch, DataConfig, Dataset
from surefoot.data.tokenizer import Ids, Tokenizer
from surefoot.models.decoder import DecoderConfig
from surefoot.optim.adamw import AdamWConfig
from surefoot.optim.schedule import Constant
from surefoot.train.run import ObserveConfig, Run, TrainConfig

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import rows as common_rows
from benchmarks.rows import (
    BETAS,
    CLIP,
    COMMON,
    EPS,
    LEARNING_RATE,
    NORM_EPS,
    NUM_ROWS,
    ROPE_THETA,
    SIZES,
    WARMUP_STEPS,
    WEIGHT_DECAY,
    Size,
)


class RowsConfig(DataConfig):
    """A workload's rows as a dataset."""

    size: Literal["common", "30m", "110m"] = "common"
    sequence_length: int = COMMON.length

    def build(self, *, announce: Callable[[str], None] = lambda _: None) -> Rows:  # noqa: ARG002
        """The dataset."""
        return Rows(SIZES[self.size])


class Rows(Dataset):
    """Each row is one document; there is no epoch and nothing is shuffled, so that every trainer reads the same."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.tokenizer = RawBytes(size)
        self.sequence_length = size.length
        self.num_samples_per_epoch = NUM_ROWS

    def batch(self, first_sample: int, count: int) -> Batch:
        """See `Dataset.batch`."""
        read, length = common_rows.rows(first_sample, count, self.size), self.size.length
        documents_BL = np.zeros((count, length), np.int32)
        num_bytes = float(count * length * self.size.token_bytes)
        return Batch(read[:, :-1], read[:, 1:], documents_BL, np.zeros(count, np.int32), count * length, num_bytes)

    def heldout(self, batch_size: int) -> Iterator[Batch]:
        """One batch that no run of a benchmark's length has reached."""
        yield self.batch(NUM_ROWS - batch_size, batch_size)


class RawBytes(Tokenizer):
    """Id = value of one byte or of two, without their first bit, which ASCII does not use. Rows hold no separator, so 0 serves
    as the one that the interface asks for."""

    document, pad = 0, None

    def __init__(self, size: Size) -> None:
        self.vocab_size, self.token_bytes = size.vocabulary, size.token_bytes

    def encode_batch(self, texts: Sequence[bytes | str]) -> list[Ids]:
        """See `Tokenizer.encode_batch`."""
        raw = [text if isinstance(text, bytes) else text.encode() for text in texts]
        whole = [text[: len(text) - len(text) % self.token_bytes] for text in raw]
        return [np.frombuffer(text, f">u{self.token_bytes}").astype(np.uint32) % self.vocab_size for text in whole]

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        return b"".join(int(number).to_bytes(self.token_bytes, "big") for number in ids).decode(errors="replace")

    def byte_lengths(self) -> NDArray[np.float64]:
        """See `Tokenizer.byte_lengths`."""
        return np.full(self.vocab_size, float(self.token_bytes))

    def fingerprint(self) -> str:
        """See `Tokenizer.fingerprint`."""
        return hashlib.sha256(f"raw bytes {self.token_bytes}".encode()).hexdigest()

    def save(self, directory: Path) -> None:
        """See `Tokenizer.save`; nothing here needs it."""
        raise NotImplementedError(f"{directory}: a benchmark's tokenizer is not saved")


def common(num_steps: int = 30) -> Run:
    """The common workload: 7 M weights, bytes."""
    return workload("common", num_steps)


def m30(num_steps: int = 30) -> Run:
    """30 M weights, two thirds of them in the vocabulary."""
    return workload("30m", num_steps)


def m110(num_steps: int = 30) -> Run:
    """110 M weights, half of them in the vocabulary."""
    return workload("110m", num_steps)


def workload(name: Literal["common", "30m", "110m"], num_steps: int) -> Run:
    """A workload as a run; what surefoot records by default is recorded."""
    size = SIZES[name]
    return Run(
        name=name,
        # QK-norm and z-loss are surefoot's defaults; the other trainers have neither, so the model is made theirs.
        model=DecoderConfig(
            vocab_size=size.vocabulary,
            width=size.width,
            depth=size.depth,
            mixer=AttentionConfig(
                num_heads=size.heads,
                num_kv_heads=size.kv_heads,
                qk_norm="none",
                norm_eps=NORM_EPS,
                rope_theta=ROPE_THETA,
            ),
            ffn=SwiGLUConfig(hidden=size.ffn),
            norm_eps=NORM_EPS,
            z_loss=0.0,
        ),
        data=RowsConfig(size=name, sequence_length=size.length),
        optim=AdamWConfig(
            lr=LEARNING_RATE,
            betas=BETAS,
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            vocabulary_weight_decay=WEIGHT_DECAY,
        ),
        schedule=Constant(warmup=min(0.5, WARMUP_STEPS / num_steps)),
        train=TrainConfig(num_steps=num_steps, batch=size.batch, max_gradient_norm=CLIP),
        observe=ObserveConfig(evaluate_whole=False),
        checkpoint=CheckpointConfig(every=None),
    )
