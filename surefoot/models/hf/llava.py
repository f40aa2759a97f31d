"""LLaVA (Liu et al., 2023): CLIP's vision encoder before any language model that is known here."""

from __future__ import annotations

import torch

from surefoot.blocks.encoders.vision import VisionConfig
from surefoot.blocks.fusion.projector import ProjectorConfig
from surefoot.models.hf.family import Family, family_named, settings_for
from surefoot.models.hf.settings import Json, Settings
from surefoot.models.hf.weights import Tie, same
from surefoot.models.late_fusion import LateFusionConfig

CLIP_ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_ACTIVATIONS = CLIP_ACTIVATIONS | {"relu": "relu", "silu": "silu"}
_STRATEGIES = {"default": "dropped", "full": "kept"}


def read_word(settings: Settings, key: str, known: dict[str, str], default: str) -> str:
    """One of the `known` words as ours."""
    word = settings.word(key) if settings.says(key) else default
    if word not in known:
        raise settings.refuse(key, f"is not known to surefoot; known are {', '.join(known)}")
    return known[word]


def word_of(known: dict[str, str], own: str) -> str:
    """The word for one of ours."""
    return next(word for word, ours in known.items() if ours == own)


def read_vision(values: Json, where: str, model_type: str, width: str) -> VisionConfig:
    """A vision encoder; `width` is the key of its width."""
    settings = Settings(values, where)
    settings.expect(model_type=model_type, attention_dropout=(0.0, 0))
    settings.without_effect("projection_dim", "initializer_factor")
    config = VisionConfig(
        image_size=settings.whole("image_size"),
        patch_size=settings.whole("patch_size"),
        num_channels=settings.whole("num_channels", 3),
        width=settings.whole(width),
        depth=settings.whole("num_hidden_layers"),
        num_heads=settings.whole("num_attention_heads"),
        hidden=settings.whole("intermediate_size"),
        activation=read_word(settings, "hidden_act", CLIP_ACTIVATIONS, "quick_gelu"),  # type: ignore[arg-type]
        norm_eps=settings.number("layer_norm_eps", 1e-5),
    )
    settings.finish()
    return config


def write_vision(config: VisionConfig, model_type: str, width: str) -> Json:
    """What `read_vision` reads."""
    return {
        "model_type": model_type,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.num_channels,
        width: config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.hidden,
        "hidden_act": word_of(CLIP_ACTIVATIONS, config.activation),
        "layer_norm_eps": config.norm_eps,
        "attention_dropout": 0.0,
    }


def norm_ties(theirs: str, ours: str) -> list[Tie]:
    """A layer norm's scale and bias."""
    return [same(f"{theirs}.weight", f"{ours}.scale"), same(f"{theirs}.bias", f"{ours}.bias")]


def vision_ties(theirs: str, ours: str, config: VisionConfig) -> list[Tie]:
    """Of CLIP's names; patches are a convolution's taps (D, C, Y, X) on disk."""
    shape = (config.num_channels, config.patch_size, config.patch_size)

    ties = [
        same(f"{theirs}.embeddings.class_embedding", f"{ours}.patches.class_token"),
        Tie(
            (f"{theirs}.embeddings.patch_embedding.weight",),
            (f"{ours}.patches.w_patch",),
            lambda whole: [whole[0].flatten(1)],
            lambda own: [torch.unflatten(own[0], 1, shape)],
        ),
        same(f"{theirs}.embeddings.position_embedding.weight", f"{ours}.patches.places"),
        *norm_ties(f"{theirs}.pre_layrnorm", f"{ours}.norm"),  # as it is spelled
        *norm_ties(f"{theirs}.post_layernorm", f"{ours}.norm_class"),
    ]
    for index in range(config.depth):
        layer, own = f"{theirs}.encoder.layers.{index}", f"{ours}.layers.{index}"
        for name, letter in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("out_proj", "o")):
            ties += [
                same(f"{layer}.self_attn.{name}.weight", f"{own}.look.w{letter}"),
                same(f"{layer}.self_attn.{name}.bias", f"{own}.look.b{letter}"),
            ]
        for name, which in (("fc1", "up"), ("fc2", "down")):
            ties += [
                same(f"{layer}.mlp.{name}.weight", f"{own}.network.w_{which}"),
                same(f"{layer}.mlp.{name}.bias", f"{own}.network.b_{which}"),
            ]
        ties += norm_ties(f"{layer}.layer_norm1", f"{own}.norm_look")
        ties += norm_ties(f"{layer}.layer_norm2", f"{own}.norm_network")
    return ties


def _read(settings: Settings) -> LateFusionConfig:
    text, vision = settings.part("text_config"), settings.part("vision_config")
    if text is None or vision is None:
        key = "text_config" if text is None else "vision_config"
        raise settings.refuse(key, "is missing; repair the file")
    # A head is tied where either of the two says so.
    tied = settings.flag("tie_word_embeddings", False) or text.get("tie_word_embeddings") is True
    family = family_named(text.get("model_type", "llama"), f"{settings.where}: text_config")
    layer = settings.number("vision_feature_layer", -2)
    if layer != int(layer):
        raise settings.refuse("vision_feature_layer", "must be one whole number; surefoot joins no several")
    config = LateFusionConfig(
        text=family.decoder(text | {"tie_word_embeddings": tied}, f"{settings.where}: text_config"),
        vision=read_vision(vision, f"{settings.where}: vision_config", "clip_vision_model", "hidden_size"),
        projector=ProjectorConfig(
            activation=read_word(settings, "projector_hidden_act", _ACTIVATIONS, "gelu"),  # type: ignore[arg-type]
            bias="both" if settings.flag("multimodal_projector_bias", True) else "none",
        ),
        image_token=settings.whole("image_token_index", 32000),
        feature_layer=int(layer),
        class_token=read_word(settings, "vision_feature_select_strategy", _STRATEGIES, "default"),  # type: ignore[arg-type]
    )
    if settings.whole("image_seq_length", config.num_features) != config.num_features:
        raise settings.refuse(
            "image_seq_length", f"must be {config.num_features}, which is what an image has; repair it"
        )
    return config


def _write(config: LateFusionConfig) -> Json:
    _, text = settings_for(config.text)
    return {
        "text_config": text,
        "vision_config": write_vision(config.vision, "clip_vision_model", "hidden_size"),
        "image_token_index": config.image_token,
        "image_seq_length": config.num_features,
        "projector_hidden_act": word_of(_ACTIVATIONS, config.projector.activation),
        "multimodal_projector_bias": config.projector.bias == "both",
        "vision_feature_layer": config.feature_layer,
        "vision_feature_select_strategy": word_of(_STRATEGIES, config.class_token),
        "tie_word_embeddings": config.text.tied,
    }


def _ties(config: LateFusionConfig) -> list[Tie]:
    family, _ = settings_for(config.text)
    ties = [tie.within("language_model.", "text.") for tie in family.ties(config.text)]
    ties += vision_ties("vision_tower", "vision", config.vision)
    for theirs, ours in (("linear_1", "in"), ("linear_2", "out")):
        ties.append(same(f"multi_modal_projector.{theirs}.weight", f"projector.w_{ours}"))
        if config.projector.bias == "both":
            ties.append(same(f"multi_modal_projector.{theirs}.bias", f"projector.b_{ours}"))
    return ties


FAMILIES = (Family("llava", "LlavaForConditionalGeneration", _read, _write, _ties, kind=LateFusionConfig),)
