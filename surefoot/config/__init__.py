"""Configuration: frozen nested objects, strict reading and writing, overrides, differences, and the error tree."""

from surefoot.config.base import (
    Config,
    FieldError,
    diff,
    fingerprint,
    flatten,
    from_dict,
    load_json,
    override,
    resolve,
    to_dict,
    to_json,
    type_tag,
)
from surefoot.config.errors import CheckpointError, ConfigError, DataError, RunError, SurefootError

__all__ = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "DataError",
    "FieldError",
    "RunError",
    "SurefootError",
    "diff",
    "fingerprint",
    "flatten",
    "from_dict",
    "load_json",
    "override",
    "resolve",
    "to_dict",
    "to_json",
    "type_tag",
]
