"""Rotary positions in a config.json: `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` before it."""

from __future__ import annotations

import math
from typing import Any

from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.blocks.mixers.mla import MLAConfig
from surefoot.blocks.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from surefoot.config import ConfigError
from surefoot.models.hf.settings import Json, Settings

_THETA, _SHARE = 10_000.0, "partial_rotary_factor"


def read_rope(settings: Settings, share: float | None = None) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` as fields of `AttentionConfig`.

    Also `rope_share` where a family knows one, which is `share` where the file says nothing.
    """
    new, old = settings.part("rope_parameters"), settings.part("rope_scaling")
    theta = settings.number("rope_theta", (new or {}).get("rope_theta") or _THETA)
    values = dict(new or old or {})
    if values.setdefault("rope_theta", theta) != theta:
        raise settings.refuse("rope_theta", f"is {values['rope_theta']!r} in rope_parameters; make them one")
    if new is not None and old is not None and _kind(new) != _kind(old):
        raise settings.refuse("rope_scaling", "is not what rope_parameters says; make them one")
    inner = Settings(values, f"{settings.where}: rope_parameters")
    inner.without_effect("rope_theta", "rope_type", "type")
    scaling = _scaling(_kind(values), inner, settings)
    turning = {}
    if share is not None:
        turning["rope_share"] = inner.number(_SHARE, settings.number(_SHARE, share))
    inner.finish()
    return {"rope_theta": inner.number("rope_theta"), "rope_scaling": scaling, **turning}


def _kind(values: Json) -> object:
    return values.get("rope_type") or values.get("type") or "default"


def _scaling(kind: object, values: Settings, settings: Settings) -> RopeScaling | None:
    if kind == "default":
        return None
    factor = values.number("factor")
    if kind == "linear":
        return LinearScaling(factor=factor)
    original = values.whole("original_max_position_embeddings", settings.optional_whole("max_position_embeddings"))
    if kind == "llama3":
        return Llama3Scaling(
            factor=factor,
            original_length=original,
            low_factor=values.number("low_freq_factor"),
            high_factor=values.number("high_freq_factor"),
        )
    if kind == "yarn":
        return YarnScaling(
            factor=factor,
            original_length=original,
            fast_turns=values.number("beta_fast", 32.0),
            slow_turns=values.number("beta_slow", 1.0),
            bounds="whole" if values.flag("truncate", True) else "exact",
            amplitude=_amplitude(factor, values),
        )
    raise values.refuse("rope_type", "is not known to surefoot; known are default, linear, llama3 and yarn")


def _amplitude(factor: float, values: Settings) -> float | None:
    """Of cosines and sines: DeepSeek's two coefficients as their ratio, as transformers has it."""
    given = values.optional_number("attention_factor")
    own, all_dim = values.optional_number("mscale"), values.optional_number("mscale_all_dim")
    if given is not None or not own or not all_dim or factor <= 1:
        return given
    return (0.1 * own * math.log(factor) + 1) / (0.1 * all_dim * math.log(factor) + 1)


def write_rope(mixer: AttentionConfig | MLAConfig) -> Json:
    """Both forms: readers of one pass over the other."""
    scaling, values = mixer.rope_scaling, {}
    if isinstance(scaling, LinearScaling):
        values = {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, Llama3Scaling):
        values = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_length,
            "low_freq_factor": scaling.low_factor,
            "high_freq_factor": scaling.high_factor,
        }
    elif isinstance(scaling, YarnScaling):
        values = {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_length,
            "beta_fast": scaling.fast_turns,
            "beta_slow": scaling.slow_turns,
            "truncate": scaling.bounds == "whole",
        } | ({} if scaling.amplitude is None else {"attention_factor": scaling.amplitude})
    elif scaling is not None:
        raise ConfigError("model.mixer.rope_scaling", type(scaling).__name__, "has no name in transformers")
    share = {_SHARE: mixer.rope_share} if isinstance(mixer, AttentionConfig) and mixer.rope_share != 1 else {}
    return {
        "rope_theta": mixer.rope_theta,
        "rope_scaling": values or None,
        "rope_parameters": {"rope_type": "default", **values, **share, "rope_theta": mixer.rope_theta},
        **share,
    }
