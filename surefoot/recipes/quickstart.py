"""The first run: a small decoder on the Python standard library's own source, in minutes on two CPU cores."""

from surefoot.blocks.ffn.moe import MoEConfig
from surefoot.checkpoint.config import CheckpointConfig
from surefoot.data.dataset import CorpusConfig, WeightedSource
from surefoot.data.sources.stdlib import StdlibConfig
from surefoot.data.tokenizers.bpe import BPEConfig
from surefoot.models.presets import decoder
from surefoot.optim.muon import MuonConfig
from surefoot.optim.schedule import LinearToZero
from surefoot.train.run import ObserveConfig, Run, TrainConfig


def quickstart() -> Run:
    """Python's own source, nothing to download, minutes on a CPU"""
    return Run(
        name="quickstart",
        model=decoder("1m", vocab_size=4096),
        data=CorpusConfig(
            sources=(WeightedSource(source=StdlibConfig()),), tokenizer=BPEConfig(vocab_size=4096), sequence_length=256
        ),
        optim=MuonConfig(lr=0.02, vocabulary_lr=0.06, vector_lr=0.06, weight_decay=0.1),
        schedule=LinearToZero(warmup=0.02),
        train=TrainConfig(num_steps=1000, batch=16),
        observe=ObserveConfig(evaluate_every=200, prompts=("import ", "def main(", "class ")),
        checkpoint=CheckpointConfig(every=200),
    )


def quickstart_moe() -> Run:
    """The quickstart with two of eight experts a token: its FLOPs, 1.9 times its parameters"""
    base = quickstart()
    ffn = MoEConfig(num_experts=8, top_k=2, hidden=192)
    return base.model_copy(update={"name": "quickstart-moe", "model": base.model.model_copy(update={"ffn": ffn})})
