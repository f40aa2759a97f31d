"""DeepSeek-V3 (DeepSeek-AI, 2024): latent attention, first layers dense, then sigmoid routing in groups and shared experts."""

from __future__ import annotations

import math
from typing import cast

from surefoot.blocks.base import FeedForwardConfig, MixerConfig
from surefoot.blocks.ffn.moe import MoEConfig
from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.mixers.mla import MLAConfig
from surefoot.blocks.rope import YarnScaling
from surefoot.blocks.routers.sigmoid import SigmoidConfig
from surefoot.models.decoder import DecoderConfig
from surefoot.models.hf.family import Family, by_layer
from surefoot.models.hf.llama import layer_ties, network_ties, read_stem, write_stem
from surefoot.models.hf.qwen3_moe import expert_ties
from surefoot.models.hf.rope import read_rope, write_rope
from surefoot.models.hf.settings import Json, Settings
from surefoot.models.hf.weights import Tie, grouped, joined, same


def _read_attention(settings: Settings) -> MLAConfig:
    num_heads = settings.whole("num_attention_heads")
    head_size, rope_size = settings.whole("qk_nope_head_dim", 128), settings.whole("qk_rope_head_dim", 64)
    # What only repeats other values.
    settings.expect(
        num_key_value_heads=num_heads,
        qk_head_dim=head_size + rope_size,
        head_dim=rope_size,
        attention_bias=False,
        attention_dropout=(0.0, 0),
    )
    positions = read_rope(settings)
    said = settings.part("rope_parameters") or settings.part("rope_scaling") or {}
    scale = None
    if isinstance(positions["rope_scaling"], YarnScaling):
        # Beside cosines and sines the scores themselves, by the one of the two coefficients that holds for all components.
        scale = _scale(head_size + rope_size, positions["rope_scaling"].factor, said.get("mscale_all_dim") or 0.0)
    return MLAConfig(
        num_heads=num_heads,
        latent_size=settings.whole("kv_lora_rank", 512),
        q_latent_size=settings.optional_whole("q_lora_rank"),
        head_size=head_size,
        rope_size=rope_size,
        value_size=settings.whole("v_head_dim", 128),
        rope="interleaved" if settings.flag("rope_interleave", True) else "half",
        scale=scale,
        norm_eps=1e-6,  # whatever `rms_norm_eps` is, which holds for the layers' norms
        **positions,
    )


def _scale(size: int, factor: float, coefficient: float) -> float | None:
    """Of products; None where it is the usual one."""
    return size**-0.5 * (0.1 * coefficient * math.log(factor) + 1) ** 2 if coefficient and factor > 1 else None


def _write_attention(mixer: MLAConfig) -> Json:
    size = mixer.head_size + mixer.rope_size
    values = write_rope(mixer)
    if mixer.scale is not None and isinstance(mixer.rope_scaling, YarnScaling) and mixer.rope_scaling.factor > 1:
        growth = 0.1 * math.log(mixer.rope_scaling.factor)
        times = math.sqrt(mixer.scale * size**0.5)
        # To nine places, so that a coefficient once read is written as it was; one that needs more is refused as another.
        coefficients = {"mscale_all_dim": round((times - 1) / growth, 9)}
        if mixer.rope_scaling.amplitude is not None:
            coefficients["mscale"] = round((mixer.rope_scaling.amplitude * times - 1) / growth, 9)
        for key in ("rope_scaling", "rope_parameters"):
            values[key] |= coefficients
    return values | {
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_heads,
        "kv_lora_rank": mixer.latent_size,
        "q_lora_rank": mixer.q_latent_size,
        "qk_nope_head_dim": mixer.head_size,
        "qk_rope_head_dim": mixer.rope_size,
        "qk_head_dim": size,
        "head_dim": mixer.rope_size,
        "v_head_dim": mixer.value_size,
        "rope_interleave": mixer.rope == "interleaved",
        "attention_bias": False,
        "attention_dropout": 0.0,
    }


def _read(settings: Settings) -> DecoderConfig:
    stem = read_stem(settings)
    settings.expect(
        hidden_act="silu",
        norm_topk_prob=True,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        moe_layer_freq=1,
        num_nextn_predict_layers=0,
    )
    settings.without_effect("ep_size", "aux_loss_alpha", "seq_aux")
    hidden = settings.whole("moe_intermediate_size")
    experts = MoEConfig(
        num_experts=settings.whole("n_routed_experts"),
        top_k=settings.whole("num_experts_per_tok"),
        hidden=hidden,
        shared_hidden=settings.whole("n_shared_experts") * hidden,
        router=SigmoidConfig(
            scale=settings.number("routed_scaling_factor"),
            num_groups=settings.whole("n_group"),
            top_groups=settings.whole("topk_group"),
            balance_loss=0.0,
        ),
    )
    dense = SwiGLUConfig(hidden=settings.whole("intermediate_size"))
    first = settings.number("first_k_dense_replace")
    ffns: list[FeedForwardConfig] = [dense if layer < first else experts for layer in range(stem["depth"])]
    return DecoderConfig(**stem, **by_layer([_read_attention(settings)] * stem["depth"], ffns))


def _write(config: DecoderConfig) -> Json:
    ffns = [config.ffn_of(layer) for layer in range(config.depth)]
    experts = next((ffn for ffn in ffns if isinstance(ffn, MoEConfig)), cast(MoEConfig, config.ffn))
    router = cast(SigmoidConfig, experts.router)
    return (
        write_stem(config)
        | _write_attention(cast(MLAConfig, config.mixer))
        | {
            "n_routed_experts": experts.num_experts,
            "num_experts_per_tok": experts.top_k,
            "moe_intermediate_size": experts.hidden,
            "n_shared_experts": experts.shared_hidden // experts.hidden,
            "routed_scaling_factor": router.scale,
            "n_group": router.num_groups,
            "topk_group": router.top_groups,
            "norm_topk_prob": True,
            "first_k_dense_replace": sum(isinstance(ffn, SwiGLUConfig) for ffn in ffns),
            "intermediate_size": next((ffn.hidden for ffn in ffns if isinstance(ffn, SwiGLUConfig)), experts.hidden),
            "hidden_act": "silu",
            "num_nextn_predict_layers": 0,
        }
    )


def _attention_ties(theirs: str, ours: str, mixer: MLAConfig) -> list[Tie]:
    """Keys and values of one head lie together; what is made of x for all heads, the latent and the turning key, too."""
    if mixer.q_latent_size is None:
        queries = [same(f"{theirs}.q_proj.weight", f"{ours}.wq")]
    else:
        queries = [
            same(f"{theirs}.q_a_proj.weight", f"{ours}.wq_down"),
            same(f"{theirs}.q_a_layernorm.weight", f"{ours}.norm_q.scale"),
            same(f"{theirs}.q_b_proj.weight", f"{ours}.wq"),
        ]
    down, up = [f"{ours}.w_down", f"{ours}.w_kr"], [f"{ours}.up_k.weight", f"{ours}.up_v.weight"]
    return [
        *queries,
        joined(f"{theirs}.kv_a_proj_with_mqa.weight", down, [mixer.latent_size, mixer.rope_size]),
        same(f"{theirs}.kv_a_layernorm.weight", f"{ours}.norm_c.scale"),
        grouped(f"{theirs}.kv_b_proj.weight", up, mixer.num_heads, [mixer.head_size, mixer.value_size]),
        same(f"{theirs}.o_proj.weight", f"{ours}.out.weight"),
    ]


def _network_ties(theirs: str, ours: str, ffn: FeedForwardConfig | None) -> list[Tie]:
    if not isinstance(ffn, MoEConfig):
        return network_ties(theirs, ours)
    return [
        *expert_ties(theirs, ours, ffn.num_experts),
        same(f"{theirs}.gate.e_score_correction_bias", f"{ours}.router.bias_E"),
        *(
            same(f"{theirs}.shared_experts.{name}_proj.weight", f"{ours}.shared_{name}")
            for name in ("gate", "up", "down")
        ),
    ]


def _ties(config: DecoderConfig) -> list[Tie]:
    def of_mixer(theirs: str, ours: str, mixer: MixerConfig | None) -> list[Tie]:
        return _attention_ties(f"{theirs}.self_attn", ours, cast(MLAConfig, mixer))

    return layer_ties(config, of_mixer, lambda theirs, ours, ffn: _network_ties(f"{theirs}.mlp", ours, ffn))


FAMILIES = (Family("deepseek_v3", "DeepseekV3ForCausalLM", _read, _write, _ties),)
