"""Keyed randomness: the hash as written in C, its distribution, its keys."""

import numpy as np
import pytest
import torch

from fmoe import random
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


def test_noise_belongs_to_the_group_not_to_the_batch():
    whole = RoutingGroups(6, 8, noise_key=lambda: 99).uniform(3, "p", torch.device("cpu")).view(6, 8, 3)
    part = RoutingGroups(2, 8, first_group=4, noise_key=lambda: 99).uniform(3, "p", torch.device("cpu"))
    assert torch.equal(part.view(2, 8, 3), whole[4:])
    other = RoutingGroups(6, 8, noise_key=lambda: 99).uniform(3, "q", torch.device("cpu")).view(6, 8, 3)
    assert not torch.equal(other, whole)


def test_split_and_join_are_inverse_in_every_layout():
    for sequence_first in (False, True):
        for size in (None, 4, 5, 24, 7, 100):
            groups = RoutingGroups(3, 8, size=size, sequence_first=sequence_first)
            x = torch.arange(48.0).view(24, 2)
            split = groups.split(x, pad=-1)
            assert split.shape == (groups.count, groups.size, 2)
            assert torch.equal(groups.join(split), x)
            assert sum(groups.sizes()) == 24
            assert int(groups.valid(x.device).sum()) == 24


def test_sequence_first_groups_are_sequences():
    groups = RoutingGroups(2, 3, sequence_first=True)
    tokens = torch.arange(6)  # memory order [s, b]: 0 and 1 are the first tokens of the two sequences
    assert groups.split(tokens).tolist() == [[0, 2, 4], [1, 3, 5]]


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
