"""Parallelism changes nothing: every case of the cover equals one process on the same global batch, in the loss, every
gradient, the gradient norm and the parameters after three steps."""

import functools
import json
import os

import cover
import pytest
import torch
import training
from compare import assert_close
from forks import values

CASES = cover.generate()
LIMITS = {"float32": 1e-5, "float64": 1e-10}
IN_CI = 7  # every seventh case; `make conformance` runs all


@functools.cache
def alone(gate, experts, optimizer, dtype):
    base = {"split": None, "exchange": "all_to_all", "chunks": 1, "shadow": 0, "bound": False, "wrapper": "none"}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return training.train(base | {"gate": gate, "experts": experts, "optimizer": optimizer, "dtype": dtype}, False)
    finally:
        torch.set_num_threads(threads)


def marks(index):
    return [] if index % IN_CI == 0 else [pytest.mark.slow]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=cover.name_of(case), marks=marks(index)) for index, case in enumerate(CASES)],
)
def test_split_equals_whole(request, case):
    ep, dp = training.SPLITS[case["split"]]
    pool = request.getfixturevalue("two_ranks" if ep * dp == 2 else "four_ranks")
    expected = alone(case["gate"], case["experts"], case["optimizer"], case["dtype"])
    ranks = values(pool.run(training.train, case, True))
    worst = 0.0
    for name, value in expected.items():
        value = torch.from_numpy(value)
        for row in range(dp):  # every replica, all of whose experts together are those of one process
            holders = [part[name] for part in ranks[row * ep : (row + 1) * ep] if name in part]
            assert holders, name
            found = [torch.from_numpy(part) for part in holders]
            found = [torch.cat(found)] if ".experts." in name else found
            for actual in found:
                assert_close(actual, value, LIMITS[case["dtype"]], name)
                worst = max(worst, (actual - value).norm().item() / max(value.norm().item(), 1e-12))
    if "FMOE_CONFORMANCE_LOG" in os.environ:
        with open(os.environ["FMOE_CONFORMANCE_LOG"], "a") as file:
            print(json.dumps(case | {"worst": worst}), file=file)
