"""`Config`: the frozen description of one object, and its way to and from plain dictionaries.

A configuration nests as the objects it describes do. Written down, each nested object carries its import path under the
key `type`, so that a saved run rebuilds the same classes without a registry. Reading one back imports nothing but
`Config` classes of surefoot and of packages that the caller names (`allow`).
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import json
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Union, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from surefoot.config.errors import ConfigError

TYPE = "type"
C = TypeVar("C", bound="Config")


class FieldError(ValueError):
    """Raised inside a validator to blame one field: `FieldError("num_heads", 7, "must divide width 256")`."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field, self.value, self.remedy = field, value, remedy
        super().__init__(f"{field}: {value!r}: {remedy}")


class Config(BaseModel):
    """Describes one object; frozen, strict about types, and without room for unknown keys.

    A subclass adds `build(**runtime)` with its own signature: what only the running process knows (a vocabulary size, a
    device) arrives there and nowhere else. Raises `ConfigError` on an invalid value.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=False,
        validate_default=True,
    )

    def __init__(self, **values: Any) -> None:
        _refuse_unknown(type(self), values, type(self).__name__)
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _translate(error, type(self).__name__) from None


def type_tag(cls: type) -> str:
    """The import path under which a class is saved."""
    return f"{cls.__module__}.{cls.__qualname__}"


def to_dict(config: Config) -> dict[str, Any]:
    """A plain, JSON-ready dictionary; every nested `Config` carries its `type`."""

    def plain(value: Any) -> Any:
        if isinstance(value, Config):
            return {TYPE: type_tag(type(value))} | {
                name: plain(getattr(value, name)) for name in type(value).model_fields
            }
        if isinstance(value, (tuple, list)):
            return [plain(item) for item in value]
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, Path):
            return str(value)
        return value

    return cast(dict[str, Any], plain(config))


def to_json(config: Config) -> str:
    """The configuration as stable, indented JSON text ending in a newline."""
    return json.dumps(to_dict(config), indent=2, ensure_ascii=False) + "\n"


def fingerprint(config: Config) -> str:
    """sha256 (hex) of the configuration's canonical JSON."""
    text = json.dumps(to_dict(config), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def from_dict(
    data: object,
    expected: type[C],
    *,
    path: str = "",
    allow: Iterable[str] = (),
    known: Mapping[str, type[Config]] | None = None,
) -> C:
    """Rebuild a configuration from `to_dict`'s output.

    `allow` names packages besides surefoot whose `Config` classes may be imported; `known` maps tags to classes that are
    already in hand (they need no import). Raises `ConfigError` with the dotted path of the first thing that is wrong.
    """
    where = path or expected.__name__
    if not isinstance(data, Mapping):
        raise ConfigError(
            where, data, f"must be an object describing a {expected.__name__}, not a {type(data).__name__}"
        )
    values = dict(data)
    tag = values.pop(TYPE, None)
    cls: type[Config] = expected if tag is None else resolve(tag, path=_join(path, TYPE), allow=allow, known=known)
    if not issubclass(cls, expected):
        raise ConfigError(_join(path, TYPE), tag, f"is not a kind of {expected.__name__}")
    if cls.__abstractmethods__:
        raise ConfigError(
            _join(path, TYPE), tag, f"describes nothing by itself; name a class that is a kind of {cls.__name__}"
        )
    _refuse_unknown(cls, values, path)
    hints = _hints(cls)
    nested = {
        name: _convert(value, hints[name], _join(path, name), allow=tuple(allow), known=known or {})
        for name, value in values.items()
    }
    try:
        config = cls.__new__(cls)
        BaseModel.__init__(config, **nested)
    except ValidationError as error:
        raise _translate(error, path) from None
    return config


def load_json(file: Path, expected: type[C], *, allow: Iterable[str] = ()) -> C:
    """Read a saved configuration; `ConfigError` names the file where it is missing, truncated or not JSON."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(file), None, f"cannot be read ({error}); name a run.json written by surefoot") from None
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(
            str(file), text[:40], f"is not complete JSON ({error}); name a run.json written by surefoot"
        ) from None
    return from_dict(data, expected, allow=allow)


def resolve(
    tag: object, *, path: str = TYPE, allow: Iterable[str] = (), known: Mapping[str, type[Config]] | None = None
) -> type[Config]:
    """The `Config` class that a tag names. Imports only from surefoot and from the packages in `allow`."""
    if not isinstance(tag, str) or not all(part.isidentifier() for part in tag.split(".")) or "." not in tag:
        raise ConfigError(path, tag, "is not an import path like surefoot.optim.adamw.AdamWConfig")
    if known and tag in known:
        return known[tag]
    package = tag.split(".")[0]
    if package not in {"surefoot", *allow}:
        raise ConfigError(
            path,
            tag,
            f"comes from {package!r}, and importing it would run its code; if you trust it, add --allow {package}",
        )
    module_name, _, name = tag.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except ImportError:
        found = None
    if not (isinstance(found, type) and issubclass(found, Config) and found.__module__ == module_name):
        raise ConfigError(path, tag, "is not a Config class; was it renamed in another version?")
    return found


def override(config: C, assignments: Sequence[str]) -> C:
    """A copy of `config` with assignments like `optim.lr=3e-4` applied in order.

    The value is read as JSON (`null`, `true`, numbers, objects) and otherwise taken as text. Assigning `x.type` replaces
    the object at `x` by that class with its defaults. Raises `ConfigError`.
    """
    data = to_dict(config)
    known = {type_tag(type(part)): type(part) for part in _parts(config)}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            raise ConfigError(assignment, None, "is not an assignment; write --set path.to.field=value")
        _assign(data, path, _parse(text), known)
    return from_dict(data, type(config), known=known)


def diff(left: Config, right: Config) -> list[tuple[str, object, object]]:
    """The leaves that differ, as (dotted path, left, right) in path order; a missing leaf shows as `None`."""
    flat_left, flat_right = flatten(left), flatten(right)
    paths = dict.fromkeys([*flat_left, *flat_right])
    return [
        (path, flat_left.get(path), flat_right.get(path))
        for path in paths
        if flat_left.get(path) != flat_right.get(path)
    ]


def flatten(config: Config) -> dict[str, object]:
    """Every leaf of the configuration under its dotted path."""
    leaves: dict[str, object] = {}

    def walk(value: object, path: str) -> None:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                walk(item, _join(path, str(key)))
        elif isinstance(value, list) and value:
            for index, item in enumerate(value):
                walk(item, _join(path, str(index)))
        else:
            leaves[path] = value

    walk(to_dict(config), "")
    return leaves


# ---------------------------------------------------------------------------------------------------------------------


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _hints(cls: type[Config]) -> dict[str, Any]:
    return {name: field.annotation for name, field in cls.model_fields.items()}


def _parts(value: object) -> Iterable[Config]:
    if isinstance(value, Config):
        yield value
        for name in type(value).model_fields:
            yield from _parts(getattr(value, name))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _parts(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _parts(item)


def _convert(value: object, hint: Any, path: str, *, allow: Sequence[str], known: Mapping[str, type[Config]]) -> object:
    """Turn JSON shapes into what the annotation wants: objects to `Config`, arrays to tuples, text to `Path`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        options = [option for option in arguments if option is not type(None)]
        if isinstance(value, Mapping):
            options = [option for option in options if _wants_config(option)] or options
        if isinstance(value, list):
            options = [option for option in options if typing.get_origin(option) in (tuple, list)] or options
        return _convert(value, options[0], path, allow=allow, known=known) if options else value
    if origin is typing.Annotated:
        return _convert(value, arguments[0], path, allow=allow, known=known)
    if _wants_config(hint) and not isinstance(value, Config):
        return from_dict(value, hint, path=path, allow=allow, known=known)
    if origin in (tuple, list) and isinstance(value, (list, tuple)):
        inner = arguments[0] if arguments else Any
        return tuple(
            _convert(item, inner, _join(path, str(index)), allow=allow, known=known) for index, item in enumerate(value)
        )
    if origin is dict and isinstance(value, Mapping):
        return {
            key: _convert(item, arguments[1], _join(path, str(key)), allow=allow, known=known)
            for key, item in value.items()
        }
    if hint is Path and isinstance(value, str):
        return Path(value)
    return value


def _wants_config(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Config)


def _refuse_unknown(cls: type[Config], values: Mapping[str, object], path: str) -> None:
    fields = list(cls.model_fields)
    for name, value in values.items():
        if name not in cls.model_fields:
            near = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
            remedy = f"did you mean {_join(path, near[0])}?" if near else f"choose one of {', '.join(fields)}"
            raise ConfigError(_join(path, name), value, f"no such key in {cls.__name__}; {remedy}")


_REMEDIES = {
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "missing": "is required and has no default; give it a value",
    "finite_number": "must be a finite number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "too_short": "needs at least {min_length} items",
    "too_long": "takes at most {max_length} items",
    "string_pattern_mismatch": "must match {pattern}",
}


def _translate(error: ValidationError, path: str) -> ConfigError:
    """The first of pydantic's complaints as one line of ours."""
    first = error.errors(include_url=False)[0]
    where = ".".join([*([path] if path else []), *(str(part) for part in first["loc"])])
    context = first.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, FieldError):
        return ConfigError(_join(where, cause.field), cause.value, cause.remedy)
    template = _REMEDIES.get(first["type"])
    remedy = template.format(**context) if template else first["msg"][0].lower() + first["msg"][1:]
    value = None if first["type"] == "missing" else first["input"]
    return ConfigError(where or error.title, value, remedy)


def _parse(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"None": None, "True": True, "False": False}.get(text, text)


def _assign(data: dict[str, Any], path: str, value: object, known: Mapping[str, type[Config]]) -> None:
    target: Any = data
    names = path.split(".")
    for depth, name in enumerate(names[:-1]):
        target = _step(target, name, ".".join(names[: depth + 1]), value, known)
        if not isinstance(target, (dict, list)):
            raise ConfigError(path, value, f"{'.'.join(names[: depth + 1])} is {target!r}, which has no fields")
    last = names[-1]
    if isinstance(target, list):
        _step(target, last, path, value, known)
        target[int(last)] = value
    elif last == TYPE:
        resolve(value, path=path, known=known)
        target.clear()
        target[TYPE] = value
    else:
        target[last] = value


def _step(target: Any, name: str, path: str, value: object, known: Mapping[str, type[Config]]) -> Any:
    if isinstance(target, list):
        if not name.isdigit() or int(name) >= len(target):
            raise ConfigError(path, value, f"there is no item {name}; the list has {len(target)} items, counted from 0")
        return target[int(name)]
    if TYPE in target:
        cls = resolve(target[TYPE], path=path, known=known)
        _refuse_unknown(cls, {name: value}, path.rpartition(".")[0])
        if name not in target:  # the object was just replaced by a class with its defaults
            target.update({key: item for key, item in to_dict(cls()).items() if key not in target})
    if name not in target:
        raise ConfigError(path, value, f"no such key; choose one of {', '.join(target)}")
    return target[name]
