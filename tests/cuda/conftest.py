"""The kernels of ``cuda/``, built for the CPU once a source."""

import os
import shutil

import emulator
import pytest


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
def on(kernels):
    """The emulator as the CUDA backend of the CPU, during the test."""
    with emulator.on_cpu(kernels) as launcher:
        yield launcher


@pytest.fixture
def launch(kernels, request):
    """A function that calls another one on the emulator, in orders of threads that follow from the test's ``seed``."""
    seed = request.node.callspec.params.get("seed", 0) if hasattr(request.node, "callspec") else 0

    def call(function, *arguments, **options):
        with emulator.on_cpu(kernels, seed, unaligned=seed % 3 == 2):
            return function(*arguments, **options)

    return call
