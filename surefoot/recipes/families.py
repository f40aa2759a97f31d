"""Published architectures as recipes: to see what they cost, and to train from (data and optimizer are those of gpt-1b)."""

from surefoot.checkpoint.config import CheckpointConfig
from surefoot.data.dataset import CorpusConfig, WeightedSource
from surefoot.data.sources.huggingface import HuggingFaceConfig
from surefoot.data.tokenizers.bpe import BPEConfig
from surefoot.models.decoder import DecoderConfig
from surefoot.models.presets import families
from surefoot.optim.adamw import AdamWConfig
from surefoot.optim.schedule import Cosine
from surefoot.train.run import Run, TrainConfig


def llama2_7b() -> Run:
    """Full attention with all its heads' keys: see surefoot cost (extra hf)"""
    return _family("llama2-7b", families.llama2_7b())


def qwen25_72b() -> Run:
    """Grouped keys: see surefoot cost (extra hf)"""
    return _family("qwen25-72b", families.qwen25_72b())


def mistral_7b() -> Run:
    """A sliding window in every layer: see surefoot cost (extra hf)"""
    return _family("mistral-7b", families.mistral_7b())


def mixtral_8x7b() -> Run:
    """Two of eight experts: see surefoot cost (extra hf)"""
    return _family("mixtral-8x7b", families.mixtral_8x7b())


def deepseek_v3() -> Run:
    """Latent attention and 256 experts: see surefoot cost (extra hf)"""
    return _family("deepseek-v3", families.deepseek_v3())


def gemma3_27b() -> Run:
    """Five local layers to one global: see surefoot cost (extra hf)"""
    return _family("gemma3-27b", families.gemma3_27b())


def gpt_oss_20b() -> Run:
    """Short windows, sinks and 32 experts: see surefoot cost (extra hf)"""
    return _family("gpt-oss-20b", families.gpt_oss_20b())


def mamba2_2_7b() -> Run:
    """Mamba-2 alone: see surefoot cost (extra hf)"""
    return _family("mamba2-2-7b", families.mamba2_2_7b())


def qwen3_next_80b() -> Run:
    """Gated DeltaNet, gated attention and 512 experts: see surefoot cost (extra hf)"""
    return _family("qwen3-next-80b", families.qwen3_next_80b())


def jamba_52b() -> Run:
    """Mamba-2, attention and experts in Jamba's pattern: see surefoot cost (extra hf)"""
    return _family("jamba-52b", families.jamba_52b())


def nemotron_h_8b() -> Run:
    """Mamba-2, networks and a little attention: see surefoot cost (extra hf)"""
    return _family("nemotron-h-8b", families.nemotron_h_8b())


def zamba2_2_7b() -> Run:
    """Mamba-2 and two transformer blocks that many layers share: see surefoot cost (extra hf)"""
    return _family("zamba2-2-7b", families.zamba2_2_7b())


def falcon_h1_7b() -> Run:
    """Attention and Mamba-2 side by side: see surefoot cost (extra hf)"""
    return _family("falcon-h1-7b", families.falcon_h1_7b())


def rwkv7_2_9b() -> Run:
    """RWKV-7: see surefoot cost (extra hf)"""
    return _family("rwkv7-2-9b", families.rwkv7_2_9b())


def _family(name: str, model: DecoderConfig) -> Run:
    web = HuggingFaceConfig(dataset="HuggingFaceFW/fineweb-edu", split="train")
    return Run(
        name=name,
        model=model,
        data=CorpusConfig(
            sources=(WeightedSource(source=web),),
            tokenizer=BPEConfig(vocab_size=min(model.vocab_size, 128_000)),
            sequence_length=4096,
            heldout_fraction=0.0001,
        ),
        optim=AdamWConfig(lr=3e-4, betas=(0.9, 0.95)),
        schedule=Cosine(warmup=0.02),
        train=TrainConfig(num_steps=100_000, batch=1024),
        checkpoint=CheckpointConfig(every=500, keep_every=5000),
    )
