"""Tests that need a CUDA device, and are skipped without one. `make gpu` runs only these."""

from pathlib import Path

import pytest
import torch

from fmoe.kernels.cuda import loader as cuda

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def device():
    """The current CUDA device, with the kernels loaded."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert cuda.load(), cuda.why()
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch.device("cuda", torch.cuda.current_device())
