"""Reading pickles without running them.

A pickle is a program for a stack machine that may call any function. `parse` runs only the instructions that build data
(numbers, strings, lists, dicts, sets, tuples). Where the program names a class or calls it, `parse` records the name
and the arguments, and imports and calls nothing. This suffices for the pickles inside torch's checkpoints.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO


@dataclass(frozen=True)
class Name:
    """A class, function or constant that a pickle names, such as ``torch.float32``."""

    text: str


@dataclass(eq=False)
class Made:
    """An object that unpickling would make.

    Attributes:
        name: the class or function that would be called.
        args: its arguments.
        state: the object's contents, usually a dict of its attributes; None if there are none.
    """

    name: str
    args: tuple = ()
    state: Any = None


@dataclass(eq=False)
class Persistent:
    """A reference to an object outside the pickle, such as a tensor's storage in a file of ``torch.save``."""

    key: Any


class Nested(tuple):
    """A nested tuple with its depth and its total number of elements."""

    depth: int
    size: int


_MARK = object()
# Python hashes, compares and prints nested tuples by recursion, and visits a tuple as often as it occurs.
_MAX_DEPTH, _MAX_SIZE = 32, 1 << 24
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}
# Instructions whose argument is the value.
_VALUES = {"BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT"}
_VALUES |= {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE", "STRING", "BINSTRING", "SHORT_BINSTRING"}
_VALUES |= {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}


def parse(data: bytes | BinaryIO) -> Any:
    """Parse a pickle without running it, and return its value.

    `Name`, `Made` and `Persistent` take the place of classes, of objects that unpickling would make, and of external
    data.

    Raises:
        ValueError: the pickle is damaged, or has an instruction or a value that the pickles of torch do not need.
    """
    try:
        return _run(data)
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError, UnicodeError) as error:
        raise ValueError(f"malformed pickle ({type(error).__name__}: {error})") from error


def _run(data: bytes | BinaryIO) -> Any:
    stack: list[Any] = []
    memo: dict[Any, Any] = {}

    def since_mark() -> list[Any]:
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError(
                    "malformed pickle (an instruction needs a MARK, but the stack has none): copy the file again"
                )
        found = stack[at + 1 :]
        del stack[at:]
        return found

    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in ("PROTO", "FRAME"):
            pass
        elif name == "STOP":
            return stack.pop()
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "POP":
            stack.pop()
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "TUPLE":
            stack.append(_tuple(since_mark()))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [_tuple(stack[-count:])]
        elif name == "LIST":
            stack.append(since_mark())
        elif name == "APPEND":
            value = stack.pop()
            _as(list, stack[-1]).append(value)
        elif name == "APPENDS":
            values = since_mark()
            _as(list, stack[-1]).extend(values)
        elif name == "ADDITEMS":
            values = since_mark()
            _as(set, stack[-1]).update(map(_key, values))
        elif name in ("SETITEM", "SETITEMS", "DICT"):
            items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else since_mark()
            if name == "DICT":
                stack.append({})
            if len(items) % 2:
                raise ValueError("malformed pickle (a key without a value)")
            _items_of(stack[-1]).update(zip(map(_key, items[::2]), items[1::2], strict=True))
        elif name == "GLOBAL":
            stack.append(Name(str(argument).replace(" ", ".")))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(Name(f"{_as(str, module)}.{_as(str, attribute)}"))
        elif name in ("REDUCE", "NEWOBJ"):
            args, function = stack.pop(), stack.pop()
            stack.append(Made(_as(Name, function).text, _as(tuple, args)))
        elif name == "BUILD":
            state = stack.pop()
            _as(Made, stack[-1]).state = state
        elif name == "BINPERSID":
            stack.append(Persistent(stack.pop()))
        else:
            raise ValueError(f"unsupported pickle (instruction {name})")
    raise ValueError("malformed pickle (it ends without STOP, perhaps truncated): copy the file again")


def _tuple(values: list[Any]) -> tuple:
    inner = [value for value in values if isinstance(value, tuple)]
    if not inner:
        return tuple(values)
    made = Nested(values)
    made.depth = 1 + max(getattr(value, "depth", 1) for value in inner)
    made.size = len(values) + sum(getattr(value, "size", len(value)) for value in inner)
    if made.depth > _MAX_DEPTH or made.size > _MAX_SIZE:
        raise ValueError(
            f"unsupported pickle (a tuple of depth {made.depth} with {made.size} elements; the limits are {_MAX_DEPTH} "
            f"and {_MAX_SIZE})"
        )
    return made


def _key(value: Any) -> Any:
    """Return ``value``, a dict key or an element of a set, after a check of its type."""
    for each in value if isinstance(value, tuple) else (value,):
        if not isinstance(each, str | int | float | bytes | Name | Made | None):
            kind = "tuple" if isinstance(each, tuple) else type(each).__name__
            raise ValueError(f"unsupported pickle (a dict key or an element of a set is or contains a {kind})")
    return value


def _as(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"malformed pickle (a {type(value).__name__} instead of a {kind.__name__})")
    return value


def _items_of(value: Any) -> dict:
    """Return the dict behind ``value``, which is a dict, or an OrderedDict parsed as `Made`."""
    if isinstance(value, Made):
        value.state = {} if value.state is None else value.state
        value = value.state
    return _as(dict, value)
