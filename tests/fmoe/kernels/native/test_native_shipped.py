"""The library that is shipped, in processes of their own. The first run on a machine compiles it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forks import values

from fmoe.errors import UserError
from fmoe.kernels.native import compiler
from fmoe.kernels.native import loader as native
from fmoe.kernels.native import ops as native_ops

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

CODE = r"""
import re
from pathlib import Path
import torch
from fmoe.kernels.native import loader as native
from fmoe.kernels.native import compiler
from fmoe.kernels.native import ops as native_ops

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


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["default", "avx2"])
def test_torch_lowers_the_instruction_set(isa):
    """The limit applies to torch's kernels and ours alike, so that one machine can test all of them."""
    code = "import torch; from fmoe.kernels.native import loader; loader.load(); print(torch.ops.fmoe_native.isa())"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": isa}
    environment.pop("FMOE_NATIVE_ISA", None)  # of `make ISA=... test`
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0 and done.stdout.split()[-1] in ("default", isa), done.stdout + done.stderr


# What each of the three libraries is to stop at, so that one machine runs what lesser ones run.
LEVELS = {
    "default": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx512_bf16": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
}


def level(monkeypatch, name):
    """FMOE_NATIVE_ISA is ``name``; skips where this processor does not have it."""
    monkeypatch.setenv("FMOE_NATIVE_ISA", name)
    try:
        compiler.isa_limit()
    except UserError as error:
        pytest.skip(str(error))


def limited_to(name):
    os.environ["FMOE_NATIVE_ISA"] = name  # read when the library is loaded
    assert native.load(), native.why()
    return torch.ops.fmoe_native.isa(), native_ops._is_wide


@pytest.mark.parametrize("name", LEVELS)
def test_the_instruction_set_can_be_limited(name, monkeypatch, forks):
    level(monkeypatch, name)
    isa = name.removesuffix("_bf16")
    assert compiler.current_isa() == isa
    assert values(forks.run(1, limited_to, name)) == [(isa, name != "avx512_bf16")]


def test_an_instruction_set_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setenv("FMOE_NATIVE_ISA", "avx1024")
    monkeypatch.setattr(native, "_outcome", None)
    with pytest.raises(UserError, match="FMOE_NATIVE_ISA='avx1024' is not one of default"):
        native.load()
    if len(compiler.isas()) > 1:
        monkeypatch.setenv("FMOE_NATIVE_ISA", "avx512")
        monkeypatch.setattr(compiler, "_processor_isa", lambda: "avx2")
        with pytest.raises(UserError, match="FMOE_NATIVE_ISA='avx512' exceeds 'avx2'"):
            native.load()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LEVELS)
def test_the_numbers_are_right_on_lesser_processors(name, monkeypatch):
    """The native backend, torch and oneDNN as a processor of that level runs them."""
    level(monkeypatch, name)
    for variable, value in LEVELS[name].items():
        monkeypatch.setenv(variable, value)
    tests = Path(__file__).parents[2]
    names = ["native/test_native_ops.py", "native/test_native_layer.py", "test_ops.py"]
    files = [*(tests / "kernels" / name for name in names), tests / "test_layer.py"]
    run = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *map(str, files)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=3500, cwd=tests.parents[1])
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
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
    done = subprocess.run(command, cwd=folder.parents[3], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
