"""IDEFICS (Laurençon et al., 2023): Flamingo with Llama's layers, the perceiver's latents and CLIP's vision encoder."""

from __future__ import annotations

from typing import cast

from surefoot.blocks.ffn.swiglu import SwiGLUConfig
from surefoot.blocks.fusion.cross_attention import CrossAttentionConfig
from surefoot.blocks.fusion.resampler import ResamplerConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.models.cross_fusion import CrossFusionConfig
from surefoot.models.decoder import DecoderConfig
from surefoot.models.hf.family import Family, family_named
from surefoot.models.hf.llama import network_ties, read_attention, read_stem, write_attention, write_stem
from surefoot.models.hf.llava import norm_ties, read_vision, read_word, vision_ties, word_of, write_vision
from surefoot.models.hf.settings import Json, Settings
from surefoot.models.hf.weights import Tie, same

_GATES = {"float": "one", "vector": "vector"}
_NORMS = {False: "none", True: "head"}
_TRAINING = (
    "alpha_initializer",
    "alphas_initializer_range",
    "freeze_lm_head",
    "freeze_text_layers",
    "freeze_text_module_exceptions",
    "freeze_vision_layers",
    "freeze_vision_module_exceptions",
)
"""How gates start and what is left as it is: of another program's training, and of no logits."""


def _read(settings: Settings) -> CrossFusionConfig:
    settings.expect(hidden_act="silu", dropout=(0.0, 0), additional_vocab_size=0)
    settings.without_effect(*_TRAINING)
    vision = settings.part("vision_config")
    if vision is None:
        raise settings.refuse("vision_config", "is missing; repair the file")
    hidden = settings.whole("intermediate_size")
    text = DecoderConfig(
        **read_stem(settings), mixer=read_attention(settings, qk_norm="none"), ffn=SwiGLUConfig(hidden=hidden)
    )
    return CrossFusionConfig(
        text=text,
        vision=read_vision(vision, f"{settings.where}: vision_config", "idefics_vision", "embed_dim"),
        cross=CrossAttentionConfig(
            num_heads=cast(AttentionConfig, text.mixer).num_heads,
            hidden=hidden,
            qk_norm=_NORMS[settings.flag("qk_layer_norms", False)],  # type: ignore[arg-type]
            gate=read_word(settings, "alpha_type", _GATES, "float"),  # type: ignore[arg-type]
            norm_eps=text.norm_eps,
        ),
        every=settings.whole("cross_layer_interval", 1),
        resampler=_read_resampler(settings),
    )


def _read_resampler(settings: Settings) -> ResamplerConfig | None:
    values = settings.part("perceiver_config")
    if not settings.flag("use_resampler", False):
        return None
    inner = Settings(values or {}, f"{settings.where}: perceiver_config")
    inner.expect(model_type=("idefics_perciever", "idefics_perceiver"))  # the first as it is spelled
    inner.without_effect("use_resampler")  # the flag outside decides
    config = ResamplerConfig(
        num_latents=inner.whole("resampler_n_latents", 64),
        depth=inner.whole("resampler_depth", 6),
        num_heads=inner.whole("resampler_n_heads", 16),
        head_size=inner.whole("resampler_head_dim", 96),
        qk_norm=_NORMS[inner.flag("qk_layer_norms_perceiver", False)],  # type: ignore[arg-type]
    )
    inner.finish()
    return config


def _write(config: CrossFusionConfig) -> Json:
    text, resampler = config.text, config.resampler
    values = write_stem(text) | write_attention(cast(AttentionConfig, text.mixer), text.width)
    for key in ("num_key_value_heads", "head_dim", "attention_dropout"):  # it has no words for these
        del values[key]
    values |= {
        "intermediate_size": cast(SwiGLUConfig, text.ffn).hidden,
        "hidden_act": "silu",
        "dropout": 0.0,
        "additional_vocab_size": 0,
        "vision_config": write_vision(config.vision, "idefics_vision", "embed_dim"),
        "qk_layer_norms": config.cross.qk_norm == "head",
        "alpha_type": word_of(_GATES, config.cross.gate),
        "cross_layer_interval": config.every,
        "use_resampler": resampler is not None,
        "freeze_lm_head": False,
        "freeze_text_layers": False,
        "freeze_vision_layers": False,
    }
    if resampler is not None:
        values["perceiver_config"] = {
            "resampler_n_latents": resampler.num_latents,
            "resampler_depth": resampler.depth,
            "resampler_n_heads": resampler.num_heads,
            "resampler_head_dim": resampler.head_size,
            "qk_layer_norms_perceiver": resampler.qk_norm == "head",
        }
    return values


def _gate_tie(theirs: str, ours: str, gate: str) -> Tie:
    if gate == "one":
        return same(theirs, ours)
    return Tie((theirs,), (ours,), lambda whole: [whole[0].flatten()], lambda own: [own[0].view(1, 1, -1)])


def _ties(config: CrossFusionConfig) -> list[Tie]:
    ties = [tie.within("", "text.") for tie in family_named("llama", "idefics").ties(config.text)]
    ties += vision_ties("model.vision_model", "vision", config.vision)
    for index in range(config.text.depth // config.every):
        theirs, ours = f"model.gated_cross_attn_layers.{index}", f"cross.{index}"
        ties += [same(f"{theirs}.cross_attn.{name}_proj.weight", f"{ours}.w{name}") for name in "qkvo"]
        if config.cross.qk_norm == "head":
            ties += [
                same(f"{theirs}.cross_attn.{name}_layer_norm.weight", f"{ours}.norm_{name}.scale") for name in "qk"
            ]
        ties += [
            _gate_tie(f"{theirs}.alpha_cross_attn", f"{ours}.gate_read", config.cross.gate),
            _gate_tie(f"{theirs}.alpha_dense", f"{ours}.gate_network", config.cross.gate),
            same(f"{theirs}.input_layernorm.weight", f"{ours}.norm_read.scale"),
            same(f"{theirs}.post_attention_layernorm.weight", f"{ours}.norm_network.scale"),
            *network_ties(f"{theirs}.mlp", f"{ours}.network"),
        ]
    return ties + (_resampler_ties(config.resampler) if config.resampler is not None else [])


def _resampler_ties(config: ResamplerConfig) -> list[Tie]:
    root, own = "model.perceiver_resampler", "resampler"
    ties = [same(f"{root}.latents", f"{own}.latents"), *norm_ties(f"{root}.layer_norm", f"{own}.norm")]
    for index in range(config.depth):
        read, network, ours = f"{root}.blocks.{index}.0", f"{root}.blocks.{index}.1", f"{own}.layers.{index}"
        ties += [same(f"{read}.{name}_proj.weight", f"{ours}.w{name}") for name in "qkv"]
        ties += [
            same(f"{read}.output_proj.weight", f"{ours}.wo"),
            *norm_ties(f"{read}.context_layer_norm", f"{ours}.norm_features"),
            *norm_ties(f"{read}.latents_layer_norm", f"{ours}.norm_latents"),
            *norm_ties(f"{network}.ln", f"{ours}.norm_network"),
            same(f"{network}.fc.weight", f"{ours}.network.w_up"),
            same(f"{network}.c_proj.weight", f"{ours}.network.w_down"),
        ]
        if config.qk_norm == "head":
            for name in "qk":
                ties += norm_ties(f"{read}.{name}_layer_norm", f"{ours}.norm_{name}")
    return ties


FAMILIES = (Family("idefics", "IdeficsForVisionText2Text", _read, _write, _ties, kind=CrossFusionConfig),)
