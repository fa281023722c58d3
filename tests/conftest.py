"""Fixtures for all tests: processes that last the session, text to train on."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that wait for work do not spin

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from forks import ForkServer
from rank_pool import RankPool
from slices import thin

ROOT = Path(__file__).parent.parent

if not torch.cuda.is_available():  # Triton's kernels run in its interpreter; it looks at this
    os.environ.setdefault("TRITON_INTERPRET", "1")  # when it is imported, which fmoe does by way of torch._dynamo
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # a torch without CUDA on a machine with a GPU: tests of the CPU


# Side by side, each worker gets its share of the cores: threads that wait for a core of another worker spin.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
torch.set_num_threads(max(1, torch.get_num_threads() // WORKERS))


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items):
    thin(items)


@pytest.fixture(scope="session", autouse=True)
def native_backend():
    """Built before the first test, so that none waits for a compiler; without one all take the torch path."""
    from fmoe.errors import BuildError
    from fmoe.kernels.native import build, loader

    if not loader.is_off():
        with suppress(BuildError):
            build.library()


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    """Two processes with a gloo group between them, one thread each."""
    with RankPool(2, tmp_path_factory.mktemp("ranks")) as pool:
        yield pool


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory):
    """Four of them."""
    with RankPool(4, tmp_path_factory.mktemp("ranks")) as pool:
        yield pool


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """New processes in milliseconds with megatron-core imported, one rank or more, and commands in them."""
    with ForkServer(tmp_path_factory.mktemp("forks")) as server:
        yield server


@pytest.fixture(scope="session")
def text_folder() -> Path:
    """Real text of the machine the tests run on; skips where there is none."""
    folder = Path(os.environ.get("FMOE_TEXT", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no text in {folder}; FMOE_TEXT names a folder of .txt files")
    return folder
