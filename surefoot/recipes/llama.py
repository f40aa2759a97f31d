"""Decoders of the sizes of Llama 3 (Dubey et al., 2024), for clusters; `docs/guide/scale.md` lays them out."""

from surefoot.checkpoint.config import CheckpointConfig
from surefoot.data.dataset import CorpusConfig, WeightedSource
from surefoot.data.sources.huggingface import HuggingFaceConfig
from surefoot.data.tokenizers.bpe import BPEConfig
from surefoot.models.presets import decoder
from surefoot.optim.adamw import AdamWConfig
from surefoot.optim.schedule import Cosine
from surefoot.train.run import Run, TrainConfig

_VOCABULARY = 128_256


def llama_8b() -> Run:
    """FineWeb-Edu, for tens of GPUs: see docs/guide/scale.md (extra hf)"""
    return _llama("8b", batch=512, num_steps=38_000, lr=3e-4)


def llama_70b() -> Run:
    """FineWeb-Edu, for hundreds of GPUs: see docs/guide/scale.md (extra hf)"""
    return _llama("70b", batch=1_024, num_steps=167_000, lr=1.5e-4)


def llama_405b() -> Run:
    """FineWeb-Edu, for thousands of GPUs: see docs/guide/scale.md (extra hf)"""
    return _llama("405b", batch=2_048, num_steps=483_000, lr=8e-5)


def _llama(size: str, *, batch: int, num_steps: int, lr: float) -> Run:
    web = HuggingFaceConfig(dataset="HuggingFaceFW/fineweb-edu", split="train")
    return Run(
        name=f"llama-{size}",
        model=decoder(size, vocab_size=_VOCABULARY, rope_theta=500_000.0),
        data=CorpusConfig(
            sources=(WeightedSource(source=web),),
            tokenizer=BPEConfig(vocab_size=_VOCABULARY),
            sequence_length=8192,
            heldout_fraction=0.0001,
        ),
        optim=AdamWConfig(lr=lr, betas=(0.9, 0.95)),
        schedule=Cosine(warmup=0.02),
        train=TrainConfig(num_steps=num_steps, batch=batch),
        checkpoint=CheckpointConfig(every=500, keep_every=5000),
    )
