"""The kernels of ``cuda/``, built for the CPU once a source."""

import os
import shutil
from pathlib import Path

import emulator
import pytest
import unchanged

HERE = Path(__file__).parent
# They test what is installed as well, which the digest does not cover.
ALWAYS = ("test_cuda_driver.py", "test_cuda_triton_launches.py")


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items):
    here = [item for item in items if HERE in item.path.parents and item.path.name not in ALWAYS]
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
def kept(pytestconfig, tmp_path):
    """A folder of compiled code, which pytest's cache keeps from run to run."""
    cache = getattr(pytestconfig, "cache", None)
    return cache.mkdir("stand_in") if cache else tmp_path


@pytest.fixture
def launch(kernels, request):
    """`emulator.Emulator` with the seed of the case, if it has one."""
    seed = request.node.callspec.params.get("seed", 0) if hasattr(request.node, "callspec") else 0
    return emulator.Emulator(kernels, seed, unaligned=seed % 3 == 2)
