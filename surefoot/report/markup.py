"""HTML from text that nobody vouches for: everything goes through `escape`."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence

# Control characters as pictures: a browser drops or misreads them, and a sample should show what the model wrote.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
# Characters that turn the direction of the text after them; shown as their code, they turn nothing.
_DIRECTIONS = {code: f"⟨U+{code:04X}⟩" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def escape(value: object) -> str:
    """The value as text that is safe in elements and in quoted attributes."""
    return html.escape(str(value).translate(_PICTURES).translate(_DIRECTIONS))


def leaf(value: object) -> str:
    """A JSON leaf as a person reads it, escaped."""
    if value is None:
        return '<span class="none">none</span>'
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return escape(f"{value:,}" if abs(value) < 10**30 else "an integer of more than 30 digits")
    if isinstance(value, float):
        return escape(f"{value:,.6g}" if 1e-4 <= abs(value) < 1e7 else f"{value:.6g}")
    if value in ({}, []):
        return '<span class="none">empty</span>'
    return escape(value)


def embed(value: object) -> str:
    """JSON that can stand inside a script element: no `<` that could end it, no NaN."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, is_numeric: bool = False) -> str:
    """A table of escaped cells; the first of a row is its header."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in row[1:]) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}">'
        f'<table class="{"numbers" if is_numeric else "plain"}">'
        f'<caption class="unseen">{caption}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def nested(value: object, depth: int = 0) -> str:
    """Nested JSON as nested tables; lists of leaves on one line. Deeper than eight levels it is written as JSON."""
    if isinstance(value, dict) and value and depth < 8:
        rows = "".join(
            f'<tr><th scope="row">{escape(key)}</th><td>{nested(item, depth + 1)}</td></tr>'
            for key, item in value.items()
        )
        return f'<table class="nested">{rows}</table>'
    if isinstance(value, list) and value and depth < 8:
        if any(isinstance(item, (dict, list)) for item in value):
            return f'<ol class="items">{"".join(f"<li>{nested(item, depth + 1)}</li>" for item in value)}</ol>'
        return ", ".join(leaf(item) for item in value)
    return leaf(value)


def details(title: str, body: str, *, is_open: bool = False) -> str:
    """A part of the page that folds; `title` and `body` are HTML."""
    return f"<details{' open' if is_open else ''}><summary>{title}</summary>{body}</details>"
