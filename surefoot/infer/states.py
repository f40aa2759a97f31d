"""Measuring what decoding states hold, from their storages: views and copies count as what they keep alive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor


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
