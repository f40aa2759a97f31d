"""A config.json read so that nothing in it is passed over: each value is taken, expected, known to decide nothing, or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.config import ConfigError

Json = dict[str, Any]

# What transformers writes for its own use, and what neither logits nor their gradients depend on.
WITHOUT_EFFECT = (
    "architectures",
    "model_type",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
    "max_position_embeddings",
    "pretraining_tp",
    "output_router_logits",
    "router_aux_loss_coef",
    "_name_or_path",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_experts_implementation",
)


class Settings:
    """The values of a config.json (`where`); errors name the file's key, its value and what may be done."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self.where = dict(values), where
        self._read = set(WITHOUT_EFFECT)

    def says(self, key: str) -> bool:
        """Whether the key is given, be it as null."""
        return key in self._values

    def refuse(self, key: str, remedy: str) -> ConfigError:
        """An error about one key, to raise."""
        return ConfigError(f"{self.where}: {key}", self._values.get(key), remedy)

    def whole(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._take(key, default)
        if type(value) is not int or value < 1:
            raise self.refuse(key, "must be a positive whole number; repair the file")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._take(key, default)
        if type(value) not in (int, float) or not abs(value) < float("inf"):
            raise self.refuse(key, "must be a finite number; repair the file")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._take(key, default)
        if type(value) is not bool:
            raise self.refuse(key, "must be true or false; repair the file")
        return value

    def optional_number(self, key: str) -> float | None:
        """A number, or None where it is null or absent."""
        self._read.add(key)
        return self.number(key) if self._values.get(key) is not None else None

    def optional_whole(self, key: str) -> int | None:
        """A positive integer, or None where it is null or absent."""
        self._read.add(key)
        return self.whole(key) if self._values.get(key) is not None else None

    def part(self, key: str) -> Json | None:
        """A nested object, or None where it is null or absent."""
        self._read.add(key)
        value = self._values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(key, "must be an object; repair the file")
        return value

    def word(self, key: str) -> str | None:
        """Text; None where it is null or absent, or no text."""
        self._read.add(key)
        value = self._values.get(key)
        return value if isinstance(value, str) else None

    def limits(self, key: str) -> tuple[float, float] | None:
        """A least and a largest value; None where anything from 0 is within, as transformers writes infinity."""
        self._read.add(key)
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2:
            raise self.refuse(key, "must be a list of two numbers; repair the file")
        infinite = {"__float__": "Infinity"}
        low, high = (float("inf") if item == infinite else item for item in value)
        if not all(type(item) in (int, float) for item in (low, high)) or not 0 <= low < high:
            raise self.refuse(key, "must be a list of two numbers from 0, in order; repair the file")
        if high == float("inf"):
            if low:
                raise self.refuse(key, "has a least value alone, which surefoot cannot express")
            return None
        return float(low), float(high)

    def words(self, key: str, count: int, known: Sequence[str]) -> list[str] | None:
        """`count` of the `known` words, or None where the key is null or absent."""
        self._read.add(key)
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count or any(word not in known for word in value):
            raise self.refuse(key, f"must be a list of {count} of {', '.join(known)}; surefoot has no other kinds")
        return value

    def wholes(self, key: str) -> list[int]:
        """A list of integers from 0; empty where it is null or absent."""
        self._read.add(key)
        value = self._values.get(key) or []
        if not isinstance(value, list) or any(type(item) is not int or item < 0 for item in value):
            raise self.refuse(key, "must be a list of whole numbers; repair the file")
        return value

    def expect(self, **wanted: Any) -> None:
        """Values that alone surefoot can express, where the keys are given at all (a tuple holds alternatives)."""
        for key, only in wanted.items():
            self._read.add(key)
            allowed = only if isinstance(only, tuple) else (only,)
            if key in self._values and not any(
                type(self._values[key]) is type(one) and self._values[key] == one for one in allowed
            ):
                shown = " or ".join(map(repr, allowed))
                raise self.refuse(key, f"changes the model in a way that surefoot cannot express; only {shown} can be")

    def without_effect(self, *keys: str) -> None:
        """Keys that decide nothing here."""
        self._read.update(keys)

    def finish(self) -> None:
        """Refuse the first key that nothing has read."""
        for key in self._values:
            if key not in self._read:
                raise self.refuse(key, "is not known to surefoot, and may change the model; remove it if it does not")

    def _take(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self._values.get(key)
        if value is None and default is None:
            raise ConfigError(f"{self.where}: {key}", None, "is missing; repair the file")
        return default if value is None else value
