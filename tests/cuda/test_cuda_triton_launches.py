"""Triton's kernels are compiled by the real Triton as they are launched, and launched on a stand-in driver."""

import sysconfig
from pathlib import Path

import pytest
import stand_in

from fmoe.kernels.cuda import triton_gemm

SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}


@pytest.fixture(autouse=True)
def tools():
    stand_in.require_compiler()
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        pytest.skip("Triton compiles its launcher, which needs Python.h")


@pytest.fixture
def triton():
    if triton_gemm.why() is not None:
        pytest.skip(triton_gemm.why())


def launches(arch, dtype, cases, cache, folder, capsys):
    """Return the description and the launch of each GEMM of `triton_compile.py`."""
    environment = {"TRITON_CACHE_DIR": str(cache / "triton"), "TRITON_DEFAULT_FP_FUSION": "1"}
    result, log = stand_in.run("triton_compile.py", dtype, cases, arch=arch, folder=folder, **environment)
    assert not [entry for entry in log if "refused" in entry]
    gemms = [entry for entry in log if entry["kernel"] != "schedule"]
    pairs = list(zip(result["launches"], gemms, strict=True))
    for told, launch in pairs:
        assert launch["kernel"] == told["kind"] and launch["shared"] <= SHARED[arch]
    spilled = [f"{launch['local']} bytes by {told}" for told, launch in pairs if launch["local"]]
    with capsys.disabled():
        print(f"\nTriton {result['triton']}, {arch} {dtype} {cases}: {len(gemms)} launches", end="")
        print(f", at most {max(launch['shared'] for launch in gemms)} bytes of shared memory", end="")
        print(f", {max(launch['registers'] for launch in gemms)} registers", end="")
        print(f", spilled: {'; '.join(spilled) or 'none'}", end="")
    return pairs


def assert_few_spills(pairs):
    """Default configurations spill next to nothing with large sizes."""
    assert not [told for told, launch in pairs if launch["local"] > 128 and told["shape"] == "large"]


@pytest.mark.by_default("small")
@pytest.mark.parametrize("shape", ["small", "large"])
def test_each_kind_of_gemm(shape, triton, kept, tmp_path, capsys):
    pairs = launches("sm_90", "bf16", shape, kept, tmp_path, capsys)
    assert {told["kind"] for told, _ in pairs} == set(triton_gemm.KINDS)
    assert_few_spills(pairs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("arch", SHARED)
def test_all_flags(arch, dtype, triton, tmp_path, capsys):
    pairs = launches(arch, dtype, "variants", tmp_path, tmp_path, capsys)
    assert_few_spills(pairs)
