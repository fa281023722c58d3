"""Saving and loading in one process: dtypes, layouts, splits, coverage, states."""

import itertools
import json
import math
import random
from dataclasses import replace

import pytest
import torch
from pieces import whole
from safetensors.torch import load_file

from fmoe.errors import UserError
from pretrain.checkpoint import TensorPiece, collect, open_checkpoint, save, write
from pretrain.checkpoint.shard import CODES


def random_of(dtype, *shape):
    bits = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return (bits % 2).bool().view(shape) if dtype == torch.bool else bits.view(dtype).view(shape)


def same_bits(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
    )


DTYPES = list(CODES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trip_is_bit_exact(tmp_path, dtype):
    tensors = {
        "matrix": random_of(dtype, 5, 3),
        "scalar": random_of(dtype, 1).reshape(()),
        "empty": random_of(dtype, 0),
        "empty.matrix": random_of(dtype, 3, 0, 2),
        "odd": random_of(dtype, 7),
    }
    path = save(tmp_path, 3, [whole(n, t) for n, t in tensors.items()], {}, {})
    checkpoint = open_checkpoint(path)
    assert checkpoint.step == 3
    assert checkpoint.names() == sorted(tensors)
    for name, tensor in tensors.items():
        assert checkpoint.dtype(name) == dtype
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert same_bits(checkpoint.read(name), tensor)
        out = torch.zeros_like(tensor)
        assert checkpoint.read(name, out=out) is out
        assert same_bits(out, tensor)


def test_mixed_dtypes_are_aligned_and_readable_by_the_library(tmp_path):
    tensors = {str(i): random_of(dtype, 3) for i, dtype in enumerate(reversed(DTYPES))}
    path = save(tmp_path, 0, [whole(n, t) for n, t in tensors.items()], {}, {})
    loaded = load_file(path / "shard-00000.safetensors")
    assert all(same_bits(loaded[name], tensor) for name, tensor in tensors.items())
    assert all(tensor.data_ptr() % tensor.itemsize == 0 for tensor in loaded.values())


def test_strided_shared_and_parameter_data(tmp_path):
    base = torch.randn(6, 8)
    tied = torch.nn.Parameter(torch.randn(4, 4))
    pieces = [whole("t", base.t()), whole("step", base[::2, 1::3]), whole("a", tied), whole("b", tied)]
    checkpoint = open_checkpoint(save(tmp_path, 0, [*pieces, whole("expand", base[:1].expand(3, 8))], {}, {}))
    for piece in pieces:
        assert torch.equal(checkpoint.read(piece.name), piece.data)
    assert torch.equal(checkpoint.read("expand"), base[:1].expand(3, 8))

    strided = torch.zeros(6, 16).t()[::2]
    assert not strided.is_contiguous()
    checkpoint.read("t", out=strided)
    assert torch.equal(strided, base.t())
    target = torch.nn.Parameter(torch.zeros(4, 4))
    checkpoint.fill(whole("a", target))
    assert torch.equal(target, tied)


def test_names_that_look_like_keys_do_not_collide(tmp_path):
    tensor = torch.arange(6.0)
    halves = [TensorPiece("w", (6,), (0,), (3,), tensor[:3]), TensorPiece("w", (6,), (3,), (3,), tensor[3:])]
    checkpoint = open_checkpoint(save(tmp_path, 0, [whole("w#1", -tensor), *halves, whole("w#1#", tensor + 9)], {}, {}))
    assert torch.equal(checkpoint.read("w"), tensor)
    assert torch.equal(checkpoint.read("w#1"), -tensor)
    assert torch.equal(checkpoint.read("w#1#"), tensor + 9)


def blocks(tensor, counts):
    """(offset, block) of a grid of uneven blocks."""
    grid = [[]]
    for size, count in zip(tensor.shape, counts, strict=True):
        cuts = [size * i // count for i in range(count + 1)]
        grid = [[*done, (a, b - a)] for done in grid for a, b in itertools.pairwise(cuts)]
    return [(tuple(a for a, _ in cell), tuple(n for _, n in cell)) for cell in grid]


def cut(name, tensor, counts, num_ranges):
    """Pieces of a tensor: a grid of blocks, each flattened and cut into ranges where num_ranges > 1."""
    pieces = []
    for offset, block in blocks(tensor, counts):
        data = tensor[tuple(slice(o, o + n) for o, n in zip(offset, block, strict=True))]
        size = data.numel()
        if num_ranges == 1:
            pieces.append(TensorPiece(name, tuple(tensor.shape), offset, block, data))
            continue
        marks = sorted([0, size, *random.Random(size).choices(range(size + 1), k=num_ranges - 1)])
        for start, stop in itertools.pairwise(marks):
            flat = data.reshape(-1)[start:stop]
            pieces.append(TensorPiece(name, tuple(tensor.shape), offset, block, flat, start, stop))
    return pieces


SPLITS = [
    ((1, 1, 1), 1),
    ((2, 1, 1), 1),
    ((1, 2, 1), 1),
    ((1, 1, 4), 1),
    ((1, 1, 1), 4),
    ((2, 1, 2), 3),
    ((1, 3, 1), 2),
]


@pytest.mark.parametrize("written", SPLITS, ids=str)
def test_a_split_reads_as_any_other_split(tmp_path, written):
    tensor = torch.randn(5, 7, 6)
    checkpoint = open_checkpoint(save(tmp_path, 0, cut("w", tensor, *written), {}, {}))
    for wanted in SPLITS:
        for piece in cut("w", tensor, *wanted):
            place = torch.full(piece.data.shape, math.nan)
            checkpoint.fill(replace(piece, data=place))
            assert torch.equal(place, piece.data)


def test_a_range_comes_back_flat(tmp_path):
    tensor = torch.randn(4, 3)
    checkpoint = open_checkpoint(save(tmp_path, 0, [whole("w", tensor)], {}, {}))
    assert torch.equal(checkpoint.read("w", start=2, stop=11), tensor.reshape(-1)[2:11])
    assert checkpoint.read("w", start=0, stop=12).shape == (12,)
    assert torch.equal(checkpoint.read("w", (1, 1)), tensor[1:, 1:])


def piece(offset, block, start=0, stop=None, shape=(4, 4)):
    size = math.prod(block) if stop is None else stop - start
    return TensorPiece("w", shape, offset, block, torch.zeros(block if stop is None else size), start, stop)


@pytest.mark.parametrize(
    "pieces, message",
    [
        ([piece((0, 0), (2, 4))], "8 of its 16 elements are missing"),
        ([piece((0, 0), (3, 4)), piece((2, 0), (2, 4))], "both hold the element at (2, 0)"),
        ([piece((0, 0), (4, 4), 0, 7), piece((0, 0), (4, 4), 8, 16)], "1 of its 16 elements are missing"),
        ([piece((0, 0), (4, 4), 0, 7), piece((0, 0), (4, 4), 6, 16)], "both hold the element at (1, 2)"),
        ([piece((2, 0), (4, 4))], "tensor w: block (4, 4) at (2, 0)"),
        ([piece((0, 0), (2, 4)), piece((2, 0), (2, 4), shape=(4, 5))], "and float32 (4, 5)"),
        ([TensorPiece("w", (4,), (0,), (4,), torch.zeros(3))], "has 3 elements, but its region has 4"),
        ([TensorPiece("w", (4, 2), (0, 0), (4, 2), torch.zeros(2, 4))], "has shape (2, 4), but its block has (4, 2)"),
        ([TensorPiece("w", (4,), (0,), (4,), torch.zeros(4, dtype=torch.complex64))], "complex64 is not supported"),
        ([TensorPiece("__metadata__", (), (), (), torch.zeros(()))], "reserved"),
    ],
)
def test_pieces_that_do_not_make_the_tensor_are_refused_and_leave_nothing(tmp_path, pieces, message):
    with pytest.raises(UserError, match=r"^tensor \w+: ") as caught:
        save(tmp_path, 1, pieces, {}, {})
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_reading_what_is_not_there(tmp_path):
    checkpoint = open_checkpoint(save(tmp_path, 1, [whole("w", torch.zeros(4, 4))], {}, {}))
    for wrong, message in [
        (lambda: checkpoint.read("v"), "has no tensor v"),
        (lambda: checkpoint.read("w", (2, 0), (4, 4)), "tensor w: block (4, 4) at (2, 0) is outside"),
        (lambda: checkpoint.read("w", (0,), (4,)), "tensor w: block (4,) at (0,) differs in number of axes"),
        (lambda: checkpoint.read("w", start=3, stop=17), "tensor w: range [3, 17)"),
        (lambda: checkpoint.read("w", out=torch.zeros(15)), "out has 15 elements of float32"),
        (lambda: checkpoint.read("w", out=torch.zeros(4, 4, dtype=torch.float16)), "16 elements of float16"),
        (
            lambda: checkpoint.fill(piece((0, 0), (4, 4), shape=(8, 4))),
            "shape (4, 4) in the checkpoint, expected (8, 4)",
        ),
        (lambda: checkpoint.rank_state(1), "has no state of rank 1"),
    ]:
        with pytest.raises(UserError) as caught:
            wrong()
        assert message in str(caught.value)
        assert str(tmp_path) in str(caught.value)


def test_states_come_back_exactly(tmp_path):
    state = {
        "step": 7,
        "lr": 0.1 + 0.2,
        "loss": [math.inf, -math.inf, None, True, "é\n"],
        "python": random.getstate(),
        "nested": {"": {"bytes": b"\x00\xff", "empty": b""}},
    }
    rank_state = {"torch": torch.get_rng_state(), "bf16": torch.randn(2, 3).bfloat16(), "none": torch.empty(0, 2)}
    checkpoint = open_checkpoint(save(tmp_path, 7, [], {**state, "nan": math.nan}, rank_state))
    assert math.isnan(checkpoint.state.pop("nan"))
    assert checkpoint.state == state
    loaded = checkpoint.rank_state(0)
    assert loaded.keys() == rank_state.keys()
    assert all(same_bits(loaded[key], value) for key, value in rank_state.items())
    json.loads((checkpoint.path / "state.json").read_text(), parse_constant=pytest.fail)  # strict JSON


VALUES = {
    "int key": {1: 2},
    "tag": {"$float": "1"},
    "set": {1, 2},
    "object": object(),
    "complex tensor": torch.zeros(1, dtype=torch.complex64),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_state_that_json_cannot_hold_is_refused_by_its_place(tmp_path, value):
    with pytest.raises(TypeError, match=r"state\.a\[0\]"):
        save(tmp_path, 1, [], {"a": [value]}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_that_is_a_copy_does_not_follow_training(tmp_path):
    weight, state = torch.zeros(3), {"seen": [1]}
    snapshot = collect([whole("w", weight)], state, {}, copy=True)
    weight += 1
    state["seen"].append(2)
    checkpoint = open_checkpoint(write(tmp_path, 1, snapshot))
    assert checkpoint.read("w").tolist() == [0, 0, 0]
    assert checkpoint.state == {"seen": [1]}
