"""The library that is shipped, in processes of their own. The first run on a machine compiles it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

CODE = r"""
import re
from pathlib import Path
import torch
from fmoe import native
from fmoe.native import compiler

assert native.load(), native.why()
assert native.available() and native.describe().startswith("built (")
path = native.describe().partition(" at ")[2]
maps = Path("/proc/self/maps").read_text()
assert path in maps
runtimes = set(re.findall(r"\S*/lib(?:gomp|omp|iomp5)[^/\s]*", maps))
assert len(runtimes) == 1, runtimes
assert torch.ops.fmoe_native.isa() == compiler.current_isa()
print(path)
"""


def test_it_builds_and_loads_beside_one_openmp_library():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr
    if shutil.which("readelf"):
        path = done.stdout.strip()
        dynamic = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
        assert "libtorch_cpu" in dynamic and not re.search(r"libi?g?omp|RPATH|RUNPATH", dynamic)


@pytest.mark.parametrize("isa", ["default", "avx2"])
def test_torch_lowers_the_instruction_set(isa):
    """Of its own kernels and ours alike, so that all can be tested on one machine."""
    code = "import torch; from fmoe import native; native.load(); print(torch.ops.fmoe_native.isa())"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": isa}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0 and done.stdout.split()[-1] in ("default", isa), done.stdout + done.stderr


@pytest.mark.conformance
@pytest.mark.timeout(3600)
def test_clean_under_sanitizers():
    """The tests of this folder that use the library, with AddressSanitizer and UBSan in it."""
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout
    standard = subprocess.run(["g++", "-print-file-name=libstdc++.so.6"], capture_output=True, text=True).stdout
    if not os.path.isabs(runtime.strip()):
        pytest.skip("no libasan")
    folder = Path(__file__).parent
    small = ["test_native_build.py", "test_native_load.py"]  # these have libraries of their own
    ours = [str(path) for path in sorted(folder.glob("test_*.py")) if path.name not in small]
    environment = {
        **os.environ,
        "FMOE_SANITIZE": "address,undefined",
        "ASAN_OPTIONS": "detect_leaks=0",
        # The sanitizer finds what throws exceptions when it starts: libstdc++ is to be there already.
        "LD_PRELOAD": f"{runtime.strip()} {standard.strip()}",
        "OMP_NUM_THREADS": "2",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *ours]
    done = subprocess.run(command, cwd=folder.parents[2], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
