"""Read a pickle as inert data, without importing or calling anything.

``torch.distributed.checkpoint`` writes its table of contents as a pickle, and ``torch.save`` its
values. This module executes the opcodes of such a pickle. It replaces each class, each function and
each call with an `Inert` that has the name and the arguments. An ``OrderedDict`` becomes a dict.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from ckpt.errors import UnsupportedValue

_MOST_BYTES: Final = 1 << 30
_CONSTANT_OPCODES: Final = {
    "NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (),
}  # fmt: skip
_PUSH_OPCODES: Final = frozenset(
    {
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "LONG4",
        "BINFLOAT",
        "SHORT_BINUNICODE",
        "BINUNICODE",
        "BINUNICODE8",
        "SHORT_BINBYTES",
        "BINBYTES",
        "BINBYTES8",
        "INT",
        "LONG",
        "FLOAT",
        "UNICODE",
    }
)


PERSISTENT: Final = "persistent id"
"""The name of an `Inert` for an object outside of the pickle. Its argument is the id, with which
``torch.save`` describes a storage.
"""


@dataclass(slots=True, eq=False)
class Inert:
    """A class or function that a pickle names, or a call of it that is not carried out.

    An instance of a subclass of dict or list, such as ``defaultdict``, is an `Inert` without its
    items.

    Attributes:
        name: The full name of the class or function.
        args: The arguments of the call.
        state: The state that unpickling would set on the result of the call.
        has_state: Whether the pickle has set the state.
    """

    name: str
    args: tuple[Any, ...] = ()
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    has_state: bool = False


def holds_inert(value: Any) -> bool:
    """Return True if ``value``, or a value in its dicts, lists and tuples, is an `Inert`."""
    match value:
        case dict():
            return any(map(holds_inert, (*value.keys(), *value.values())))
        case list() | tuple():
            return any(map(holds_inert, value))
        case _:
            return isinstance(value, Inert)


class _Machine:
    """A stack machine for the opcodes of pickle that ``torch.distributed.checkpoint`` writes.

    Classes, functions and calls become ``Inert`` objects. Any other opcode raises ``KeyError``.
    """

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._handlers: dict[str, Callable[[Any], None]] = {
            "STACK_GLOBAL": lambda _: self._combine_two(
                lambda module, name: Inert(f"{module}.{name}")
            ),
            "GLOBAL": lambda arg: self.stack.append(Inert(str(arg).replace(" ", "."))),
            "REDUCE": lambda _: self._combine_two(_call),
            "NEWOBJ": lambda _: self._combine_two(_call),
            "BUILD": lambda _: self._combine_two(_with_state),
            "TUPLE": lambda _: self.stack.append(tuple(self._pop_to_mark())),
            "TUPLE1": lambda _: self._pack_tuple(1),
            "TUPLE2": lambda _: self._pack_tuple(2),
            "TUPLE3": lambda _: self._pack_tuple(3),
            "EMPTY_LIST": lambda _: self.stack.append([]),
            "EMPTY_DICT": lambda _: self.stack.append({}),
            "MARK": lambda _: self._marks.append(len(self.stack)),
            "APPEND": lambda _: self._extend_list([self.stack.pop()]),
            "APPENDS": lambda _: self._extend_list(self._pop_to_mark()),
            "SETITEM": lambda _: self._update_dict([self.stack.pop(-2), self.stack.pop()]),
            "SETITEMS": lambda _: self._update_dict(self._pop_to_mark()),
            "MEMOIZE": lambda _: self._remember(len(self._memo)),
            "BINPUT": self._remember,
            "LONG_BINPUT": self._remember,
            "BINGET": lambda arg: self.stack.append(self._memo[arg]),
            "LONG_BINGET": lambda arg: self.stack.append(self._memo[arg]),
            "POP": lambda _: self._pop_or_unmark(),
            "BINPERSID": lambda _: self.stack.append(Inert(PERSISTENT, (self.stack.pop(),))),
        }
        for name in ("PROTO", "FRAME", "STOP"):
            self._handlers[name] = lambda _: None

    def run(self, data: bytes) -> Any:
        """Execute the opcodes of a pickle, and return the object that is left on the stack."""
        for opcode, arg, _ in pickletools.genops(data):
            if opcode.name in _PUSH_OPCODES:
                self.stack.append(arg)
            elif opcode.name in _CONSTANT_OPCODES:
                self.stack.append(_CONSTANT_OPCODES[opcode.name])
            else:
                self._handlers[opcode.name](arg)
        (result,) = self.stack
        return result

    def _combine_two(self, join: Callable[[Any, Any], Any]) -> None:
        upper, lower = self.stack.pop(), self.stack.pop()
        self.stack.append(join(lower, upper))

    def _pack_tuple(self, count: int) -> None:
        items = tuple(self.stack[-count:])
        self.stack[-count:] = [items]

    def _pop_or_unmark(self) -> None:
        # The opcode POP drops a mark if that is on top.
        if self._marks and self._marks[-1] == len(self.stack):
            self._marks.pop()
        else:
            self.stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        start = self._marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def _extend_list(self, items: list[Any]) -> None:
        # Change the list in place, since the memo may reference it.
        if not isinstance(self.stack[-1], Inert):
            self.stack[-1].extend(items)

    def _update_dict(self, items: list[Any]) -> None:
        if not all(isinstance(key, _KEY_TYPES) for key in items[::2]):
            raise ValueError("a key that is a container")
        if not isinstance(self.stack[-1], Inert):
            self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def _remember(self, index: int) -> None:
        self._memo[index] = self.stack[-1]


_MOST_PARTS: Final = 16
_KEY_TYPES: Final = (str, int, float, bytes, type(None), Inert)
"""The accepted types of dict keys, which are fast to hash. An ``Inert`` is hashed by identity."""


def _call(call: Inert, args: tuple[Any, ...]) -> Any:
    if type(args) is not tuple:
        raise ValueError("arguments that are not a tuple")
    if call.name == "collections.OrderedDict" and not args:
        return {}
    return Inert(call.name, args)


def _with_state(value: Any, state: Any) -> Any:
    """Set the state of ``value``, and return it. The attributes of a dict, such as the metadata of
    ``Module.state_dict()``, are left out.

    ``value`` is changed in place, since the memo may reference it. Usually ``state`` is a dict. For
    a class with slots it is a pair of dicts, and for some classes a tuple of a few values, which
    are added to ``args``.

    No dict is copied and no state is set twice, so that a forged pickle cannot make this slow.

    Raises:
        ValueError: The state was set before, or has too many parts.
    """
    if not isinstance(value, Inert):
        return value
    parts = state if isinstance(state, tuple) else (state,)
    if value.has_state or len(parts) > _MOST_PARTS:
        raise ValueError("an object that is built twice, or of too many parts")
    for part in parts:
        if isinstance(part, dict) and not (part and value.state):
            value.state = part or value.state
        elif part is not None:
            value.args = (*value.args, part)
    value.has_state = True
    return value


def read_inert(data: bytes, name: str) -> Any:
    """Return the object that the pickle ``data`` describes, with `Inert` objects in place of
    instances of classes.

    Args:
        data: The pickle.
        name: The name of the pickle in errors.

    Raises:
        UnsupportedValue: ``data`` is not a pickle, or has opcodes or values that are not supported.
    """
    try:
        if len(data) > _MOST_BYTES:
            raise ValueError(f"it has {len(data)} bytes")
        return _Machine().run(data)
    except Exception as error:  # noqa: BLE001 - a bad pickle can cause any error
        raise UnsupportedValue(
            name,
            "pickle of another kind",
            f"it is not one that torch writes ({repr(error)[:200]})",
        ) from None
