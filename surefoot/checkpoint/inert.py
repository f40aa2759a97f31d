"""Pickles read as data: nothing in one is looked up, called or altered.

Python's own unpicklers can be told which names exist, yet still hash, compare and allocate whatever a file says: sixty
nested pairs used as a key take a processor for ever. This one knows the instructions that DCP and torch use for tensors,
and keeps names and calls as records. Its time and memory are proportional to the bytes it reads.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, Final


class ForeignError(Exception):
    """The text says what in a file is not what surefoot writes for tensors."""


@dataclass(frozen=True, eq=False)
class Name:
    """A global name."""

    module: str
    name: str


@dataclass(eq=False)
class Built:
    """What a name would have built from arguments and a state."""

    of: Name
    arguments: tuple[Any, ...]
    state: object = None


@dataclass(frozen=True, eq=False)
class Stored:
    """What lies beside the pickle, under a persistent id."""

    key: object


def read_pickle(data: bytes, names: Container[tuple[str, str]]) -> object:
    """The value of a pickle that uses no name but `names`, in plain values, `Name`, `Built` and `Stored`.

    `ForeignError` for any other pickle.
    """
    try:
        return _Machine(names).run(data)
    except ForeignError:
        raise
    except Exception as error:  # a broken pickle raises almost anything
        raise ForeignError(f"is not a readable pickle ({type(error).__name__})") from None


_CONSTANTS: Final = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS: Final = {"BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"}
_IGNORED: Final = {"PROTO", "FRAME"}


class _Machine:
    def __init__(self, names: Container[tuple[str, str]]) -> None:
        self._names = names
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> object:
        for instruction, argument, _ in pickletools.genops(data):
            name = instruction.name
            if name in _LITERALS:
                self._stack.append(argument)
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name])
            elif name in _ACTIONS:
                _ACTIONS[name](self, argument)
            elif name == "STOP":
                break
            elif name not in _IGNORED:
                raise ForeignError(f"uses the pickle instruction {name}, which is not part of a checkpoint")
        (value,) = self._stack
        return value

    def memoize(self, _argument: object) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def put(self, argument: int) -> None:
        self._memo[argument] = self._stack[-1]

    def get(self, argument: int) -> None:
        self._stack.append(self._memo[argument])

    def mark(self, _argument: object) -> None:
        self._marks.append(len(self._stack))

    def make_list(self, _argument: object) -> None:
        self._stack.append([])

    def make_dict(self, _argument: object) -> None:
        self._stack.append({})

    def make_tuple(self, _argument: object) -> None:
        self._stack.append(tuple(self._since_mark()))

    def append(self, _argument: object) -> None:
        self._extend(self._take(1))

    def appends(self, _argument: object) -> None:
        self._extend(self._since_mark())

    def set_item(self, _argument: object) -> None:
        self._update(self._take(2))

    def set_items(self, _argument: object) -> None:
        self._update(self._since_mark())

    def name(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._push_name(module, name)

    def stack_name(self, _argument: object) -> None:
        self._push_name(*self._take(2))

    def build(self, _argument: object) -> None:
        of, arguments = self._take(2)
        if type(of) is not Name or type(arguments) is not tuple:
            raise ForeignError("calls something that is not a name")
        self._stack.append(Built(of, arguments))

    def set_state(self, _argument: object) -> None:
        (state,) = self._take(1)
        target = self._stack[-1]
        if type(target) is not Built:
            raise ForeignError("alters something that it did not build")
        target.state = state

    def persistent(self, _argument: object) -> None:
        self._stack.append(Stored(*self._take(1)))

    def _push_name(self, module: object, name: object) -> None:
        if type(module) is not str or type(name) is not str or (module, name) not in self._names:
            text = f"{module}.{name}" if type(module) is str and type(name) is str else "something that is no name"
            raise ForeignError(f"names {text!a:.120}, which is not part of a checkpoint")
        self._stack.append(Name(module, name))

    def _take(self, count: int) -> list[Any]:
        floor = self._marks[-1] if self._marks else 0
        if len(self._stack) - count < floor:
            raise ForeignError("is a broken pickle")
        taken = self._stack[-count:]
        del self._stack[-count:]
        return taken

    def _since_mark(self) -> list[Any]:
        start = self._marks.pop()
        taken = self._stack[start:]
        del self._stack[start:]
        return taken

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise ForeignError("is a broken pickle")
        target.extend(items)

    def _update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        keys = items[::2]
        # Text and records hash in no time; a tuple hashes everything in it, again for every mention.
        if type(target) is not dict or any(type(key) not in (str, Built) for key in keys):
            raise ForeignError("has a key that is neither a name nor an index")
        target.update(zip(keys, items[1::2], strict=True))


def _make_tuple_of(count: int) -> Callable[[_Machine, Any], None]:
    def make(machine: _Machine, _argument: object) -> None:
        machine._stack.append(tuple(machine._take(count)))

    return make


_ACTIONS: Final[dict[str, Callable[[_Machine, Any], None]]] = {
    "MEMOIZE": _Machine.memoize,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "MARK": _Machine.mark,
    "EMPTY_LIST": _Machine.make_list,
    "EMPTY_DICT": _Machine.make_dict,
    "TUPLE": _Machine.make_tuple,
    "TUPLE1": _make_tuple_of(1),
    "TUPLE2": _make_tuple_of(2),
    "TUPLE3": _make_tuple_of(3),
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.stack_name,
    "REDUCE": _Machine.build,
    "NEWOBJ": _Machine.build,
    "BUILD": _Machine.set_state,
    "BINPERSID": _Machine.persistent,
}
