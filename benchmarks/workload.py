"""The common workload as a surefoot recipe: one small decoder on fixed rows of bytes, the same for every trainer.

    surefoot train benchmarks/workload.py:common

Legend: B rows, L positions, V vocabulary.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

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
    BATCH,
    BETAS,
    CLIP,
    DEPTH,
    EPS,
    FFN,
    HEADS,
    KV_HEADS,
    LEARNING_RATE,
    LENGTH,
    NORM_EPS,
    NUM_ROWS,
    ROPE_THETA,
    VOCABULARY,
    WARMUP_STEPS,
    WEIGHT_DECAY,
    WIDTH,
)


class RowsConfig(DataConfig):
    """The workload's rows as a dataset."""

    sequence_length: int = LENGTH

    def build(self, *, announce: Callable[[str], None] = lambda _: None) -> Rows:  # noqa: ARG002
        """The dataset."""
        return Rows()


class Rows(Dataset):
    """Each row is one document; there is no epoch and nothing is shuffled, so that every trainer reads the same."""

    def __init__(self) -> None:
        self.tokenizer = RawBytes()
        self.sequence_length = LENGTH
        self.num_samples_per_epoch = NUM_ROWS

    def batch(self, first_sample: int, count: int) -> Batch:
        """See `Dataset.batch`."""
        read = common_rows.rows(first_sample, count)
        documents_BL = np.zeros((count, LENGTH), np.int32)
        return Batch(
            read[:, :-1], read[:, 1:], documents_BL, np.zeros(count, np.int32), count * LENGTH, float(count * LENGTH)
        )

    def heldout(self, batch_size: int) -> Iterator[Batch]:
        """One batch that no run of a benchmark's length has reached."""
        yield self.batch(NUM_ROWS - batch_size, batch_size)


class RawBytes(Tokenizer):
    """Id = value of the byte. Rows hold no separator, so byte 0 serves as the one that the interface asks for."""

    vocab_size, document, pad = VOCABULARY, 0, None

    def encode_batch(self, texts: Sequence[bytes | str]) -> list[Ids]:
        """See `Tokenizer.encode_batch`."""
        raw = [text if isinstance(text, bytes) else text.encode() for text in texts]
        return [np.frombuffer(text, np.uint8).astype(np.uint32) for text in raw]

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        return bytes(int(number) for number in ids).decode(errors="replace")

    def byte_lengths(self) -> NDArray[np.float64]:
        """See `Tokenizer.byte_lengths`."""
        return np.ones(VOCABULARY)

    def fingerprint(self) -> str:
        """See `Tokenizer.fingerprint`."""
        return hashlib.sha256(b"raw bytes").hexdigest()

    def save(self, directory: Path) -> None:
        """See `Tokenizer.save`; nothing here needs it."""
        raise NotImplementedError(f"{directory}: a benchmark's tokenizer is not saved")


def common(num_steps: int = 30) -> Run:
    """The common workload; what surefoot records by default is recorded."""
    return Run(
        name="common",
        # QK-norm and z-loss are surefoot's defaults; the other trainers have neither, so the model is made theirs.
        model=DecoderConfig(
            vocab_size=VOCABULARY,
            width=WIDTH,
            depth=DEPTH,
            mixer=AttentionConfig(
                num_heads=HEADS, num_kv_heads=KV_HEADS, qk_norm="none", norm_eps=NORM_EPS, rope_theta=ROPE_THETA
            ),
            ffn=SwiGLUConfig(hidden=FFN),
            norm_eps=NORM_EPS,
            z_loss=0.0,
        ),
        data=RowsConfig(),
        optim=AdamWConfig(
            lr=LEARNING_RATE,
            betas=BETAS,
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            vocabulary_weight_decay=WEIGHT_DECAY,
        ),
        schedule=Constant(warmup=min(0.5, WARMUP_STEPS / num_steps)),
        train=TrainConfig(num_steps=num_steps, batch=BATCH, max_gradient_norm=CLIP),
        observe=ObserveConfig(evaluate_whole=False),
        checkpoint=CheckpointConfig(every=None),
    )
