"""Calling a hand-written gradient, and what a pass over a layer that is run twice keeps from its first run.

torch leaves `Function.apply` untyped, so the one untyped call stands here. Since every hand-written gradient is called
here, this is also where a pass that is run again for its backward (`parallel.recompute`) takes results of the first run
instead of computing them again.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo


@dataclass(frozen=True)
class Call:
    """One call of the first run: its place among those of its pass, its function, its time, and the bytes of what it made:
    its result and what it saved beside its arguments."""

    index: int
    function: type[torch.autograd.Function]
    seconds: float
    num_bytes: int


@dataclass
class _Made:
    """`saved` in the function's order; an argument stands there as its number."""

    result: Tensor
    saved: list[Tensor | int | None]
    version: int


@dataclass
class Tape:
    """What one pass keeps between its two runs. `keeps` says of each call, at its first run, whether its result stays."""

    keeps: Callable[[Call], bool]
    measures: bool = False
    calls: list[Call] = field(default_factory=list)
    _kept: dict[int, _Made] = field(default_factory=dict)
    _decisions: list[Tensor] = field(default_factory=list)
    _is_again: bool = False
    _next_call: int = 0
    _next_decision: int = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes that stay between the runs, each storage once."""
        tensors = [made.result for made in self._kept.values()] + self._decisions
        tensors += [tensor for made in self._kept.values() for tensor in made.saved if isinstance(tensor, Tensor)]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values())

    def first(self) -> AbstractContextManager[None]:
        """Around the first run."""
        return _Running(self, is_again=False)

    def again(self) -> AbstractContextManager[None]:
        """Around every later run; to be entered any number of times, since a backward pass in two halves makes two."""
        return _Running(self, is_again=True)

    def call(self, function: type[torch.autograd.Function], arguments: tuple[Any, ...]) -> Any:
        """See `apply`."""
        index = self._next_call
        self._next_call += 1
        if self._is_again:
            made = self._kept.get(index)
            if made is None:
                return function.apply(*arguments)
            if made.result._version != made.version:
                raise RuntimeError(f"the result of {function.__name__} was written to after it was kept")
            return _Replayed.apply(made, *arguments)  # type: ignore[no-untyped-call]
        started = self._now()
        result, made = _recording(function, arguments)
        own = [tensor for tensor in made.saved if isinstance(tensor, Tensor)]
        num_bytes = sum(tensor.nbytes for tensor in (made.result, *own))
        call = Call(index, function, self._now() - started, num_bytes)
        self.calls.append(call)
        if self.keeps(call):
            self._kept[index] = made
        return result

    def decide(self, make: Callable[[], Tensor]) -> Tensor:
        """See `decided`."""
        if not self._is_again:
            self._decisions.append(make())
            return self._decisions[-1]
        self._next_decision += 1
        return self._decisions[self._next_decision - 1]

    def _now(self) -> float:
        if not self.measures:
            return 0.0
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


_current: ContextVar[Tape | None] = ContextVar("tape", default=None)


class _Running(AbstractContextManager[None]):
    def __init__(self, tape: Tape, *, is_again: bool) -> None:
        self._tape, self._is_again = tape, is_again

    def __enter__(self) -> None:
        self._tape._is_again, self._tape._next_call, self._tape._next_decision = self._is_again, 0, 0
        self._token = _current.set(self._tape)

    def __exit__(self, *_error: object) -> None:
        _current.reset(self._token)


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply(*arguments)`, or what the first run of this pass kept of it; never traced by `torch.compile`."""
    if torch.compiler.is_dynamo_compiling():
        return _untraced(function, arguments)
    tape = _current.get()
    return function.apply(*arguments) if tape is None else tape.call(function, arguments)


@_disable_dynamo  # the public one imports all of the compiler at once
def _untraced(function: type[torch.autograd.Function], arguments: tuple[Any, ...]) -> Any:
    """`apply` outside of a graph. Traced into one, attention fails or gets gradients of other values (torch 2.13)."""
    return apply(function, *arguments)


def decided(make: Callable[[], Tensor]) -> Tensor:
    """`make()`, a choice without gradient. A pass that is run again repeats its choices instead of choosing again:
    another rounding may break a tie otherwise, and what was saved would not fit what is made again."""
    tape = _current.get()
    return make() if tape is None else tape.decide(make)


def gradient_dtype(*weights: Tensor) -> torch.dtype:
    """The widest that gradients of these weights are wanted in, which may be wider than the weights."""
    return functools.reduce(torch.promote_types, (weight.grad_dtype or weight.dtype for weight in weights))


def is_taped() -> bool:
    """Whether this pass may be run again, so that only calls of `apply` can be kept."""
    return _current.get() is not None


def is_kept() -> bool:
    """Within a backward pass: whether the graph stays for another one."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def is_again() -> bool:
    """Whether this run repeats one whose effects outside of it have been had."""
    tape = _current.get()
    return tape is not None and tape._is_again


@functools.cache
def _listening(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """The function, telling the last of its arguments (a list) what it returned and saved."""

    def forward(ctx: Any, *arguments: Any) -> Any:
        *own, heard = arguments
        result = function.forward(ctx, *own)
        saved = getattr(ctx, "to_save", None) or ()
        alias = result.detach()
        heard.append(_Made(alias, [_named(tensor, own) for tensor in saved], alias._version))
        return result

    def backward(ctx: Any, *grads: Any) -> Any:
        found = function.backward(ctx, *grads)
        return (*(found if isinstance(found, tuple) else (found,)), None)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(function.__name__, (function,), methods)


def _named(tensor: Tensor | None, arguments: list[Any]) -> Tensor | int | None:
    return next((number for number, argument in enumerate(arguments) if argument is tensor), tensor)


def _recording(function: type[torch.autograd.Function], arguments: tuple[Any, ...]) -> tuple[Any, _Made]:
    heard: list[_Made] = []
    result: Any = _listening(function).apply(*arguments, heard)
    return result, heard[0]


class _Replayed(torch.autograd.Function):
    """A call whose result is there: saves what the function saved. Its gradient is never asked for: the first run's is."""

    @staticmethod
    def forward(ctx: Any, made: _Made, *arguments: Any) -> Tensor:
        ctx.save_for_backward(*(arguments[kept] if isinstance(kept, int) else kept for kept in made.saved))
        return made.result.detach()
