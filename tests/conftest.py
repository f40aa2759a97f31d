"""What many tests share: a corpus of a few small files, a run over it, and a cache of its own for the session."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from surefoot.dist.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """One pool of eight ranks for the whole session: starting it takes seconds, a job on it a tenth of one."""
    pool = Pool(8)
    yield pool
    pool.close()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No test reads or writes the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        patch.setenv("SUREFOOT_CACHE", str(cache))
        yield cache


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 60 text files of very different lengths, the shortest a few bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = random.Random(0)
    words = [
        "def",
        "return",
        "import",
        "class",
        "self",
        "for",
        "in",
        "if",
        "None",
        "x",
        "y",
        "z",
        "=",
        "+",
        "(",
        ")",
        ":",
        "\n",
    ]
    for number in range(60):
        text = " ".join(generator.choice(words) for _ in range(generator.choice([2, 9, 40, 200])))
        (folder / f"{number:02d}.txt").write_text(text)
    return folder


@pytest.fixture(scope="session")
def tiny(corpus: Path) -> Callable[..., object]:
    """`tiny("train.num_steps=3", …)` is a run of a model of a few thousand parameters on the corpus."""
    from surefoot.blocks.ffn.swiglu import SwiGLUConfig
    from surefoot.blocks.mixers.attention import AttentionConfig
    from surefoot.checkpoint.config import CheckpointConfig
    from surefoot.config import override
    from surefoot.data.dataset import CorpusConfig, WeightedSource
    from surefoot.data.sources.files import FilesConfig
    from surefoot.data.tokenizers.bytes import BytesConfig
    from surefoot.models.decoder import DecoderConfig
    from surefoot.optim.muon import MuonConfig
    from surefoot.optim.schedule import WSD
    from surefoot.precision.policy import PrecisionConfig
    from surefoot.train.run import ObserveConfig, Run, TrainConfig

    run = Run(
        name="tiny",
        model=DecoderConfig(
            vocab_size=258,
            width=16,
            depth=2,
            mixer=AttentionConfig(num_heads=2, num_kv_heads=1),
            ffn=SwiGLUConfig(hidden=24),
        ),
        data=CorpusConfig(
            sources=(WeightedSource(source=FilesConfig(name="files", paths=(str(corpus / "*.txt"),))),),
            tokenizer=BytesConfig(),
            sequence_length=32,
            heldout_fraction=0.2,
        ),
        optim=MuonConfig(lr=0.02),
        schedule=WSD(warmup=0.1),
        train=TrainConfig(num_steps=8, batch=4),
        precision=PrecisionConfig(compute="fp32"),
        observe=ObserveConfig(evaluate_every=4, evaluate_batches=2),
        checkpoint=CheckpointConfig(every=2, keep_last=2),
    )
    return lambda *assignments: override(run, assignments)
