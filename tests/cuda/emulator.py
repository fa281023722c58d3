"""The kernels of ``cuda/`` on the CPU: built by g++ once for each source, launched with arrays between guard pages.

Not a test itself. `Emulator` takes a launch as the device's launcher does, so that what calls kernels can be tested
through it too.
"""

import ctypes
import hashlib
import os
import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from kernel_list import KERNELS
from torch import Tensor

CUDA = Path(__file__).parents[2] / "cuda"
HEADERS = Path(__file__).parent / "emulation"
FLAGS = "-O1 -std=c++20 -shared -fPIC -fvisibility=hidden -U_FORTIFY_SOURCE -fno-strict-aliasing -ffp-contract=off"
WARNINGS = "-Wall -Werror -Wno-unknown-pragmas -Wno-unused-but-set-variable -Wno-maybe-uninitialized"


def build(source: Path, names: Sequence[str], folder: Path) -> Path:
    """A library of the instances that have these name expressions, in ``folder`` if it is not there yet."""
    host = f'#include "cuda_on_cpu.h"\n#include "{source}"\n'
    host += "KERNELS(" + ",\n        ".join(f"EMULATED({name})" for name in names) + ")\n"
    parts = [host, FLAGS, WARNINGS, os.environ.get("CXX", "g++")]
    files = [*sorted(HEADERS.iterdir()), *sorted(source.parent.glob("*.cuh")), source]
    key = hashlib.sha256("\0".join(parts + [f.read_text() for f in files]).encode()).hexdigest()[:20]
    library = folder / f"{source.stem}-{key}.so"
    if not library.exists():
        code = folder / f"{source.stem}-{key}-{os.getpid()}.cpp"
        code.write_text(host)
        made = code.with_suffix(".so")
        command = [parts[-1], *FLAGS.split(), *WARNINGS.split(), f"-I{HEADERS}", f"-I{source.parent}", "-o", made, code]
        done = subprocess.run(command, capture_output=True, text=True)
        code.unlink()
        assert done.returncode == 0, done.stderr
        made.replace(library)
        for old in folder.glob(f"{source.stem}-*.so"):
            if old != library:
                old.unlink()
    return library


def build_all(folder: Path) -> "dict[str, Library]":
    """Every kernel by its name expression; two compilers at a time."""
    with ThreadPoolExecutor(2) as pool:
        made = {source: pool.submit(build, CUDA / source, names, folder) for source, names in KERNELS.items()}
    libraries = {source: Library(path.result()) for source, path in made.items()}
    return {name: libraries[source] for source, names in KERNELS.items() for name in names}


class Library:
    """One source's kernels."""

    def __init__(self, path: Path):
        self._library = ctypes.CDLL(str(path))
        for function in ("launch", "signature"):
            getattr(self._library, function).restype = ctypes.c_char_p
        self._library.allocate.restype = ctypes.c_void_p

    def signature(self, name: str) -> str:
        """p, i or d for each argument: a pointer, int64, double."""
        return self._library.signature(name.encode()).decode()

    def allocate(self, num_bytes: int, gap: int, name: str) -> int:
        return self._library.allocate(ctypes.c_size_t(num_bytes), ctypes.c_size_t(gap), name.encode())

    def release(self, address: int) -> bool:
        """Return whether nothing was written next to it."""
        return bool(self._library.release(ctypes.c_void_p(address)))

    def launch(self, name: str, grid: tuple, block: tuple, shared: int, values: list, seed: int) -> str | None:
        """None, or what went wrong."""
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        sizes = [(ctypes.c_uint * 3)(*shape) for shape in (grid, block)]
        size, seed = ctypes.c_size_t(shared), ctypes.c_uint64(seed)
        error = self._library.launch(name.encode(), *sizes, size, addresses, seed)
        return error.decode() if error else None


class EmulationError(AssertionError):
    """A kernel did what a GPU would let pass, or would not."""


@dataclass(frozen=True)
class Output:
    """An array that a kernel is to write, poisoned before.

    Attributes:
        zeroed: the kernel adds to it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    zeroed: bool = False


@dataclass
class Emulator:
    """Launches kernels in orders of threads that follow from the seed.

    Attributes:
        unaligned: arrays begin where their type alone allows it, not at 16 bytes.
    """

    libraries: dict[str, Library] = field(repr=False)
    seed: int = 0
    unaligned: bool = False
    launches: int = field(default=0, init=False)

    def __call__(self, name: str, geometry: tuple, *arguments) -> list[Tensor]:
        """Launches ``name``.

        Args:
            geometry: grid, block, bytes of shared memory; one number or three for grid and block.
            arguments: tensors (copied in), `Output`, `InOut` (the same one twice is one array), None, int, float, bool.

        Returns:
            What lies in the `Output` and `InOut` arrays afterwards, in their order.

        Raises:
            EmulationError: see cuda_on_cpu.h; or something was written beside an array.
        """
        library = self.libraries[name]
        expected = library.signature(name)
        given = "".join("d" if isinstance(a, float) else "i" if isinstance(a, int) else "p" for a in arguments)
        assert given == expected, f"{name} takes {expected}, not {given}"
        arrays, values, results = [], [], {}
        try:
            for number, argument in enumerate(arguments):
                if isinstance(argument, float):
                    values.append(ctypes.c_double(argument))
                elif isinstance(argument, int):
                    values.append(ctypes.c_int64(argument))
                elif argument is None:
                    values.append(ctypes.c_void_p(None))
                else:
                    array = results.get(id(argument)) if isinstance(argument, InOut) else None
                    if array is None:
                        array = Array(library, argument, f"argument {number}", self.unaligned)
                        arrays.append(array)
                    values.append(ctypes.c_void_p(array.address))
                    if isinstance(argument, Output | InOut):
                        results[id(argument) if isinstance(argument, InOut) else number] = array
            self.launches += 1
            grid, block, shared = geometry
            error = library.launch(name, _three(grid), _three(block), shared, values, self.seed * 1000 + self.launches)
            outputs = [array.read() for array in results.values()]
            unchanged = all(array.is_unchanged() for array in arrays)
        finally:
            touched = [array.name for array in arrays if not array.release()]
        if error is None and touched:
            error = f"{name}: writes beside {', '.join(touched)}"
        if error is None and not unchanged:
            error = f"{name}: writes to what it only reads"
        if error is not None:
            raise EmulationError(error)
        return outputs

    def array(self, kernel: str, tensor: Tensor, name: str) -> "Array":
        """An array that stays, for kernels of the same source as this one that are told addresses in tables."""
        return Array(self.libraries[kernel], InOut(tensor), name, self.unaligned)


@dataclass(frozen=True)
class InOut:
    """An array that a kernel reads and writes."""

    tensor: Tensor


class Array:
    """Memory of one library, between pages that nobody may touch; `release` tells whether anything lies beside it."""

    def __init__(self, library: Library, argument: "Tensor | Output | InOut", name: str, unaligned: bool):
        self.name, self._library = name, library
        like = argument.tensor if isinstance(argument, InOut) else argument
        self._shape, self._dtype = tuple(like.shape), like.dtype
        size = self._dtype.itemsize
        self._bytes = size * torch.Size(self._shape).numel()
        # To the end of a page, but for what keeps the begin at 16 bytes, or keeps it from there.
        gap = -self._bytes % 16
        if unaligned:
            gap = (gap + size) % 16
        self.address = library.allocate(self._bytes, gap, name)
        self._before = None
        if isinstance(argument, Output):
            if argument.zeroed:
                ctypes.memset(self.address, 0, self._bytes)
        else:
            data = like.detach().contiguous()
            ctypes.memmove(self.address, data.data_ptr(), self._bytes)
            if isinstance(argument, Tensor):
                self._before = self._raw()

    def _raw(self) -> bytes:
        return ctypes.string_at(self.address, self._bytes)

    def read(self) -> Tensor:
        raw = bytearray(self._raw())
        if not raw:
            return torch.empty(self._shape, dtype=self._dtype)
        return torch.frombuffer(raw, dtype=self._dtype).view(self._shape)

    def is_unchanged(self) -> bool:
        return self._before is None or self._before == self._raw()

    def release(self) -> bool:
        return self._library.release(self.address)


def _three(shape: int | tuple) -> tuple[int, int, int]:
    return (shape, 1, 1) if isinstance(shape, int) else tuple(shape) + (1,) * (3 - len(shape))


def documented(name: str, text: str) -> str | None:
    """The arguments of a kernel as docs/kernels.md tells them, as `Library.signature` does."""
    found = re.search(rf"`{name}\(([^`]*)\)`", text)
    if found is None:
        return None
    words = [word.split() for word in found[1].replace("\n", " ").split(",")]
    return "".join("p" if w[0].endswith("*") else "d" if w[0] == "double" else "i" for w in words)
