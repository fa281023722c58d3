"""Pickles are read without importing or calling what they name: `pretrain.interchange.pickled`."""

import collections
import pickle
import random
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties

from pretrain.interchange.pickled import Made, parse

DATA = {
    "numbers": [0, 1, -1, 255, 65535, 2**31, -(2**40), 2**100, 1.5, float("inf")],
    "texts": ["", "a", "\u00e9" * 300, b"", b"x" * 300],
    "nested": ({"a": (1, (2, (3, 4, 5, 6)))}, [None, True, False], {1, 2, 3}, [], (), {}, {"k": [1] * 2000}),
}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_data_are_what_pickle_makes_of_them(protocol):
    data = {key: value for key, value in DATA.items() if key != "nested" or protocol >= 4}
    if protocol < 3:  # bytes are a call of a function there
        data["texts"] = data["texts"][:3]
    assert parse(pickle.dumps(data, protocol)) == data


CALLED = []


def harm(*args):
    CALLED.append(args)
    return args


class Harmful:
    def __reduce__(self):
        return harm, ("x",)


def test_calls_are_recorded_not_made():
    data = pickle.dumps([Harmful(), "after"])
    made, after = parse(data)
    assert (made.name, made.args, after) == (f"{__name__}.harm", ("x",), "after")
    assert not CALLED
    pickle.loads(data)  # noqa: S301 - our own
    assert CALLED == [("x",)]


@dataclass
class Plain:
    a: int
    b: str


def test_objects_are_names_arguments_and_states():
    made = parse(pickle.dumps(Plain(3, "x")))
    assert made.name == f"{__name__}.Plain" and made.state == {"a": 3, "b": "x"} and made.args == ()
    size = parse(pickle.dumps(torch.Size([2, 3])))
    assert isinstance(size, Made) and (size.name, size.args) == ("torch.Size", ((2, 3),))
    assert parse(pickle.dumps(torch.bfloat16)).name == "torch.bfloat16"
    assert parse(pickle.dumps(collections.OrderedDict(a=1))).state == {"a": 1}


def some_metadata():
    chunk = ChunkStorageMetadata(torch.Size([0, 1]), torch.Size([2, 3]))
    return {MetadataIndex("w", [0, 1]): [chunk, TensorProperties(torch.float32)] for _ in range(3)}


def test_damage_is_a_value_error():
    data, draw = pickle.dumps(some_metadata()), random.Random(1)
    assert parse(data)
    refused = 0
    for number in range(3000):
        bad = bytearray(data[: draw.randrange(len(data))] if number % 3 == 0 else data)
        for _ in range(draw.randrange(1, 4) if number % 3 and bad else 0):
            bad[draw.randrange(len(bad))] = draw.randrange(256)
        try:
            parse(bytes(bad))
        except ValueError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 2000


HOSTILE = {
    "a key of a deep tuple": b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s.",
    "a key of doubled tuples": b"\x80\x02})" + b"q\x00h\x00\x86" * 45 + b"K\x01s.",
    "a key of nested tuples": b"\x80\x02})\x85\x85K\x01s.",
    "an element of a set": b"\x80\x04\x8f())\x85\x85\x90.",
    "a frozenset": b"\x80\x04(\x91.",
    "a bytearray of a TiB": b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b".",
    "a registered extension": b"\x80\x02\x82\x01.",
    "the state of a class": b"cos\nsystem\n}b.",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_values_that_crash_or_hang_python_are_refused(case):
    with pytest.raises(ValueError, match="pickle"):
        parse(HOSTILE[case])


@pytest.mark.parametrize("data", [b"cos\nsystem\n(S'x'\ntR.", b"(S'x'\nios\nsystem\n.", b"(cos\nsystem\nS'x'\no."])
def test_every_call_is_recorded(data):
    made = parse(data)
    assert (made.name, made.args) == ("os.system", ("x",))


def test_messages_name_the_type_of_a_value_not_the_value():
    """A list may hold itself twice over, so that its text has no end."""
    from pretrain.interchange.dcp import _size

    doubled = []
    for _ in range(45):
        doubled = [doubled, doubled]
    with pytest.raises(ValueError, match=r"offset \(a list\) must have integers"):
        _size(doubled)
