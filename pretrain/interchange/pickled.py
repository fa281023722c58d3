"""Pickles read without importing or calling what they name.

A pickle is a program that may call any function. `parse` runs it with stand-ins for all classes and functions, which
only record their arguments. This suffices for the pickles inside torch's checkpoints.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any, ClassVar


class Made:
    """An object that unpickling would make.

    Each class and function that a pickle names, such as ``torch.float32``, becomes a subclass.

    Attributes:
        name: the class or function.
        args: the arguments of its call.
        state: the object's contents, usually a dict of its attributes; None if there are none.
    """

    name: ClassVar[str]
    args: tuple
    state: Any = None

    def __new__(cls, *args: Any) -> "Made":
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Record an item of a mapping, such as an OrderedDict."""
        if self.state is None:
            self.state = {}
        self.state[key] = value


def parse(data: bytes) -> Any:
    """Return the value of a pickle, with objects of subclasses of `Made` in place of all but Python's basic types.

    A reference to an object outside the pickle, such as a tensor's storage, becomes its key.

    Raises:
        ValueError: the pickle is damaged, or has an instruction or a value that the pickles of torch do not need.
    """
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # of as many kinds as a damaged file has instructions
        raise ValueError(f"malformed or unsupported pickle ({type(error).__name__}: {error})") from error


class _FlatKey(tuple):
    """A tuple that is hashable only if it contains no other tuple.

    Python hashes nested tuples by recursion, and visits a tuple as often as it occurs. A small hostile pickle could
    overflow the stack or take forever.
    """

    def __hash__(self) -> int:
        if any(isinstance(value, tuple) for value in self):
            raise TypeError("a dict key or an element of a set is a nested tuple")
        return super().__hash__()


def _with_flat_key(load: Callable[[Any], None]) -> Callable[[Any], None]:
    def load_tuple(unpickler: Any) -> None:
        load(unpickler)
        unpickler.stack[-1] = _FlatKey(unpickler.stack[-1])

    return load_tuple


_TUPLES = (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
# An extension may be an object of this process, frozensets may be nested as tuples are, a bytearray may have any size.
_REFUSED = (pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.FROZENSET, pickle.BYTEARRAY8)
_INSTRUCTIONS = {
    **pickle._Unpickler.dispatch,
    **{code[0]: _with_flat_key(pickle._Unpickler.dispatch[code[0]]) for code in _TUPLES},
}


class _Unpickler(pickle._Unpickler):  # the one in Python: the one in C has no table of instructions
    dispatch = {code: load for code, load in _INSTRUCTIONS.items() if bytes([code]) not in _REFUSED}  # noqa: RUF012

    def find_class(self, module: str, name: str) -> type[Made]:
        return type("Made", (Made,), {"name": f"{module}.{name}"})

    def persistent_load(self, key: Any) -> Any:
        return key
