"""Randomness that does not depend on how a job is split.

Two rules (docs/layer.md explains why):

* Initial weights are a function of (the layer's seed, global expert id, name). A rank draws only its own experts, and
  they are the same at every expert parallel size.
* Noise during training (jitter, random second expert) is a counter-based hash of (seed, layer, step, routing group,
  purpose, position within the group). A group has the same noise on every rank, on CPU and on GPU.

`set_position` sets the position in training (seed, step, first token of the micro batch) once per micro batch. The seed
of torch's default generator identifies the position. Activation recomputation, torch's and Megatron's, restores that
generator, and with it the position, before it runs a layer again.
"""

import contextlib
import functools
import hashlib
import statistics
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_INT63 = (1 << 63) - 1
_OUTERMOST = 4.6117  # see `normal_ends`


def key(*parts: int | str) -> int:
    """Return a 63-bit hash of ``parts``, equal in every process, on every machine and in every version of Python."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & _INT63


@contextlib.contextmanager
def keyed(*parts: int | str) -> Iterator[None]:
    """Seed torch's default CPU generator with ``key(*parts)`` in this context; restore its state afterwards."""
    with seeded(key(*parts)):
        yield


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's default CPU generator in this context; restore its state afterwards."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)


@dataclass(frozen=True)
class Position:
    """Position of a forward pass in training.

    Attributes:
        seed: seed of the run.
        step: number of previous optimizer steps.
        first_token: index of the micro batch's first token within the global batch.
    """

    seed: int
    step: int
    first_token: int = 0


# Positions by generator seed: as many as the micro batches of a pipeline need. The oldest are dropped first.
_positions: OrderedDict[int, Position] = OrderedDict()
_MAX_POSITIONS = 4096


def set_position(seed: int, step: int, first_token: int = 0, *, stream: int = 0) -> Position:
    """Set the position in training, and seed torch's default generators from it.

    Call it before the forward pass of every micro batch. Dropout and other draws from the default generator then depend
    only on (seed, step, first_token, stream), so that a resumed run needs no stored generator state.

    Args:
        seed, step, first_token: see `Position`.
        stream: number that distinguishes processes with the same tokens but different layers (the pipeline stage).
    """
    position = Position(seed, step, first_token)
    state = key("position", seed, step, first_token, stream)
    torch.manual_seed(state)
    _remember(state, position)
    return position


def branch(*parts: int | str) -> int:
    """Return a new seed for torch's default CPU generator, derived from its current seed and ``parts``.

    Use it in code that seeds the generator while a model runs, such as Megatron's regions with separate noise per
    tensor parallel rank. `position` returns the same value under the new seed as under the old one.
    """
    seed = key("branch", torch.initial_seed(), *parts)
    if (where := position()) is not None:
        _remember(seed, where)
    return seed


def _remember(state: int, where: Position) -> None:
    _positions[state] = where
    _positions.move_to_end(state)
    while len(_positions) > _MAX_POSITIONS:
        _positions.popitem(last=False)


def position() -> Position | None:
    """Return the position of the current forward pass, also when it is recomputed.

    Return None if none was set, or if torch's default generator was seeded in another way since.
    """
    return _positions.get(torch.initial_seed())


def first_token(*, is_traceable: bool = True) -> int | Tensor:
    """Return ``first_token`` of the current `position`; 0 if there is no position.

    While torch.compile traces, return a scalar tensor on the host, because compiled code must not contain the
    value as a constant.

    Args:
        is_traceable: False returns the number even then.
    """
    if is_traceable and torch.compiler.is_compiling():
        return _first_token_op(device=torch.device("cpu"))
    where = position()
    return 0 if where is None else where.first_token


def noise_key(layer_seed: int, *, is_traceable: bool = True) -> int | Tensor:
    """Return the key of a layer's noise in this forward pass, a hash of (seed of the run, seed of the layer, step).

    Without a `position`, the key is drawn from torch's default generator. It is then reproducible under
    `torch.manual_seed`, different in each call, and equal under recomputation.

    While torch.compile traces, return a scalar tensor on the host, because compiled code must not contain the
    value as a constant.

    Args:
        is_traceable: False returns the number even then.
    """
    if is_traceable and torch.compiler.is_compiling():
        return _noise_key_op(layer_seed, device=torch.device("cpu"))
    if (where := position()) is None:
        return int(torch.randint(_INT63, (), device="cpu", dtype=torch.int64))
    return key("noise", where.seed, layer_seed, where.step)


def draw_seed() -> int:
    """Draw a seed from torch's default CPU generator."""
    return int(torch.randint(1 << 62, (), device="cpu", dtype=torch.int64))


def derive(key_: int | Tensor, purpose: str, device: torch.device) -> Tensor:
    """Return ``key(key_, purpose)`` as an int64 scalar on ``device``, or on the host while torch.compile traces."""
    if torch.compiler.is_compiling():
        return _derive_op(torch.as_tensor(key_, device="cpu", dtype=torch.int64), purpose)
    # Filled on the device: a copy would synchronize.
    return torch.full((), key(int(key_), purpose), dtype=torch.int64, device=device)


# Custom operations for the Python functions of keys, whose results torch.compile would take as constants. The device is
# a keyword argument because a traced checkpoint looks there for the device whose generator it must save.
@torch.library.custom_op("fmoe::noise_key", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _noise_key_op(layer_seed: int, *, device: torch.device) -> Tensor:
    return torch.tensor(noise_key(layer_seed, is_traceable=False), device=device, dtype=torch.int64)


@_noise_key_op.register_fake
def _(layer_seed: int, *, device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


@torch.library.custom_op("fmoe::first_token", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _first_token_op(*, device: torch.device) -> Tensor:
    return torch.tensor(first_token(is_traceable=False), device=device, dtype=torch.int64)


@_first_token_op.register_fake
def _(*, device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


@torch.library.custom_op("fmoe::derive_key", mutates_args=())
def _derive_op(key_: Tensor, purpose: str) -> Tensor:
    return torch.tensor(key(int(key_), purpose), device=key_.device, dtype=torch.int64)


@_derive_op.register_fake
def _(key_: Tensor, purpose: str) -> Tensor:
    return torch.empty_like(key_)


def uniform(keys_G: Tensor, count: int, start: int = 0) -> Tensor:
    """Return uniform numbers in [0, 1), float32 [G, count], multiples of 2^-24.

    A key ``keys_G[g]`` (int64) determines a sequence of numbers. Row g has ``count`` of them, from index ``start``.
    """
    return _shift_right(_hash(keys_G, start, start + count), 8).to(torch.float32).mul_(2.0**-24)


def uniform16(keys_G: Tensor, count: int, start: int = 0) -> Tensor:
    """Return numbers like `uniform`, but multiples of 2^-16, from half as many hashes.

    Use it for noise on every element of an input.
    """
    first = start // 2
    halves = _hash(keys_G, first, (start + count + 1) // 2).view(torch.int16)  # low half first; signed
    return halves[:, start - 2 * first :][:, :count].to(torch.float32).mul_(2.0**-16).add_(0.5)


def dropped(keys_G: Tensor, count: int, rate: float) -> Tensor:
    """Return random bools [G, count], True with probability ``drop_rate(rate)``; ``keys_G[g]`` determines row g."""
    halves = _hash(keys_G, 0, (count + 1) // 2).view(torch.int16)[:, :count]
    return halves < round(drop_rate(rate) * 2**16) - 2**15


def drop_rate(rate: float) -> float:
    """Return the probability of True in `dropped`: the multiple of 2^-16 below 1 that is closest to ``rate``."""
    return min(round(rate * 2**16), 2**16 - 1) / 2**16


def _hash(keys_G: Tensor, start: int, stop: int) -> Tensor:
    """Return a hash for each key and each integer from ``start`` to ``stop - 1``, int32 [G, stop - start]."""
    # MurmurHash3's finalizer (public domain), once with each half of the key, in arithmetic that wraps around.
    low_G1 = keys_G.bitwise_and(0xFFFFFFFF).to(torch.int32).unsqueeze(1)
    high_G1 = keys_G.bitwise_right_shift(32).to(torch.int32).unsqueeze(1)
    counter = torch.arange(start, stop, dtype=torch.int32, device=keys_G.device)
    x = counter * _signed(0x9E3779B1, 32) + low_G1
    for half_G1 in (high_G1, None):
        x = x.bitwise_xor_(_shift_right(x, 16)).mul_(_signed(0x85EBCA6B, 32))
        x = x.bitwise_xor_(_shift_right(x, 13)).mul_(_signed(0xC2B2AE35, 32))
        x = x.bitwise_xor_(_shift_right(x, 16))
        if half_G1 is not None:
            x = x.bitwise_xor_(half_G1)
    return x


def normal(keys_G: Tensor, count: int) -> Tensor:
    """Return standard normal numbers, float32 [G, count], within 5.5 of zero; row g is a function of ``keys_G[g]``."""
    # The middle of each interval of width 2^-24 is never 0; in float64 it does not round to 1.
    middle = uniform(keys_G, count).double() + 2.0**-25
    return (2 * middle - 1).erfinv().mul(2**0.5).float()


def exact_normal(keys_G: Tensor, count: int, start: int = 0) -> Tensor:
    """Return standard normal numbers, float32 [G, count], within 4.62 of zero: the same bits on every device.

    The key ``keys_G[g]`` determines a sequence of numbers. Row g has ``count`` of them, from index ``start``. Use this
    function for initial weights; torch.compile cannot trace it.
    """
    # Half of a hash chooses one of 2^16 intervals of equal probability, the other half a point in that interval.
    ends = normal_ends(keys_G.device)
    hash_ = _hash(keys_G, start, start + count)
    interval = (hash_ >> 16).add_(1 << 15).view(-1)
    point = hash_.bitwise_and(0xFFFF).to(torch.float64).add_(0.5).mul_(2.0**-16)  # exact; only the sum below rounds
    point.mul_(ends.diff().double().index_select(0, interval).view_as(point))
    return point.add_(ends.double().index_select(0, interval).view_as(point)).float()


_normal_ends: dict[torch.device, Tensor] = {}


def normal_ends(device: torch.device) -> Tensor:
    """Return the ends of 2^16 intervals of equal standard normal probability, float32 [2^16 + 1].

    The two outermost intervals are finite, and just so wide that the numbers of `exact_normal` have variance 1. All
    ends are rounded to multiples of 2^-20. Therefore they do not depend on how a machine computes logarithms, and their
    differences are exact.
    """
    if torch._C._len_torch_dispatch_stack():  # modes such as FakeTensorMode reject tensors made outside them
        return torch.tensor(_ends(), dtype=torch.float32, device="cpu").to(device)
    if device not in _normal_ends:
        _normal_ends[device] = torch.tensor(_ends(), dtype=torch.float32, device="cpu").to(device)
    return _normal_ends[device]


@functools.cache
def _ends() -> list[float]:
    quantile = statistics.NormalDist().inv_cdf
    scale = 1 << 20
    lower = [round(quantile(k / (1 << 16)) * scale) / scale for k in range(1, 1 << 15)]
    lower.insert(0, -round(_OUTERMOST * scale) / scale)
    return [*lower, 0.0, *(-end for end in reversed(lower))]


def fold(key_: Tensor, index_G: Tensor) -> Tensor:
    """Return a key (int64) for every index: splitmix64's finalizer of ``key_ + (index + 1) * odd constant``."""
    x = key_ + (index_G + 1) * _signed(0x9E3779B97F4A7C15, 64)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB, 64)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Return ``x`` shifted logically; torch's shift is arithmetic."""
    bits = torch.iinfo(x.dtype).bits
    return (x >> by).bitwise_and_((1 << (bits - by)) - 1)


def _signed(x: int, bits: int) -> int:
    """Return the signed number with the bits of an unsigned one, which torch's constants must be."""
    return x - (1 << bits) if x >> (bits - 1) else x
