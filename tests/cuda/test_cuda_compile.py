"""Every kernel compiles for every architecture without a warning, and no register goes to memory."""

import os
import re
from concurrent.futures import ThreadPoolExecutor

import emulator
import pytest
from kernel_list import KERNELS

from fmoe.cuda import nvrtc
from fmoe.errors import BuildError

ARCHS = ("sm_80", "sm_90", "sm_100")
TUNED = "13.0"  # NVRTC's version that the kernels are held against; others allot registers otherwise


@pytest.fixture(scope="module")
def compiled():
    """What each file becomes for each architecture; compiled side by side, as NVRTC takes one thread for each."""
    try:
        nvrtc.find()
    except BuildError as error:
        pytest.skip(str(error))

    def make(arch, source):
        return nvrtc.compile_file(emulator.CUDA / source, KERNELS[source], arch, verbose=True)

    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), 8)) as pool:
        codes = {(arch, source): pool.submit(make, arch, source) for arch in ARCHS for source in KERNELS}
    return codes


def report(log):
    """(mangled name, registers, bytes spilled) of each kernel."""
    parts = re.split(r"Compiling entry function '(\w+)'", log)[1:]
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill", text)]
        yield name, int(re.search(r"Used (\d+) registers", text)[1]), sum(spills)


@pytest.mark.parametrize("source", KERNELS)
@pytest.mark.parametrize("arch", ARCHS)
def test_no_warning_and_no_spill(compiled, capsys, arch, source):
    code = compiled[arch, source].result()
    assert "warning" not in code.log, code.log
    assert set(code.symbols) == set(KERNELS[source])
    found = {name: (registers, spilled) for name, registers, spilled in report(code.log)}
    assert set(found) == set(code.symbols.values())
    registers = [number for number, _ in found.values()]
    spilled = {name: number for name, (_, number) in found.items() if number}
    with capsys.disabled():
        print(f"\n{arch} {source}: {len(found)} kernels, {min(registers)} to {max(registers)} registers", end="")
        print(f", {len(spilled)} of them spill" if spilled else ", none spills", end="")
    if nvrtc.find().version == TUNED:
        assert not spilled


def test_documented_arguments(kernels):
    """docs/kernels.md tells each kernel's arguments as they are."""
    text = (emulator.CUDA.parent / "docs" / "kernels.md").read_text()
    for name, library in kernels.items():
        short = name.removeprefix("fmoe::").partition("<")[0]
        assert emulator.documented(short, text) == library.signature(name), short
