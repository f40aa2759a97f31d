"""The first run: a small decoder on the Python standard library's own source, in minutes on two CPU cores."""

from surefoot.checkpoint.config import CheckpointConfig
from surefoot.data.dataset import CorpusConfig, WeightedSource
from surefoot.data.sources.stdlib import StdlibConfig
from surefoot.data.tokenizers.bpe import BPEConfig
from surefoot.models.presets import decoder
from surefoot.optim.muon import MuonConfig
from surefoot.optim.schedule import LinearToZero
from surefoot.train.run import ObserveConfig, Run, TrainConfig


def quickstart() -> Run:
    """A 5 M decoder on the standard library's source: real text, nothing to download, under 5 minutes."""
    return Run(
        name="quickstart",
        model=decoder("5m", vocab_size=4096),
        data=CorpusConfig(
            sources=(WeightedSource(source=StdlibConfig()),), tokenizer=BPEConfig(vocab_size=4096), sequence_length=256
        ),
        optim=MuonConfig(lr=0.01, vocabulary_lr=0.01, vector_lr=0.01, weight_decay=0.1),
        schedule=LinearToZero(warmup=0.02),
        train=TrainConfig(num_steps=400, batch=16),
        observe=ObserveConfig(evaluate_every=100, prompts=("import ", "def main(", "class ")),
        checkpoint=CheckpointConfig(every=100),
    )
