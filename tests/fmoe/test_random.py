"""Keyed randomness: the hash as written in C, its distribution, its keys."""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fmoe import random
from fmoe.experts import ffn, initial
from fmoe.experts.ffn import FFNExperts
from fmoe.kernels import backends
from fmoe.kernels.cuda import launch
from fmoe.kernels.native import loader as native
from fmoe.routing import RoutingGroups


def mix32(x):
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return x ^ (x >> np.uint32(16))


def hashes(key, start, stop):
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32((key >> 32) & 0xFFFFFFFF)
    with np.errstate(over="ignore"):
        return mix32(mix32(np.arange(start, stop, dtype=np.uint32) * np.uint32(0x9E3779B1) + low) ^ high)


KEYS = torch.tensor([0, 1, -1, 2**62 + 12345, -(2**63)])


def test_uniform_is_murmur3s_finaliser_twice():
    for start in (0, 7):
        for row, key in zip(random.uniform(KEYS, 100, start), KEYS.tolist(), strict=True):
            expected = (hashes(key, start, start + 100) >> np.uint32(8)).astype(np.float64) * 2.0**-24
            assert np.array_equal(row.numpy().astype(np.float64), expected)


def test_uniform16_is_the_halves_of_the_same_hashes():
    for row, key in zip(random.uniform16(KEYS, 100), KEYS.tolist(), strict=True):
        x = hashes(key, 0, 50)
        for n, half in enumerate((x & np.uint32(0xFFFF), x >> np.uint32(16))):
            signed = (half.astype(np.int64) + 2**15) % 2**16 - 2**15
            assert np.array_equal(row[n::2].numpy().astype(np.float64), signed * 2.0**-16 + 0.5)


@pytest.mark.parametrize("start", [1, 6, 9])
@pytest.mark.parametrize("count", [1, 4, 7])
def test_uniform16_from_any_start(start, count):
    assert torch.equal(random.uniform16(KEYS, count, start), random.uniform16(KEYS, 20)[:, start : start + count])


@pytest.mark.parametrize("noise", [random.uniform, random.uniform16])
def test_uniform_is_uniform_and_rows_are_unrelated(noise):
    keys = random.fold(torch.tensor(random.key("a", 1)), torch.arange(64))
    u = noise(keys, 4096).double()
    assert u.min() >= 0 and u.max() < 1
    counts = torch.histc(u, 64, 0, 1)
    chi2 = ((counts - u.numel() / 64) ** 2 / (u.numel() / 64)).sum().item()
    assert chi2 < 63 + 5 * (2 * 63) ** 0.5
    correlation = torch.corrcoef(u)
    assert (correlation - torch.eye(64)).abs().max() < 6 / 4096**0.5
    assert u[:, 1:].sub(0.5).mul(u[:, :-1] - 0.5).mean().abs() < 6 / 12 / u.numel() ** 0.5


def test_exact_normal_is_a_place_in_an_interval_of_equal_probability():
    """As written with numpy from the hash; all ends are those of the quantiles but the outermost two."""
    ends = np.array(random._ends())
    quantiles = torch.special.ndtri(torch.arange(1, 2**16, dtype=torch.float64) / 2**16).numpy()
    assert np.abs(ends[1:-1] - quantiles).max() <= 2.0**-20 and np.array_equal(ends, -ends[::-1])
    for start in (0, 7):
        for row, key in zip(random.exact_normal(KEYS, 100, start), KEYS.tolist(), strict=True):
            x = hashes(key, start, start + 100)
            interval = ((x >> np.uint32(16)).astype(np.int64) + 2**15) % 2**16
            place = ((x & np.uint32(0xFFFF)) + 0.5) * 2.0**-16
            assert np.array_equal(row.numpy(), (ends[interval] + place * np.diff(ends)[interval]).astype(np.float32))


def test_exact_normal_is_normal_and_rows_are_unrelated():
    keys = random.fold(torch.tensor(random.key("a", 1)), torch.arange(64))
    z = random.exact_normal(keys, 2**14).double()
    n = z.numel()
    assert abs(z.mean()) < 5 / n**0.5 and abs(z.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs(z.pow(3).mean()) < 5 * (15 / n) ** 0.5 and abs(z.pow(4).mean() - 3) < 5 * (96 / n) ** 0.5
    for limit in (2.0, 3.0, 4.0):
        expected = float(torch.special.erfc(torch.tensor(limit / 2**0.5, dtype=torch.float64)))
        assert abs((z.abs() > limit).double().mean() - expected) < 5 * (expected / n) ** 0.5
    share = torch.special.ndtr(z).view(-1).sort().values  # Kolmogorov-Smirnov
    assert (share - torch.arange(1, n + 1) / n).abs().max() < 2 / n**0.5
    assert (torch.corrcoef(z) - torch.eye(64)).abs().max() < 6 / 2**7


@pytest.mark.parametrize("is_normal", [False, True])
@pytest.mark.parametrize("count", [0, 1, 17, 24_577, 200_001])
def test_initial_weights_in_chunks_and_by_the_native_backend(is_normal, count, monkeypatch):
    """The same bits, from several threads too."""
    keys = KEYS.tolist()
    given = (keys, count, torch.device("cpu"), 0.3, is_normal)
    draw = random.exact_normal if is_normal else lambda *a: random.uniform(*a) * 2 - 1
    expected = draw(KEYS, count) * 0.3
    if native.load():
        assert torch.equal(initial.draw(*given), expected)
    monkeypatch.setattr(backends, "native_is_loaded", False)
    assert torch.equal(initial.draw(*given), expected)


def test_a_gpu_with_kernels_draws_for_the_cpu(monkeypatch):
    """Without the native backend, for which the processor needs 29 ns a number."""
    gpu, real, asked = torch.device("cuda", 0), initial.draw, []

    def draw(keys, count, device, *options):
        asked.append(device)
        monkeypatch.setattr(backends, "current_gpu", lambda: None)
        return real(keys, count, torch.device("cpu"), *options)

    monkeypatch.setattr(backends, "native_is_loaded", False)
    monkeypatch.setattr(backends, "current_gpu", lambda: gpu)
    monkeypatch.setattr(initial, "draw", draw)
    found = real([1, 2], 100, torch.device("cpu"), 0.3, True)
    assert asked == [gpu] and torch.equal(found, random.exact_normal(torch.tensor([1, 2]), 100) * 0.3)


@pytest.mark.parametrize("capability", [None, (9, 0), (8, 0)])
def test_the_gpu_that_draws_has_kernels(capability, monkeypatch):
    """None where no GPU is visible, or where its kernels are not loaded."""
    monkeypatch.setattr(launch, "launchers", {"sm_90": object(), "none": object()})
    monkeypatch.setattr(launch, "_arch_of_device", {})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert backends.current_gpu() == (torch.device("cuda", 1) if capability == (9, 0) else None)


def test_a_layer_of_the_cpu_beside_a_gpu_without_kernels_is_native(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ffn.cuda, "load", lambda device: asked.append(device))
    monkeypatch.setattr(ffn.native, "load", lambda: asked.append("native"))
    FFNExperts(2, 4, 6)
    assert asked == [None, "native"]


class Operations(TorchDispatchMode):
    """Notes the names of operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.__name__.partition(".")[0].strip("_"))
        return func(*args, **(kwargs or {}))


# Of integers, of memory, and those that IEEE 754 rounds: the same bits on every device.
EXACT = {"add", "sub", "mul", "bitwise_and", "bitwise_xor", "bitwise_right_shift", "arange", "index_select", "to_copy"}
EXACT |= {"rshift", "empty", "copy", "slice", "select", "unsqueeze", "view", "detach", "lift_fresh", "zero", "unbind"}
EXACT |= {"diff", "local_scalar_dense", "split", "t", "narrow", "as_strided"}


@pytest.mark.parametrize(
    "method", [None, functools.partial(nn.init.normal_, mean=0.1, std=0.3)], ids=["default", "std"]
)
def test_initial_weights_have_the_same_bits_on_every_device(method, monkeypatch):
    """By the operations that draw them; tests/gpu compares a GPU's."""
    experts = FFNExperts(3, 40, 200, init_method=method, output_init_method=method)
    monkeypatch.setattr(backends, "native_is_loaded", False)
    random._normal_ends.clear()
    with Operations() as seen:
        experts.reset_parameters()
    assert seen.names <= EXACT, seen.names - EXACT


@pytest.mark.parametrize("method", [None, functools.partial(nn.init.normal_, mean=0.0, std=0.02)])
def test_experts_are_made_under_fake_tensors_before_and_after_real_ones(method):
    def made():
        return FFNExperts(2, 4, 6, init_method=method, output_init_method=method)

    random._normal_ends.clear()
    with FakeTensorMode():
        assert isinstance(made().weight_in.data, FakeTensor)
    expected = made()
    with FakeTensorMode():
        assert isinstance(made().weight_in.data, FakeTensor)
    with torch.inference_mode():
        made()
    assert torch.equal(made().weight_in, expected.weight_in)


def test_initial_weights_are_those_of_the_keys(monkeypatch):
    monkeypatch.setattr("fmoe.experts.ffn._NUMBERS_AT_ONCE", 100)  # a few experts at a time
    method = functools.partial(nn.init.normal_, mean=0.5, std=0.25)
    experts = FFNExperts(5, 4, 6, seed=3, first_expert=2, init_method=method)
    for local in range(5):
        keys = [torch.tensor([random.key("expert", 3, 2 + local, name)]) for name in ("weight_in", "weight_out")]
        assert torch.equal(experts.weight_in[local].view(-1), random.exact_normal(keys[0], 24)[0] * 0.25 + 0.5)
        bound = 6**-0.5
        assert torch.equal(experts.weight_out[local].view(-1), (random.uniform(keys[1], 24)[0] * 2 - 1) * bound)
    assert not experts.bias_in.any() and experts.bias_out.any()


@pytest.mark.parametrize(
    "method",
    [
        functools.partial(nn.init.normal_, generator=None),
        functools.partial(nn.init.trunc_normal_, std=0.1),
        lambda matrix: matrix.normal_(0, 0.1),
    ],
)
def test_other_initialisers_fill_a_matrix_on_the_cpu(method):
    """Under the key of the expert, and without a trace in the default generator."""
    before = torch.get_rng_state()
    experts = FFNExperts(2, 4, 6, init_method=method)
    assert torch.equal(torch.get_rng_state(), before)
    for local in range(2):
        torch.manual_seed(random.key("expert", 0, local, "weight_in"))
        expected = torch.empty(6, 4)
        method(expected)
        assert torch.equal(experts.weight_in[local], expected)


def test_noise_belongs_to_the_group_not_to_the_batch():
    whole = RoutingGroups(6, 8, noise_key=lambda: 99).uniform(3, "p", torch.device("cpu")).view(6, 8, 3)
    part = RoutingGroups(2, 8, first_group=4, noise_key=lambda: 99).uniform(3, "p", torch.device("cpu"))
    assert torch.equal(part.view(2, 8, 3), whole[4:])
    other = RoutingGroups(6, 8, noise_key=lambda: 99).uniform(3, "q", torch.device("cpu")).view(6, 8, 3)
    assert not torch.equal(other, whole)


def test_keyed_leaves_the_generator_alone_and_repeats():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with random.keyed("expert", 1, 2):
        a = torch.randn(3)
    assert torch.equal(torch.get_rng_state(), state)
    with random.keyed("expert", 1, 2):
        assert torch.equal(torch.randn(3), a)
    with random.keyed("expert", 1, 3):
        assert not torch.equal(torch.randn(3), a)


def test_position_travels_with_the_generator_state():
    where = random.set_position(seed=3, step=8, first_token=512)
    state = torch.get_rng_state()
    assert random.position() == where
    random.set_position(seed=3, step=9)
    torch.set_rng_state(state)
    assert random.position() == where
    torch.manual_seed(12345)
    assert random.position() is None


@pytest.mark.parametrize("parts", [((1, 2), (12,)), (("1",), (1,)), (("a", "b"), ("ab",))])
def test_keys_of_different_parts_differ(parts):
    assert random.key(*parts[0]) != random.key(*parts[1])


@pytest.mark.parametrize("rate", [0.0, 1e-4, 0.1, 0.5, 0.999])
def test_dropped_elements_are_a_function_of_their_key_and_offset(rate):
    keys = random.fold(torch.tensor(7), torch.arange(64))
    dropped = random.dropped(keys, 2001, rate)
    assert dropped.shape == (64, 2001) and dropped.dtype == torch.bool
    assert float(dropped.float().mean()) == pytest.approx(rate, abs=4e-3)
    assert torch.equal(random.dropped(keys[5:9], 1000, rate), dropped[5:9, :1000])
    assert random.drop_rate(rate) == pytest.approx(rate, abs=2**-17)


def test_a_rate_next_to_one_leaves_some_to_be_scaled():
    assert random.drop_rate(1 - 1e-9) < 1
    assert random.dropped(torch.arange(4), 100, 1 - 1e-9).float().mean() > 0.99
