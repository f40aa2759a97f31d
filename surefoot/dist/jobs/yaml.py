"""Writing YAML: nested mappings and lists of text and whole numbers, laid out for a reader.

Text goes out plain only where every version of YAML takes it for text (1e3, no and 0x10 are something else to some), and
otherwise as a JSON string, which is YAML too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


def to_yaml(value: dict[str, Any]) -> str:
    """YAML text ending in a newline. Keys are plain words of ours."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            if isinstance(item, (dict, list)) and item:
                yield f"{key}:"
                yield from (f"  {line}" for line in _lines(item))
            else:
                yield f"{key}: {_scalar(item)}"
    elif isinstance(value, list) and value:
        for item in value:
            first, *rest = _lines(item)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield _scalar(value)


def _scalar(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_./-]*", value) and value.lower() not in _WORDS:
        return value
    text = json.dumps(value, ensure_ascii=False)
    # What JSON leaves as it is and YAML does not: controls, the line ends of Unicode, what is no character.
    return re.sub("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]", lambda match: f"\\u{ord(match[0]):04x}", text)
