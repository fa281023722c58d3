"""Processes of a run: the product of its splits."""

import pytest

from pretrain.config import ParallelConfig

SIZES = {  # processes, data parallel size of the dense part
    "one": ({}, 1, 1),
    "EP x DP": ({"expert": 2, "data": 3}, 6, 6),
    "TP": ({"tensor": 2}, 2, 1),
    "experts over the tensor ranks": ({"tensor": 2, "expert": 2}, 2, 1),
    "experts over more": ({"tensor": 2, "expert": 8, "data": 2}, 16, 8),
    "experts over fewer": ({"tensor": 4, "expert": 2}, 4, 1),
    "cut experts": ({"tensor": 2, "expert_tensor": 2, "expert": 2}, 4, 2),
    "context": ({"context": 2, "data": 3}, 6, 3),
    "experts over the context ranks": ({"tensor": 2, "context": 2, "expert": 4}, 4, 1),
    "experts over more than the context ranks": ({"context": 2, "expert": 4, "data": 2}, 8, 4),
    "all": ({"tensor": 2, "pipeline": 4, "expert": 4, "data": 2}, 32, 4),
}


@pytest.mark.parametrize("case", SIZES)
def test_processes_are_the_product(case):
    keys, world_size, dense_data = SIZES[case]
    parallel = ParallelConfig(**keys)
    assert (parallel.world_size, parallel.dense_data) == (world_size, dense_data)
    for key, value in keys.items():
        assert f"parallel.{key}={value}" in parallel.world_size_name


def test_sequence_parallelism_comes_with_tensor_parallelism():
    assert not ParallelConfig().is_sequence_parallel
    assert ParallelConfig(tensor=2).is_sequence_parallel
    assert not ParallelConfig(tensor=2, sequence=False).is_sequence_parallel
