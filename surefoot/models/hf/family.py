"""`Family`: one architecture of transformers and the models that are the same function."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from types import ModuleType
from typing import Any

from surefoot.blocks.base import FeedForwardConfig, MixerConfig
from surefoot.blocks.mixers.attention import AttentionConfig
from surefoot.config import Config, ConfigError, to_dict
from surefoot.models.decoder import DecoderConfig
from surefoot.models.hf.settings import Json, Settings
from surefoot.models.hf.weights import Tie
from surefoot.models.multimodal import ModelConfig

# What a decoder says of its training and its speed, of which a published model says nothing.
_NO_FUNCTION = {"z_loss", "residual_init", "balance_loss", "scope", "bias_rate", "dt_min", "dt_max", "block"}


@dataclass(frozen=True)
class Family:
    """`read` and `write` translate settings, `ties` names the weights of a model that `read` gave.

    `write` may say less than a decoder holds: `settings_of` reads what was written back, and refuses where that is another
    decoder. So import and export cannot disagree, and no family lists what it cannot express.
    """

    name: str
    architecture: str
    read: Callable[[Settings], ModelConfig]
    write: Callable[[Any], Json]
    ties: Callable[[Any], list[Tie]]
    is_general: bool = False
    """Whether its options express models of other families, too, which are then to be preferred."""
    kind: type[ModelConfig] = DecoderConfig
    """What `read` gives and the others take."""

    def decoder(self, values: Mapping[str, Any], where: str) -> DecoderConfig:
        """`model`, where it is one of text alone, as all that a run trains is; else `ConfigError`."""
        config = self.model(values, where)
        if not isinstance(config, DecoderConfig):
            raise ConfigError(
                f"{where}: model_type",
                self.name,
                "reads images, which no run trains on yet; it can be read, used and written by surefoot.checkpoint.hub",
            )
        return config

    def model(self, values: Mapping[str, Any], where: str) -> ModelConfig:
        """The model that a config.json describes; `ConfigError` for anything in it that surefoot cannot express."""
        settings = Settings(values, where)
        try:
            config = self.read(settings)
        except ConfigError as error:
            if error.path.startswith(where):
                raise
            raise ConfigError(f"{where}: {error.path}", error.value, error.remedy) from None
        settings.finish()
        return config

    def settings_of(self, config: ModelConfig) -> Json:
        """The config.json of a model; `ConfigError` names what this family cannot express."""
        if not isinstance(config, self.kind):
            raise ConfigError("model", type(config).__name__, f"is not what {self.name} is; choose another")
        try:
            values = {"architectures": [self.architecture], "model_type": self.name} | self.write(config)
            back = function_of(self.model(values, self.name))
        except (AttributeError, ConfigError) as error:  # an attribute that this kind of part does not have
            raise ConfigError("model", self.name, f"cannot express this model ({error}); choose another") from None
        own = function_of(config)
        for path in dict.fromkeys([*own, *back]):
            if own.get(path) != back.get(path):
                raise ConfigError(
                    f"model.{path}", own.get(path), f"cannot be expressed by {self.name}, which has {back.get(path)!r}"
                )
        return values


def families() -> dict[str, Family]:
    """Every family of this package by its name."""
    package = importlib.import_module("surefoot.models.hf")
    modules: list[ModuleType] = [
        importlib.import_module(f"{package.__name__}.{info.name}") for info in pkgutil.iter_modules(package.__path__)
    ]
    return {family.name: family for module in modules for family in getattr(module, "FAMILIES", ())}


def family_of(values: Mapping[str, Any], where: str) -> Family:
    """The family that a config.json names; `ConfigError` for one that surefoot does not know."""
    family, name, architectures = (
        family_named(values.get("model_type"), where),
        values["model_type"],
        values.get("architectures"),
    )
    if architectures not in (None, [family.architecture]):
        raise ConfigError(
            f"{where}: architectures",
            architectures,
            f"is not a language model; of {name} only {family.architecture} is",
        )
    return family


def family_named(name: object, where: str) -> Family:
    """By `model_type`; `ConfigError` for one that surefoot does not know."""
    known = families()
    if not isinstance(name, str) or name not in known:
        raise ConfigError(f"{where}: model_type", name, f"is not known; known are {', '.join(sorted(known))}")
    return known[name]


def settings_for(config: ModelConfig) -> tuple[Family, Json]:
    """The plainest family that expresses a model, and its config.json; else `ConfigError` says why each does not."""
    reasons = []
    for family in sorted(families().values(), key=lambda family: (family.is_general, family.name)):
        try:
            return family, family.settings_of(config)
        except ConfigError as error:
            reasons.append(f"{family.name} because of {error.path}")
    raise ConfigError("model", "", f"is no architecture of transformers: not {', not '.join(reasons)}")


def function_of(config: ModelConfig) -> dict[str, object]:
    """What decides a model's logits, by path, the same for all ways of writing it."""
    leaves: dict[str, object] = {}
    if not isinstance(config, DecoderConfig):
        leaves = {f"text.{path}": value for path, value in function_of(config.text).items()}

    def walk(value: object, path: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                if key not in _NO_FUNCTION:
                    walk(item, f"{path}.{key}" if path else str(key))
        else:
            leaves[path] = value

    if not isinstance(config, DecoderConfig):
        for name, value in to_dict(config).items():
            if name != "text":
                walk({name: value}, "")
        return leaves
    for name, value in to_dict(config).items():
        if not name.startswith(("mixer", "other_mixers", "ffn", "other_ffns")):
            walk({name: value}, "")
    for layer in range(config.depth):
        parts: tuple[Config | None, ...] = (_explicit(config.mixer_of(layer), config.width), config.ffn_of(layer))
        for name, part in zip(("mixer", "ffn"), parts, strict=True):
            walk(None if part is None else to_dict(part), f"layers.{layer}.{name}")
    return leaves


def _explicit(mixer: MixerConfig | None, width: int) -> MixerConfig | None:
    if not isinstance(mixer, AttentionConfig):
        return mixer
    size = mixer.head_size or width // mixer.num_heads
    return mixer.model_copy(update={"head_size": size, "scale": mixer.scale or size**-0.5})


def by_layer(mixers: Sequence[MixerConfig | None], ffns: Sequence[FeedForwardConfig | None]) -> dict[str, Any]:
    """The fields of a `DecoderConfig` that give each layer its mixer and its network, by patterns as short as can be.

    The kind of the last layer that has one is `mixer` or `ffn`; the others get letters in the order in which they come.
    """
    fields: dict[str, Any] = {}
    named: tuple[tuple[str, str, Sequence[object]], ...] = (("mixer", "m", mixers), ("ffn", "f", ffns))
    for field, first, parts in named:
        kinds = [part for part in reversed(parts) if part is not None][:1]
        for part in parts:
            if part is not None and part not in kinds:
                kinds.append(part)
        letters = [first, *(letter for letter in ascii_lowercase if letter != first)][: len(kinds)]
        text = "".join("-" if part is None else letters[kinds.index(part)] for part in parts)
        period = next(n for n in range(1, len(text) + 1) if len(text) % n == 0 and text[:n] * (len(text) // n) == text)
        fields |= {
            field: kinds[0],
            f"other_{field}s": dict(zip(letters[1:], kinds[1:], strict=True)),
            f"{field}_pattern": text[:period],
        }
    return fields
