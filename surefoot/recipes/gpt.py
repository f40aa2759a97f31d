"""Decoders of the sizes people compare at, on web text or on what a laptop has."""

from surefoot.checkpoint.config import CheckpointConfig
from surefoot.data.dataset import CorpusConfig, WeightedSource
from surefoot.data.sources.huggingface import HuggingFaceConfig
from surefoot.data.sources.stdlib import StdlibConfig
from surefoot.data.tokenizers.bpe import BPEConfig
from surefoot.models.presets import decoder
from surefoot.optim.adamw import AdamWConfig
from surefoot.optim.muon import MuonConfig
from surefoot.optim.schedule import WSD, Cosine
from surefoot.train.run import ObserveConfig, Run, TrainConfig

_WEB = HuggingFaceConfig(dataset="HuggingFaceFW/fineweb-edu", subset="sample-10BT", split="train")


def gpt_30m() -> Run:
    """Python's own source, 10 epochs: hours on two cores"""
    return Run(
        name="gpt-30m",
        model=decoder("30m", vocab_size=8192),
        data=CorpusConfig(
            sources=(WeightedSource(source=StdlibConfig()),), tokenizer=BPEConfig(vocab_size=8192), sequence_length=512
        ),
        optim=MuonConfig(lr=0.01, vocabulary_lr=0.01, vector_lr=0.01, weight_decay=0.1),
        schedule=WSD(warmup=0.02, decay=0.4),
        train=TrainConfig(num_steps=1600, batch=32, micro_batch=8),
        observe=ObserveConfig(evaluate_every=200, prompts=("import ", "def main(", "class ")),
        checkpoint=CheckpointConfig(every=100),
    )


def gpt_110m() -> Run:
    """FineWeb-Edu, 20 tokens a parameter, Muon (extra hf)"""
    return _web("gpt-110m", "110m", num_steps=4_200, lr=0.01)


def gpt_410m() -> Run:
    """FineWeb-Edu, 20 tokens a parameter, Muon (extra hf)"""
    return _web("gpt-410m", "410m", num_steps=15_600, lr=0.006)


def llama_1b() -> Run:
    """FineWeb-Edu, AdamW and a cosine as in Llama (extra hf)"""
    base = _web("llama-1b", "1b", num_steps=19_000, lr=0.006)
    model = decoder("1b", vocab_size=32_768, rope_theta=500_000.0)
    return base.model_copy(
        update={"model": model, "optim": AdamWConfig(lr=6e-4, betas=(0.9, 0.95)), "schedule": Cosine(warmup=0.02)}
    )


def _web(name: str, size: str, *, num_steps: int, lr: float) -> Run:
    return Run(
        name=name,
        model=decoder(size, vocab_size=32_768),
        data=CorpusConfig(
            sources=(WeightedSource(source=_WEB),),
            tokenizer=BPEConfig(vocab_size=32_768),
            sequence_length=2048,
            heldout_fraction=0.001,
        ),
        optim=MuonConfig(lr=lr, vocabulary_lr=lr, vector_lr=lr, weight_decay=0.1),
        schedule=WSD(warmup=0.01, decay=0.4),
        train=TrainConfig(num_steps=num_steps, batch=256, micro_batch=8),
        observe=ObserveConfig(evaluate_every=500, evaluate_batches=64, evaluate_whole=False),
        checkpoint=CheckpointConfig(every=500, keep_every=5000),
    )
