"""Calling a hand-written gradient: torch leaves `Function.apply` untyped, so the one untyped call stands here."""

from __future__ import annotations

from typing import Any

import torch


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply(*arguments)`."""
    return function.apply(*arguments)
