"""Randomness that does not depend on how a job is split.

Two rules (docs/layer.md tells why):

* Initial weights are drawn under a key made of (seed, layer, global expert id, name): a rank draws its own experts and
  no other, and they are the same at every expert parallel size.
* Noise during training (jitter, random second expert) is a counter-based hash of (seed, layer, step, routing group,
  purpose, position within the group). It is made of tensor arithmetic alone, so that a group has the same noise on
  whichever rank it lies, on CPU and on GPU.

Where the training is (seed, step, first token of the micro batch) is told once a micro batch by `set_position`. It
travels in the seed of torch's default generator. Activation recomputation, torch's and Megatron's alike, restores that
generator before it runs a layer again, and with it the position.
"""

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_INT63 = (1 << 63) - 1


def key(*parts: int | str) -> int:
    """A 63-bit key of ``parts``, the same in every process, version and machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & _INT63


@contextlib.contextmanager
def keyed(*parts: int | str) -> Iterator[None]:
    """Within, torch's default CPU generator is seeded with `key`; afterwards it is as it was."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(key(*parts))
    try:
        yield
    finally:
        torch.set_rng_state(state)


@dataclass(frozen=True)
class Position:
    """Where in the training a forward pass is.

    Attributes:
        seed: the seed of the run.
        step: optimizer steps done before this one.
        first_token: index, within the global batch of the step, of the first token of this micro batch.
    """

    seed: int
    step: int
    first_token: int = 0


# Positions by the seed that stands for them. In flight are as many as a pipeline holds micro batches; the oldest go.
_positions: OrderedDict[int, Position] = OrderedDict()
_MAX_POSITIONS = 4096


def set_position(seed: int, step: int, first_token: int = 0, *, stream: int = 0) -> Position:
    """Tells the layers where the training is, and seeds torch's default generators from it.

    Call it before the forward pass of every micro batch. Dropout and whatever else draws from the default generator
    then depends on (seed, step, first_token, stream) alone: a resumed run needs no stored generator state for it.

    Args:
        stream: tells apart processes that hold the same tokens but different layers (the pipeline stage).
    """
    position = Position(seed, step, first_token)
    state = key("position", seed, step, first_token, stream)
    torch.manual_seed(state)
    _remember(state, position)
    return position


def branch(*parts: int | str) -> int:
    """A seed for torch's default CPU generator, made of the present one and ``parts``, under which the position holds
    too: for who seeds that generator while a model runs (Megatron's regions of tensor parallel ranks' own noise)."""
    seed = key("branch", torch.initial_seed(), *parts)
    where = position()
    if where is not None:
        _remember(seed, where)
    return seed


def _remember(state: int, where: Position) -> None:
    _positions[state] = where
    _positions.move_to_end(state)
    while len(_positions) > _MAX_POSITIONS:
        _positions.popitem(last=False)


def position() -> Position | None:
    """The position that `set_position` told last, also under recomputation; None if it never was told."""
    return _positions.get(torch.initial_seed())


def first_token() -> int | Tensor:
    """Of the position, else 0. A scalar on the host while torch.compile traces, which must not see its value."""
    if torch.compiler.is_compiling():
        return _first_token_op(device=torch.device("cpu"))
    return _first_token()


def _first_token() -> int:
    where = position()
    return 0 if where is None else where.first_token


def noise_key(layer_seed: int) -> int | Tensor:
    """The key of a layer's noise in this forward pass.

    Without a position it is drawn from torch's default generator: reproducible under `torch.manual_seed`, new at each
    call, the same when recomputed. A scalar on the host while torch.compile traces, which must not see its value.
    """
    if torch.compiler.is_compiling():
        return _noise_key_op(layer_seed, device=torch.device("cpu"))
    return _noise_key(layer_seed)


def derive(key_: int | Tensor, purpose: str, device: torch.device) -> Tensor:
    """``key(key_, purpose)`` as an int64 scalar, on ``device`` or (while torch.compile traces) on the host."""
    if torch.compiler.is_compiling():
        return _derive_op(torch.as_tensor(key_, device="cpu", dtype=torch.int64), purpose)
    # Filled there: a copy would wait for the device.
    return torch.full((), key(int(key_), purpose), dtype=torch.int64, device=device)


def _noise_key(layer_seed: int) -> int:
    where = position()
    if where is None:
        return int(torch.randint(_INT63, (), device="cpu", dtype=torch.int64))
    return key("noise", where.seed, layer_seed, where.step)


# What Python does with keys, as operations that torch.compile does not look into: it would freeze their values. The
# device is a keyword as in torch's own, by which a checkpoint that is traced finds whose generator it is to keep.
@torch.library.custom_op("fmoe::noise_key", mutates_args=(), tags=torch.Tag.nondeterministic_seeded)
def _noise_key_op(layer_seed: int, *, device: torch.device) -> Tensor:
    return torch.tensor(_noise_key(layer_seed), device=device, dtype=torch.int64)


@_noise_key_op.register_fake
def _(layer_seed: int, *, device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


@torch.library.custom_op("fmoe::first_token", mutates_args=(), tags=torch.Tag.nondeterministic_seeded)
def _first_token_op(*, device: torch.device) -> Tensor:
    return torch.tensor(_first_token(), device=device, dtype=torch.int64)


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
    """Numbers in [0, 1), float32 of shape [G, count]: row g is a pure function of ``keys_G[g]`` (int64), of which
    these are the ones from ``start`` on. Multiples of 2^-24, the top bits of a hash each.
    """
    return _shift_right(_hash(keys_G, start, start + count), 8).to(torch.float32).mul_(2.0**-24)


def uniform16(keys_G: Tensor, count: int, start: int = 0) -> Tensor:
    """`uniform` in multiples of 2^-16, two numbers from each hash: for noise on every element of an input, where the
    hash is most of the cost."""
    first = start // 2
    halves = _hash(keys_G, first, (start + count + 1) // 2).view(torch.int16)  # the low half first, and signed
    return halves[:, start - 2 * first :][:, :count].to(torch.float32).mul_(2.0**-16).add_(0.5)


def dropped(keys_G: Tensor, count: int, rate: float) -> Tensor:
    """bool [G, count], each True with probability `drop_rate(rate)`: row g is a pure function of ``keys_G[g]``. 16 bits
    decide, two elements for each hash, and no floating-point number is made."""
    halves = _hash(keys_G, 0, (count + 1) // 2).view(torch.int16)[:, :count]
    return halves < round(drop_rate(rate) * 2**16) - 2**15


def drop_rate(rate: float) -> float:
    """The multiple of 2^-16 next to ``rate``, below 1: the rate at which `dropped` drops, and which scales the rest."""
    return min(round(rate * 2**16), 2**16 - 1) / 2**16


def _hash(keys_G: Tensor, start: int, stop: int) -> Tensor:
    """int32 [G, stop - start]: a counter hashed twice with the finaliser of MurmurHash3 (public domain), each time
    with half of the key. int32 arithmetic wraps, which is what the hash wants."""
    low_G1 = keys_G.bitwise_and(0xFFFFFFFF).to(torch.int32).unsqueeze(1)
    high_G1 = keys_G.bitwise_right_shift(32).to(torch.int32).unsqueeze(1)
    counter = torch.arange(start, stop, dtype=torch.int32, device=keys_G.device)
    x = _mix32(counter * _int32(0x9E3779B1) + low_G1)
    return _mix32(x.bitwise_xor_(high_G1))


def normal(keys_G: Tensor, count: int) -> Tensor:
    """Standard normal numbers, float32 of shape [G, count]: the quantiles of `uniform`'s, within 5.3 of zero."""
    # In the middle of its interval of width 2^-24 no number is 0; in float64, so that none is rounded to 1 either.
    middle = uniform(keys_G, count).double() + 2.0**-25
    return (2 * middle - 1).erfinv().mul(2**0.5).float()


def fold(key_: Tensor, index_G: Tensor) -> Tensor:
    """A key (int64) for every index: splitmix64's finaliser over ``key + index * odd constant``."""
    x = key_ + (index_G + 1) * _int64(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _int64(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _int64(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _mix32(x: Tensor) -> Tensor:
    x = x.bitwise_xor_(_shift_right(x, 16)).mul_(_int32(0x85EBCA6B))
    x = x.bitwise_xor_(_shift_right(x, 13)).mul_(_int32(0xC2B2AE35))
    return x.bitwise_xor_(_shift_right(x, 16))


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Logical shift; torch's is arithmetic."""
    bits = torch.iinfo(x.dtype).bits
    return (x >> by).bitwise_and_((1 << (bits - by)) - 1)


def _int32(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x


def _int64(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x
