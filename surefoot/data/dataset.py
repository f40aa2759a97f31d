"""`Dataset`: any sample of a training run by its global number, and the held-out text; `CorpusConfig` describes one.

Legend: B samples of a batch, L sequence length, V vocabulary.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from surefoot.config import Config, DataError, FieldError, to_dict
from surefoot.data.cache import cache_directory, damaged, entry
from surefoot.data.mixing import Mixing
from surefoot.data.order import Permutation
from surefoot.data.packing import IGNORED, Packing, Window
from surefoot.data.shards import FORMAT, Announce, Shards, content_key, open_shards, training_texts
from surefoot.data.source import Source, SourceConfig
from surefoot.data.tokenizer import Tokenizer, TokenizerConfig
from surefoot.data.tokenizers.wrapped import load_tokenizer

TRAINING_BYTES = 256 << 20
"""Text, over all sources, that a trained tokenizer learns from."""

_NAMES_COMPARED = 20_000
"""Names among which a misspelt one is looked for: enough for most corpora, and under a second."""


@dataclass(frozen=True)
class Batch:
    """Rows of packed windows.

    `targets_BL` is -100 where nothing is predicted; `documents_BL` numbers each row's documents from 0, padding apart.
    `num_tokens` counts valid targets and `num_bytes` the bytes of text they stand for. `sources_B` indexes the sources.
    """

    tokens_BL: NDArray[np.int64]
    targets_BL: NDArray[np.int64]
    documents_BL: NDArray[np.int32]
    sources_B: NDArray[np.int32]
    num_tokens: int
    num_bytes: float

    @classmethod
    def of(cls, windows: Sequence[Window], sources: Sequence[int], byte_lengths_V: NDArray[np.float64]) -> Self:
        """Windows stacked to a batch."""
        targets_BL = np.stack([window.targets_L for window in windows])
        valid = targets_BL[targets_BL != IGNORED]
        return cls(
            np.stack([window.tokens_L for window in windows]),
            targets_BL,
            np.stack([window.documents_L for window in windows]),
            np.array(sources, np.int32),
            len(valid),
            float(byte_lengths_V[valid].sum()),
        )


@dataclass(frozen=True)
class Sample:
    """Where a sample comes from. `documents` holds (name, start, end): positions in the stored document, separators
    included; `window` counts from 0 in its source's training split."""

    source: str
    epoch: int
    window: int
    documents: tuple[tuple[str, int, int], ...]


class Dataset(ABC):
    """What a trainer reads. Every method is a pure function: a sample's number in the run is the whole state."""

    tokenizer: Tokenizer
    sequence_length: int
    num_samples_per_epoch: int

    @property
    def vocab_size(self) -> int:
        """Smallest vocabulary a model needs."""
        return self.tokenizer.vocab_size

    @abstractmethod
    def batch(self, first_sample: int, count: int) -> Batch:
        """Samples first_sample … first_sample + count - 1 of the run."""

    @abstractmethod
    def heldout(self, batch_size: int) -> Iterator[Batch]:
        """Every held-out token exactly once, in the same order in every run; the last batch may be smaller."""

    def facts(self) -> dict[str, Any]:
        """What a run records about its data."""
        return {}

    def audit(self, num_samples: int) -> dict[str, Any]:
        """What the first `num_samples` samples held of each source, beside what was asked for."""
        return {"samples": num_samples, "sources": []}

    def locate(self, sample: int) -> Sample:
        """The documents of a sample."""
        return Sample("rows", *divmod(sample, self.num_samples_per_epoch), ())

    def samples_of(self, document: str, until_sample: int) -> list[int]:
        """The samples before `until_sample` that hold a part of a document, in order. Raises `DataError`."""
        raise DataError(f"{document}: this dataset cannot say which of its samples before {until_sample} hold it")


class DataConfig(Config):
    """Describes a dataset; a user's own is a subclass that builds a `Dataset`."""

    sequence_length: int = Field(gt=0, description="positions of a sample")

    @abstractmethod
    def build(self, *, announce: Announce = lambda _: None) -> Dataset:
        """The dataset; `announce` hears of anything that takes long. Raises `DataError`."""

    def build_tokenizer(self, *, announce: Announce = lambda _: None) -> Tokenizer:
        """The dataset's tokenizer, without the dataset where it can do without."""
        return self.build(announce=announce).tokenizer


class WeightedSource(Config):
    """A source and its weight: its part of the tokens a run trains on, up to a common factor."""

    source: SourceConfig
    weight: float = Field(default=1.0, gt=0)

    def build(self) -> Source:
        """The source."""
        return self.source.build()


class CorpusConfig(DataConfig):
    """Text sources, tokenised once into a cache, packed, mixed and shuffled."""

    sources: tuple[WeightedSource, ...] = Field(min_length=1)
    tokenizer: TokenizerConfig
    heldout_fraction: float = Field(
        default=0.05, ge=0, lt=1, description="of the documents, chosen by hash of the name"
    )
    seed: int = Field(default=0, ge=0, description="of the order of samples")

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [weighted.source.name for weighted in self.sources]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise FieldError(
                    f"sources.{index}.source.name", name, "is taken by another source; give each its own name"
                )
        return self

    def build(self, *, announce: Announce = lambda _: None, cache: Path | None = None) -> Corpus:
        """`cache` is where shards live; see `cache_directory` for the default."""
        cache = cache or cache_directory()
        sources = [weighted.build() for weighted in self.sources]
        tokenizer = self._tokenizer(sources, cache, announce)
        shards = [open_shards(source, tokenizer, self.heldout_fraction, cache, announce) for source in sources]
        return Corpus(self, tokenizer, shards)

    def build_tokenizer(self, *, announce: Announce = lambda _: None) -> Tokenizer:
        """Reads no text but to train a tokenizer."""
        sources = [weighted.build() for weighted in self.sources] if self.tokenizer.reads_texts else []
        return self._tokenizer(sources, cache_directory(), announce)

    def _tokenizer(self, sources: list[Source], cache: Path, announce: Announce) -> Tokenizer:
        if not self.tokenizer.reads_texts:
            return self.tokenizer.build(())
        key = content_key(to_dict(self.tokenizer), [source.fingerprint() for source in sources], self.heldout_fraction)
        directory = cache / "tokenizers" / key

        def write(staging: Path) -> dict[str, Any]:
            announce(f"training the tokenizer (once; kept in {directory})")
            texts = training_texts(sources, self.heldout_fraction, TRAINING_BYTES // len(sources))
            self.tokenizer.build(texts).save(staging)
            return {"format": FORMAT, "tokenizer": to_dict(self.tokenizer)}

        entry(directory, write)
        try:
            return load_tokenizer(directory)
        except DataError as error:
            raise damaged(directory / "tokenizer.json", f"cannot be used ({error})") from None


class Corpus(Dataset):
    """Tokenised sources, packed into windows and mixed.

    Sample g is number k of some source by weight; k is window `permutation(k mod n)` of that source in epoch `k div n`.
    """

    def __init__(self, config: CorpusConfig, tokenizer: Tokenizer, shards: Sequence[Shards]) -> None:
        self.tokenizer, self.sequence_length = tokenizer, config.sequence_length
        self._config, self._shards = config, list(shards)
        pad = tokenizer.document if tokenizer.pad is None else tokenizer.pad
        self._train = [
            Packing(part.splits["train"], config.sequence_length, keep_last=False, pad=pad) for part in self._shards
        ]
        self._heldout = [
            Packing(part.splits["heldout"], config.sequence_length, keep_last=True, pad=pad) for part in self._shards
        ]
        for part, packing in zip(self._shards, self._train, strict=True):
            self._check(part, packing)
        if config.heldout_fraction and not any(packing.num_windows for packing in self._heldout):
            raise DataError(
                f"heldout_fraction {config.heldout_fraction} leaves no document of "
                f"{sum(len(part.splits['train'].names) for part in self._shards)} for evaluation; raise it, "
                "cut the text into more documents (`separator`), or set it to 0"
            )
        # Weights are parts of the tokens trained on, and windows of short documents hold fewer of those.
        self._weights = [Fraction(weighted.weight) for weighted in config.sources]
        shares = [
            weight * packing.num_windows / int(packing.num_targets.sum())
            for weight, packing in zip(self._weights, self._train, strict=True)
        ]
        self._mixing = Mixing(shares, seed=config.seed)
        self.num_samples_per_epoch = sum(packing.num_windows for packing in self._train)
        # A tokenizer that is not byte-level cannot say exactly what an id stands for; its total is made exact.
        counted = sum(part.counted_bytes for part in self._shards)
        self._byte_scale = sum(part.num_bytes for part in self._shards) / counted if counted else 1.0
        self._byte_lengths_V = tokenizer.byte_lengths() * self._byte_scale
        self._orders: dict[int, tuple[int, Permutation]] = {}

    def _check(self, part: Shards, packing: Packing) -> None:
        split = part.splits["train"]
        if not len(split.ids):
            raise DataError(
                f"{part.source}: heldout_fraction {self._config.heldout_fraction} leaves no document to train on; "
                "lower it, cut the text into more documents (`separator`), or set it to 0"
            )
        if not packing.num_windows or not packing.num_targets.any():
            raise DataError(
                f"{part.source}: sequence_length {self.sequence_length} is longer than its {len(split.ids)} tokens of "
                "training text; use a shorter one or more text"
            )

    # -- batches -------------------------------------------------------------------------------------------------------

    def batch(self, first_sample: int, count: int) -> Batch:
        windows, sources = [], []
        for sample in range(first_sample, first_sample + count):
            source, _, window = self._find(sample)
            windows.append(self._train[source].window(window))
            sources.append(source)
        return Batch.of(windows, sources, self._byte_lengths_V)

    def heldout(self, batch_size: int) -> Iterator[Batch]:
        places = [
            (source, window) for source, packing in enumerate(self._heldout) for window in range(packing.num_windows)
        ]
        if not places:
            return
        # Shuffled, so that its first batches already are a fair sample; by a fixed key, so that runs can be compared.
        order = Permutation(len(places), seed=0, stream="heldout", epoch=0).forward(np.arange(len(places)))
        for start in range(0, len(places), batch_size):
            chosen = [places[int(index)] for index in order[start : start + batch_size]]
            windows = [self._heldout[source].window(window) for source, window in chosen]
            yield Batch.of(windows, [source for source, _ in chosen], self._byte_lengths_V)

    def _find(self, sample: int) -> tuple[int, int, int]:
        """(source, epoch, window) of a global sample."""
        source, index = self._mixing.locate(sample)
        epoch, index = divmod(index, self._train[source].num_windows)
        return source, epoch, int(self._order(source, epoch).forward(index))

    def _order(self, source: int, epoch: int) -> Permutation:
        cached = self._orders.get(source)
        if cached is None or cached[0] != epoch:
            n, stream = self._train[source].num_windows, f"source {self._shards[source].source}"
            cached = epoch, Permutation(n, seed=self._config.seed, stream=stream, epoch=epoch)
            self._orders[source] = cached
        return cached[1]

    # -- where things come from ----------------------------------------------------------------------------------------

    def locate(self, sample: int) -> Sample:
        source, epoch, window = self._find(sample)
        packing, name = self._train[source], self._shards[source].source
        documents = [
            (f"{name}/{packing.split.names[document]}", start, end)
            for document, start, end in packing.documents_of(window)
        ]
        return Sample(name, epoch, window, tuple(documents))

    def samples_of(self, document: str, until_sample: int) -> list[int]:
        """`document` is `source/name`, or the name alone where one source has it; a held-out one has no samples."""
        place = self._find_document(document)
        if place is None:
            return []
        source, number = place
        packing = self._train[source]
        windows = np.array(packing.windows_of(number), np.uint64)
        n, found, epoch = packing.num_windows, [], 0
        while windows.size:
            indices = np.sort(self._order(source, epoch).inverse(windows))  # neighbours share a block of the mixing
            samples = [self._mixing.sample_of(source, epoch * n + int(index)) for index in indices]
            found += [sample for sample in samples if sample < until_sample]
            epoch += 1
            if self._mixing.sample_of(source, epoch * n) >= until_sample:
                break
        return sorted(found)

    def _find_document(self, document: str) -> tuple[int, int] | None:
        """(source, number in its training split), or `None` for a held-out document."""
        places: list[tuple[int, int] | None] = []
        known_names: list[str] = []
        for source, part in enumerate(self._shards):
            for split, content in part.splits.items():
                for number, name in enumerate(content.names):
                    full = f"{part.source}/{name}"
                    place = (source, number) if split == "train" else None
                    if document == full:
                        return place
                    if document == name:
                        places.append(place)
                    if len(known_names) < _NAMES_COMPARED:
                        known_names.append(full)
        if len(places) > 1:
            raise DataError(f"{document}: several sources have a document of this name; write source/name")
        if not places:
            near = difflib.get_close_matches(document, known_names, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"names look like {known_names[0]}"
            raise DataError(f"{document}: there is no such document; {hint}")
        return places[0]

    # -- records -------------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        total = sum(self._weights)
        return {
            "tokenizer": {
                **to_dict(self._config.tokenizer),
                "fingerprint": self.tokenizer.fingerprint(),
                "vocab_size": self.vocab_size,
                "document": self.tokenizer.document,
                "pad": self.tokenizer.pad,
                "byte_scale": self._byte_scale,
            },
            "heldout_fraction": self._config.heldout_fraction,
            "samples_per_epoch": self.num_samples_per_epoch,
            "heldout_windows": sum(packing.num_windows for packing in self._heldout),
            "sources": [
                {
                    **part.manifest["source"],
                    "share": float(weight / total),
                    "text_bytes": part.num_bytes,
                    "empty_documents": part.manifest.get("num_empty_documents", 0),
                    "splits": {
                        split: {"documents": len(content.names), "tokens": len(content.ids) - 2 * len(content.names)}
                        for split, content in part.splits.items()
                    },
                    "windows": packing.num_windows,
                    "shards": {name: file["sha256"] for name, file in part.manifest["files"].items()},
                }
                for part, packing, weight in zip(self._shards, self._train, self._weights, strict=True)
            ],
        }

    def audit(self, num_samples: int) -> dict[str, Any]:
        """Predicted tokens of each source, counted from the windows that were read and not from the weights."""
        counts = self._mixing.counts(num_samples)
        tokens = [self._tokens_of(source, count) for source, count in enumerate(counts)]
        total_weight, total_tokens = sum(self._weights), sum(tokens)
        return {
            "samples": num_samples,
            "tokens": total_tokens,
            "sources": [
                {
                    "name": part.source,
                    "samples": count,
                    "tokens": own,
                    "epochs": count / packing.num_windows,
                    "requested_share": float(weight / total_weight),
                    "realised_share": own / total_tokens if total_tokens else 0.0,
                }
                for part, packing, weight, count, own in zip(
                    self._shards, self._train, self._weights, counts, tokens, strict=True
                )
            ],
        }

    def _tokens_of(self, source: int, num_samples: int) -> int:
        """Valid targets in a source's first `num_samples` samples."""
        packing = self._train[source]
        epochs, rest = divmod(num_samples, packing.num_windows)
        windows = self._order(source, epochs).forward(np.arange(rest))
        return epochs * int(packing.num_targets.sum()) + int(packing.num_targets[windows.astype(np.int64)].sum())
