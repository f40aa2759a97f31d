import random
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.data.dataset import Corpus, CorpusConfig, WeightedSource
from surefoot.data.sources.files import FilesConfig
from surefoot.data.tokenizers.bytes import BytesConfig


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("SUREFOOT_CACHE", str(path))
    return path


@pytest.fixture
def write_files(tmp_path: Path) -> Callable[..., FilesConfig]:
    """Text files of given lengths, with words no two files share, as a source."""

    def write(name: str, lengths: list[int]) -> FilesConfig:
        folder = tmp_path / name
        folder.mkdir()
        randomness = random.Random(name)
        for number, length in enumerate(lengths):
            letters = "".join(randomness.choices("abcdefgh éß\n", k=length))
            (folder / f"{number:04d}.txt").write_text(letters.strip("\n") + "x", encoding="utf-8")
        return FilesConfig(name=name, paths=(str(folder / "*.txt"),))

    return write


@pytest.fixture
def make_corpus(write_files: Callable[..., FilesConfig]) -> Callable[..., Corpus]:
    """A corpus of bytes over sources given as {name: lengths of files}."""

    def make(
        lengths: dict[str, list[int]],
        weights: list[float] | None = None,
        sequence_length: int = 16,
        heldout_fraction: float = 0.2,
        seed: int = 0,
    ) -> Corpus:
        sources = [write_files(name, each) for name, each in lengths.items()]
        return CorpusConfig(
            sources=tuple(
                WeightedSource(source=source, weight=weight)
                for source, weight in zip(sources, weights or [1.0] * len(sources), strict=True)
            ),
            tokenizer=BytesConfig(),
            sequence_length=sequence_length,
            heldout_fraction=heldout_fraction,
            seed=seed,
        ).build()

    return make
