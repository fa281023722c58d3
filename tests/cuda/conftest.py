"""The kernels of ``cuda/``, built for the CPU once a source."""

import os
import shutil
from pathlib import Path

import emulator
import pytest
import unchanged

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items):
    here = [item for item in items if HERE in item.path.parents]
    if here and unchanged.is_recorded():
        for item in here:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def kernels(pytestconfig, tmp_path_factory):
    """Every kernel's library by name expression; kept in pytest's cache from run to run."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no g++")
    cache = getattr(pytestconfig, "cache", None)
    return emulator.build_all(cache.mkdir("cuda_on_cpu") if cache else tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def launch(kernels, request):
    """`emulator.Emulator` with the seed of the case, if it has one."""
    seed = request.node.callspec.params.get("seed", 0) if hasattr(request.node, "callspec") else 0
    return emulator.Emulator(kernels, seed, unaligned=seed % 3 == 2)
