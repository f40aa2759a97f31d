"""Which of many combinations run in `make test`: every n-th, so that each value comes up; the others are in the long suite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def spread(cases: Iterable[tuple[Any, ...]], every: int) -> list[Any]:
    """The cases as parameters, all but every n-th marked `long`."""
    return [
        pytest.param(*case, marks=() if number % every == 0 else pytest.mark.long) for number, case in enumerate(cases)
    ]
