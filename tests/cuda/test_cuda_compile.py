"""Every kernel compiles for every architecture without a warning, and no register spills to memory: by default one type
for one architecture, in `make conformance` all types for all of them."""

import os
import re
from concurrent.futures import ThreadPoolExecutor

import emulator
import pytest
from kernel_list import KERNELS

from fmoe.errors import BuildError
from fmoe.kernels.cuda import nvrtc

ARCHS = ("sm_80", "sm_90", "sm_100")
TUNED = "13.0"  # NVRTC's version that the kernels are held against; others allot registers otherwise


def instances(source):
    """Return the cases that every run compiles."""
    return [name for name in KERNELS[source] if "<" not in name or name.partition("<")[2].startswith("fmoe::bf16")]


def compiled(arch, source, names):
    return nvrtc.compile_file(emulator.CUDA / source, names, arch, verbose=True)


@pytest.fixture(autouse=True)
def compiler():
    try:
        nvrtc.find()
    except BuildError as error:
        pytest.skip(str(error))


def compile_all(chosen):
    """Compile each file for each architecture, in parallel."""
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), 8)) as pool:
        return {
            (arch, source): pool.submit(compiled, arch, source, chosen(arch, source))
            for arch in ARCHS
            for source in KERNELS
        }


def report(log):
    """(mangled name, registers, bytes spilled) of each kernel."""
    parts = re.split(r"Compiling entry function '(\w+)'", log)[1:]
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill", text)]
        yield name, int(re.search(r"Used (\d+) registers", text)[1]), sum(spills)


@pytest.mark.cover(1)
@pytest.mark.parametrize("source", KERNELS)
@pytest.mark.parametrize("arch", ARCHS)
def test_no_warning_and_no_spill(capsys, arch, source):
    names = instances(source)
    check(compiled(arch, source, names), names, f"{arch} {source}", capsys)


@pytest.mark.slow
def test_all_types_for_all_architectures(capsys):
    for (arch, source), code in compile_all(lambda _, source: KERNELS[source]).items():
        check(code.result(), KERNELS[source], f"{arch} {source}", capsys)


def check(code, names, what, capsys):
    assert "warning" not in code.log, code.log
    assert set(code.symbols) == set(names)
    found = {name: (registers, spilled) for name, registers, spilled in report(code.log)}
    assert set(found) == set(code.symbols.values())
    registers = [number for number, _ in found.values()]
    spilled = {name: number for name, (_, number) in found.items() if number}
    with capsys.disabled():
        print(f"\n{what}: {len(found)} kernels, {min(registers)} to {max(registers)} registers", end="")
        print(f", {len(spilled)} of them spill" if spilled else ", none spills", end="")
    if nvrtc.find().version == TUNED:
        assert not spilled


def test_documented_arguments(kernels):
    """docs/kernels.md tells each kernel's arguments as they are."""
    text = (emulator.CUDA.parent / "docs" / "kernels.md").read_text()
    for name, library in kernels.items():
        short = name.removeprefix("fmoe::").partition("<")[0]
        assert emulator.documented(short, text) == library.signature(name), short
