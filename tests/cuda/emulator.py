"""The kernels of ``cuda/`` on the CPU: built by g++ once for each source, launched with arrays between guard pages.

Not a test itself. `on_cpu` makes them the kernels of tensors on the CPU, so that their callers run too.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from fmoe.kernels.cuda import launch, loader
from fmoe.kernels.cuda.instances import KERNELS
from fmoe.kernels.cuda.launch import Argument, Geometry

CUDA = Path(__file__).parents[2] / "cuda"
HEADERS = Path(__file__).parent / "emulation"
FLAGS = "-O1 -std=c++20 -shared -fPIC -fvisibility=hidden -U_FORTIFY_SOURCE -fno-strict-aliasing -ffp-contract=off"
WARNINGS = "-Wall -Werror -Wno-unknown-pragmas -Wno-unused-but-set-variable -Wno-maybe-uninitialized"


def build(source: Path, names: Sequence[str], folder: Path) -> "Library":
    """Return the library of the instances with these name expressions; build it in ``folder`` if it is not there."""
    host = f'#include "cuda_on_cpu.h"\n#include "{source}"\n'
    host += "KERNELS(" + ",\n        ".join(f"EMULATED({name})" for name in names) + ")\n"
    compiler = os.environ.get("CXX", "g++")
    files = [*sorted(HEADERS.iterdir()), *sorted(source.parent.glob("*.cuh")), source]
    texts = [host, FLAGS, WARNINGS, compiler, *(file.read_text() for file in files)]
    key = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:20]
    library = folder / f"{source.stem}-{key}.so"
    with open(folder / f"{source.stem}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may compile it
        if not library.exists():
            _compile(host, source, library)
    return Library(library)


def _compile(host: str, source: Path, library: Path) -> None:
    compiler = os.environ.get("CXX", "g++")
    code = library.with_suffix(".cpp")
    code.write_text(host)
    built = library.with_suffix(".building")
    folders = [f"-I{HEADERS}", f"-I{source.parent}"]
    command = [compiler, *FLAGS.split(), *WARNINGS.split(), *folders, "-o", built, code]
    done = subprocess.run(command, capture_output=True, text=True)
    code.unlink()
    assert done.returncode == 0, done.stderr
    for older in library.parent.glob(f"{source.stem}-*.so"):
        older.unlink(missing_ok=True)
    built.replace(library)


def build_all(folder: Path) -> "dict[str, Library]":
    """Return the library of every kernel by its name expression; two compilers run at a time."""
    with ThreadPoolExecutor(2) as pool:
        builds = {source: pool.submit(build, CUDA / source, names, folder) for source, names in KERNELS.items()}
    return {name: builds[source].result() for source, names in KERNELS.items() for name in names}


class Library:
    """The kernels of one source."""

    def __init__(self, path: Path):
        self._library = ctypes.CDLL(str(path))
        for function in ("launch", "signature"):
            getattr(self._library, function).restype = ctypes.c_char_p
        self._library.allocate.restype = ctypes.c_void_p

    def signature(self, kernel: str) -> str:
        """Return a letter for each argument: c (pointer to constants), p (pointer), i (int64) or d (double)."""
        return self._library.signature(kernel.encode()).decode()

    def allocate(self, num_bytes: int, gap: int, name: str) -> int:
        return self._library.allocate(ctypes.c_size_t(num_bytes), ctypes.c_size_t(gap), name.encode())

    def release(self, address: int) -> bool:
        """Return whether nothing was written next to the array."""
        return bool(self._library.release(ctypes.c_void_p(address)))

    def launch(self, kernel: str, geometry: Geometry, values: list, seed: int) -> str | None:
        """Return None, or a description of the error."""
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        sizes = [(ctypes.c_uint * 3)(*shape) for shape in (geometry.grid, geometry.block)]
        shared = ctypes.c_size_t(geometry.shared)
        error = self._library.launch(kernel.encode(), *sizes, shared, addresses, ctypes.c_uint64(seed))
        return error.decode() if error else None


class EmulationError(AssertionError):
    """A kernel did what a GPU would let pass, or would not (``emulation/cuda_on_cpu.h``)."""


class Emulator:
    """An `fmoe.kernels.cuda.launch.Launcher` for tensors on the CPU.

    Kernels work on copies of their arguments between pages without access, in an order of threads that follows from
    the seed.

    Args:
        unaligned: arrays begin where their type allows it, not at multiples of 16 bytes.

    Attributes:
        launched: name expressions of launched kernels, in order.
    """

    def __init__(self, libraries: Mapping[str, Library], seed: int = 0, unaligned: bool = False):
        self._libraries = libraries
        self._seed = seed
        self._unaligned = unaligned
        self.launched: list[str] = []

    def __call__(self, kernel: str, geometry: Geometry, arguments: Sequence[Argument], device: torch.device) -> None:
        library = self._libraries[kernel]
        signature = library.signature(kernel)
        kinds = "".join("d" if isinstance(a, float) else "i" if isinstance(a, int) else "p" for a in arguments)
        expected = signature.replace("c", "p")
        assert kinds == expected, f"{kernel} takes {expected}, not {kinds}"
        assert all(a.device == device for a in arguments if isinstance(a, Tensor)), kernel
        self.launched.append(kernel)
        arrays: dict[int, tuple[Tensor, int, str]] = {}  # by address of the tensor: also its copy, and its name
        changed = set()
        values: list[ctypes._SimpleCData] = []
        for number, (argument, letter) in enumerate(zip(arguments, signature, strict=True)):
            if isinstance(argument, Tensor):
                key = argument.data_ptr() or -number
                if key not in arrays:
                    name = f"argument {number}"
                    arrays[key] = (argument, self._copy(library, argument, name), name)
                if letter == "p":
                    changed.add(key)
                values.append(ctypes.c_void_p(arrays[key][1]))
            elif argument is None:
                values.append(ctypes.c_void_p(None))
            else:
                values.append((ctypes.c_double if isinstance(argument, float) else ctypes.c_int64)(argument))
        error = library.launch(kernel, geometry, values, self._seed * 1000 + len(self.launched))
        beside = []
        for key, (tensor, copy, name) in arrays.items():
            if key in changed:
                ctypes.memmove(tensor.data_ptr(), copy, tensor.nbytes)
            if not library.release(copy):
                beside.append(name)
        if error is None and beside:
            error = f"{kernel}: writes beside {', '.join(beside)}"
        if error is not None:
            raise EmulationError(error)

    def _copy(self, library: Library, tensor: Tensor, name: str) -> int:
        """Return the address of a copy, which ends at a page, but for bytes that align its begin, or prevent that."""
        gap = -tensor.nbytes % 16
        if self._unaligned:
            gap = (gap + tensor.itemsize) % 16
        address = library.allocate(tensor.nbytes, gap, name)
        ctypes.memmove(address, tensor.data_ptr(), tensor.nbytes)
        return address

    def names(self) -> set[str]:
        """Return the launched kernels, without template arguments."""
        return {name.partition("<")[0].removeprefix("fmoe::") for name in self.launched}


@contextlib.contextmanager
def on_cpu(libraries: Mapping[str, Library], seed: int = 0, unaligned: bool = False) -> Iterator[Emulator]:
    """Make the emulator the CUDA backend of the CPU; new tensors without values are poisoned."""
    emulator = Emulator(libraries, seed, unaligned)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    before = [(registry, dict(registry)) for registry in (launch.launchers, loader._reasons)]
    launch.launchers.update(cpu=emulator, none=emulator)
    loader._reasons.update(cpu=None, none=None)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield emulator
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(is_deterministic)
        for registry, entries in before:
            registry.clear()
            registry.update(entries)
