"""Measuring what decoding states hold, from their storages: views and copies count as what they keep alive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from surefoot.blocks.mixers.cache import NarrowKind, State
from surefoot.blocks.mixers.composite import CompositeState


def stored_bytes(states: object) -> int:
    """Bytes of the distinct storages that the tensors in `states` use: an object, or any nesting of objects."""
    storages = {}
    for tensor in _tensors(states, set()):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(value: object, seen: set[int]) -> Iterator[Tensor]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, seen)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for item in value:
            yield from _tensors(item, seen)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value), seen)


def narrow(states: Iterable[object], kind: NarrowKind) -> int:
    """Have those states that hold keys and values (or latents) keep them in a narrower type; returns how many that are."""
    num = 0
    for state in states:
        if isinstance(state, State):
            state.narrow(kind)
            num += 1
        elif isinstance(state, CompositeState):
            num += narrow(state.parts, kind)
    return num
