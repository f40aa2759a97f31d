"""Published architectures of several families, by the numbers of their papers and model cards.

For `surefoot cost` and as starting points: the parts are these families' own unless a function says otherwise.
"""

from __future__ import annotations

from surefoot.blocks.ffn.glu import GLUConfig
from surefoot.blocks.ffn.mlp import MLPConfig
from surefoot.blocks.ffn.moe import MoEConfig
from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.blocks.mixers.common import CommonBlockConfig
from surefoot.blocks.mixers.delta_net import GatedDeltaNetConfig
from surefoot.blocks.mixers.mamba2 import Mamba2Config
from surefoot.blocks.mixers.mla import MLAConfig
from surefoot.blocks.mixers.rwkv7 import RWKV7Config
from surefoot.blocks.mixers.side_by_side import SideBySideConfig
from surefoot.blocks.routers.sigmoid import SigmoidConfig
from surefoot.blocks.routers.topk import TopKConfig
from surefoot.models.decoder import DecoderConfig


def llama2_7b() -> DecoderConfig:
    """Llama 2 7B (Touvron et al., 2023): a key-value head for each query head."""
    return DecoderConfig(
        vocab_size=32_000,
        width=4096,
        depth=32,
        mixer=AttentionConfig(num_heads=32, num_kv_heads=32, qk_norm="none"),
        ffn=SwiGLUConfig(hidden=11_008),
    )


def qwen25_72b() -> DecoderConfig:
    """Qwen2.5 72B (Qwen team, 2024)."""
    return DecoderConfig(
        vocab_size=152_064,
        width=8192,
        depth=80,
        mixer=AttentionConfig(num_heads=64, num_kv_heads=8, qk_norm="none", bias="qkv", rope_theta=1e6),
        ffn=SwiGLUConfig(hidden=29_568),
    )


def mistral_7b() -> DecoderConfig:
    """Mistral 7B (Jiang et al., 2023): every layer has a sliding window."""
    return DecoderConfig(
        vocab_size=32_000,
        width=4096,
        depth=32,
        mixer=AttentionConfig(num_heads=32, num_kv_heads=8, qk_norm="none", window=4096),
        ffn=SwiGLUConfig(hidden=14_336),
    )


def mixtral_8x7b() -> DecoderConfig:
    """Mixtral 8x7B (Jiang et al., 2024)."""
    return DecoderConfig(
        vocab_size=32_000,
        width=4096,
        depth=32,
        mixer=AttentionConfig(num_heads=32, num_kv_heads=8, qk_norm="none", rope_theta=1e6),
        ffn=MoEConfig(num_experts=8, top_k=2, hidden=14_336),
    )


def deepseek_v3() -> DecoderConfig:
    """DeepSeek-V3 (DeepSeek-AI, 2024), without its multi-token prediction module."""
    router = SigmoidConfig(scale=2.5, num_groups=8, top_groups=4)
    return DecoderConfig(
        vocab_size=129_280,
        width=7168,
        depth=61,
        mixer=MLAConfig(
            num_heads=128, latent_size=512, q_latent_size=1536, head_size=128, rope_size=64, value_size=128
        ),
        ffn=SwiGLUConfig(hidden=18_432),
        other_ffns={"e": MoEConfig(num_experts=256, top_k=8, hidden=2048, shared_hidden=2048, router=router)},
        ffn_pattern="fff" + 58 * "e",
    )


def gemma3_27b() -> DecoderConfig:
    """Gemma 3 27B's text model (Gemma team, 2025): five layers with a window of 1,024 to one without."""
    attention = AttentionConfig(num_heads=32, num_kv_heads=16, head_size=128, scale=168**-0.5, rope_theta=1e6)
    local = AttentionConfig(num_heads=32, num_kv_heads=16, head_size=128, scale=168**-0.5, window=1024)
    return DecoderConfig(
        vocab_size=262_208,
        width=5376,
        depth=62,
        mixer=attention,
        other_mixers={"w": local},
        mixer_pattern=10 * "wwwwwm" + "ww",
        ffn=GLUConfig(hidden=21_504, activation="gelu_tanh"),
        norm_placement="sandwich",
        embedding_scale=5376**0.5,
        tied=True,
    )


def gpt_oss_20b() -> DecoderConfig:
    """gpt-oss 20B (OpenAI, 2025): every second layer has a window of 128; without its biases and clamped gates."""
    attention = AttentionConfig(num_heads=64, num_kv_heads=8, head_size=64, qk_norm="none", sinks="learned")
    return DecoderConfig(
        vocab_size=201_088,
        width=2880,
        depth=24,
        mixer=attention,
        other_mixers={"w": attention.model_copy(update={"window": 128})},
        mixer_pattern="wm",
        ffn=MoEConfig(num_experts=32, top_k=4, hidden=2880),
    )


def mamba2_2_7b() -> DecoderConfig:
    """Mamba-2 2.7B (Dao and Gu, 2024): mixers alone."""
    return DecoderConfig(
        vocab_size=50_288,
        width=2560,
        depth=64,
        mixer=Mamba2Config(num_heads=80, head_size=64, state_size=128, norm_groups=1),
        ffn_pattern="-",
        tied=True,
    )


def qwen3_next_80b() -> DecoderConfig:
    """Qwen3-Next 80B (Qwen team, 2025): three layers of Gated DeltaNet to one of gated attention."""
    return DecoderConfig(
        vocab_size=151_936,
        width=2048,
        depth=48,
        mixer=AttentionConfig(
            num_heads=16, num_kv_heads=2, head_size=256, rope_share=0.25, rope_theta=1e7, gate="sigmoid"
        ),
        other_mixers={"d": GatedDeltaNetConfig(num_heads=32, num_key_heads=16, key_size=128, value_size=128)},
        mixer_pattern="dddm",
        ffn=MoEConfig(
            num_experts=512, top_k=10, hidden=512, shared_hidden=512, shared_weight="sigmoid", router=TopKConfig()
        ),
    )


def jamba_52b() -> DecoderConfig:
    """In the style of Jamba (Lieber et al., 2024), with Mamba-2: one layer of eight attends, every second has experts."""
    return DecoderConfig(
        vocab_size=65_536,
        width=4096,
        depth=32,
        mixer=AttentionConfig(num_heads=32, num_kv_heads=8, qk_norm="none", rope="none"),
        other_mixers={"s": Mamba2Config(num_heads=128, head_size=64, state_size=16)},
        mixer_pattern="ssssmsss",
        ffn=SwiGLUConfig(hidden=14_336),
        other_ffns={"e": MoEConfig(num_experts=16, top_k=2, hidden=14_336)},
        ffn_pattern="fe",
    )


def nemotron_h_8b() -> DecoderConfig:
    """Nemotron-H 8B (NVIDIA, 2025): one part a layer; 24 of Mamba-2, 24 networks, 4 of attention."""
    parts = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    return DecoderConfig(
        vocab_size=131_072,
        width=4096,
        depth=len(parts),
        mixer=AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128, qk_norm="none", rope="none"),
        other_mixers={"s": Mamba2Config(num_heads=128, head_size=64, state_size=128, num_groups=8, norm_groups=8)},
        mixer_pattern=parts.replace("M", "s").replace("*", "m"),
        ffn=MLPConfig(hidden=21_504, activation="relu2"),
        ffn_pattern="".join("f" if part == "-" else "-" for part in parts),
    )


def zamba2_2_7b() -> DecoderConfig:
    """In the style of Zamba2 2.7B (Glorioso et al., 2024): 54 layers of Mamba-2, and two transformer blocks that take turns
    before nine of them, as layers of their own; Zamba2 adds what a block finds to what the next mixer reads."""
    # In published layers, those of Mamba-2 before which a common block stands.
    before = dict(zip((6, 12, 18, 24, 30, 36, 42, 47, 51), "abababab" + "a", strict=True))
    common = CommonBlockConfig(
        attention=AttentionConfig(num_heads=32, num_kv_heads=32, qk_norm="none", rope="none", scale=80**-0.5),
        hidden=10_240,
        rank=128,
    )
    pattern = "".join(before.get(layer, "") + "m" for layer in range(54))
    return DecoderConfig(
        vocab_size=32_000,
        width=2560,
        depth=len(pattern),
        mixer=Mamba2Config(num_heads=80, head_size=64, state_size=64, norm_groups=1),
        other_mixers={"a": common, "b": common},
        mixer_pattern=pattern,
        ffn_pattern="-",
        tied=True,
    )


def falcon_h1_7b() -> DecoderConfig:
    """Falcon-H1 7B (Zuo et al., 2025): attention and Mamba-2 side by side in every layer; without its constant factors."""
    attention = AttentionConfig(num_heads=12, num_kv_heads=2, head_size=128, qk_norm="none", rope_theta=1e11)
    return DecoderConfig(
        vocab_size=130_048,
        width=3072,
        depth=44,
        mixer=SideBySideConfig(mixers=(attention, Mamba2Config(num_heads=24, head_size=128, state_size=256))),
        ffn=SwiGLUConfig(hidden=12_288),
    )


def rwkv7_2_9b() -> DecoderConfig:
    """RWKV-7 2.9B (Peng et al., 2025), its channel mixing without the shift by one position."""
    first = RWKV7Config(num_heads=40, head_size=64, rank=96, gate_rank=320)
    return DecoderConfig(
        vocab_size=65_536,
        width=2560,
        depth=32,
        mixer=first.model_copy(update={"values": "mixed"}),
        other_mixers={"r": first},
        mixer_pattern="r" + 31 * "m",
        ffn=MLPConfig(hidden=10_240, activation="relu2"),
    )
