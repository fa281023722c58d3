"""Triton's kernels are compiled by the real Triton as they are launched, and launched on a stand-in driver."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import stand_in

from fmoe.kernels.cuda import triton_gemm

OLDER = "3.6.0"  # installed by torch 2.11
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


@pytest.fixture(scope="session")
def older_triton():
    """A folder with an older Triton, which is kept in build/."""
    folder = Path(__file__).parents[2] / "build" / f"triton-{OLDER}"
    if not (folder / "triton").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        done = subprocess.run([*command, f"triton=={OLDER}"], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"pip install triton=={OLDER} failed: {done.stderr.strip()[-200:]}")
    return folder


def launches(arch, dtype, cases, cache, folder, capsys, paths=()):
    """Return Triton's version and, for each GEMM of `triton_compile.py`, its description and its launch."""
    environment = {"TRITON_CACHE_DIR": str(cache / "triton"), "TRITON_DEFAULT_FP_FUSION": "1"}
    result, log = stand_in.run("triton_compile.py", dtype, cases, arch=arch, folder=folder, paths=paths, **environment)
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
    return result["triton"], pairs


def assert_few_spills(pairs):
    """Default configurations spill next to nothing with large sizes, and so do most that are measured."""
    many = [told for told, launch in pairs if launch["local"] > 128]
    assert not [told for told in many if told["config"] is None and told["shape"] == "large"]
    assert 4 * len([told for told in many if told["config"]]) <= len(pairs)


@pytest.mark.by_default("small")
@pytest.mark.parametrize("shape", ["small", "large"])
def test_each_kind_of_gemm(shape, triton, kept, tmp_path, capsys):
    _, pairs = launches("sm_90", "bf16", shape, kept, tmp_path, capsys)
    assert {told["kind"] for told, _ in pairs} == set(triton_gemm.KINDS)
    assert_few_spills(pairs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("arch", SHARED)
def test_all_flags(arch, dtype, triton, tmp_path, capsys):
    _, pairs = launches(arch, dtype, "variants", tmp_path, tmp_path, capsys)
    assert_few_spills(pairs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("kind", triton_gemm.KINDS)
def test_all_configurations(kind, arch, dtype, triton, tmp_path, capsys):
    _, pairs = launches(arch, dtype, kind, tmp_path, tmp_path, capsys)
    assert_few_spills(pairs)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("cases", ["variants", *triton_gemm.KINDS])
def test_older_triton(cases, arch, older_triton, tmp_path, capsys):
    version, pairs = launches(arch, "bf16", cases, tmp_path, tmp_path, capsys, (older_triton,))
    assert version == OLDER
    assert_few_spills(pairs)
