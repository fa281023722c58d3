"""Kernel launches on torch's current stream, and the geometry of launches (docs/kernels.md)."""

import ctypes
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from fmoe.errors import BuildError, one_line
from fmoe.kernels.cuda.nvrtc import Unusable

Argument = Tensor | int | bool | float | None


@dataclass(frozen=True)
class Geometry:
    """Grid and block sizes of a kernel launch.

    Attributes:
        grid: number of thread blocks along each axis.
        block: number of threads per block along each axis.
        shared: bytes of dynamic shared memory per block.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int = 0


class Launcher(Protocol):
    """Function that launches kernels: `DeviceLauncher` on a GPU, an emulator in tests."""

    def __call__(self, kernel: str, geometry: Geometry, arguments: Sequence[Argument], device: torch.device) -> None:
        """Launch a kernel by its C++ name expression, such as ``fmoe::gather<float, float>``.

        Integers and flags are passed as int64, reals as double, None as null. A tensor is passed as the address of its
        first element.
        """


# Launchers by architecture: filled by `fmoe.kernels.cuda.loader`, and by tests, which run kernels on "cpu".
launchers: dict[str, Launcher] = {}
_arch_of_device: dict[torch.device, str] = {}


def architecture(device: torch.device | int | str | None) -> str:
    """Return the architecture of a device, such as ``"sm_90"``; ``"cpu"`` for CPUs, ``"none"`` without a GPU.

    Args:
        device: None for the current CUDA device.
    """
    if device is not None and torch.device(device).type == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        return "none"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def launcher(device: torch.device) -> Launcher | None:
    """Return the launcher of kernels for a device; None if no kernels are loaded for it."""
    arch = _arch_of_device.get(device)
    if arch is None:
        if device.type == "cuda" and not launchers:
            return None
        arch = _arch_of_device[device] = architecture(device)
    return launchers.get(arch)


SHARED = 48 * 1024  # bytes of shared memory that a block may use without opt-in


@lru_cache(4096)
def by_rows(rows: int, width: int, at_once: int, shared_per_warp: int = 0) -> Geometry:
    """Return the grid and block sizes of a kernel over rows (*rows(M, width, n)* in docs/kernels.md).

    Args:
        rows: M, the number of rows.
        width: number of elements per row.
        at_once: n, the number of elements that a thread moves at once (`at_once`).
        shared_per_warp: bytes of shared memory per warp.
    """
    vectors = -(-width // at_once)
    across = 32
    while across < 256 and 4 * across < vectors:
        across *= 2
    down = 256 // across
    return Geometry((max(1, -(-rows // down)), 1, 1), (across, down, 1), shared_per_warp * down * across // 32)


@lru_cache(1024)
def num_warps(shared_of_block: int, shared_per_warp: int) -> int:
    """Return the number of warps per block, 1 to 8, that shared memory allows (*W* in docs/kernels.md).

    Args:
        shared_of_block: bytes of shared memory per block, besides those of the warps.
        shared_per_warp: bytes of shared memory per warp.
    """
    return next((w for w in (8, 7, 6, 5, 4, 3, 2) if shared_of_block + w * shared_per_warp <= SHARED), 1)


def at_once(*tensors: Tensor | None) -> int:
    """Return how many elements a thread accesses at once: 16 bytes divided by the smallest element size."""
    return 16 // min(tensor.element_size() for tensor in tensors if tensor is not None)


class _OfThread(threading.local):
    def __init__(self):
        self.devices: set[int] = set()  # devices whose context was made current in this thread


class DeviceLauncher:
    """Launcher of compiled kernels for one architecture.

    Args:
        codes: kernels from `fmoe.kernels.cuda.build.read`.

    Raises:
        Unusable: cuda.core is missing, or has another interface than expected.
        BuildError: the driver refuses the machine code.
    """

    def __init__(self, codes: Sequence[tuple[bytes, dict[str, str]]]):
        try:
            from cuda.core import LEGACY_DEFAULT_STREAM, Device, LaunchConfig, ObjectCode, Stream, launch
        except Exception as error:  # a damaged installation may raise any class
            raise Unusable(error) from error
        self._launch = launch
        self._config = LaunchConfig
        self._stream = Stream.from_handle
        self._device = Device
        self._of_thread = _OfThread()
        self._streams = {0: LEGACY_DEFAULT_STREAM}
        self._codes = {}
        self._kernels: dict[str, object] = {}
        self._configs: dict[Geometry, object] = {}
        try:
            for cubin, symbols in codes:
                mapping = {name: symbol.encode() for name, symbol in symbols.items()}  # bytes, as cuda.core expects
                code = ObjectCode.from_cubin(cubin, symbol_mapping=mapping)
                self._codes.update(dict.fromkeys(symbols, code))
            if self._codes:
                self._kernel(next(iter(self._codes)))  # raises here if the driver refuses the code
        except (AttributeError, KeyError, TypeError) as error:  # another interface
            raise Unusable(error) from error
        except Exception as error:
            raise BuildError(f"the driver refuses the kernels: {one_line(error)}") from error

    def __call__(self, kernel: str, geometry: Geometry, arguments: Sequence[Argument], device: torch.device) -> None:
        config = self._configs.get(geometry)
        if config is None:
            config = self._config(grid=geometry.grid, block=geometry.block, shmem_size=geometry.shared)
            if len(self._configs) < 4096:
                self._configs[geometry] = config
        values = [pack(argument) for argument in arguments]
        current = torch.cuda.current_device()
        index = current if device.index is None else device.index
        with nullcontext() if index == current else torch.cuda.device(index):
            # The driver needs a current context in every thread that launches, torch's autograd threads included. torch
            # makes one current only when a call of the runtime library needs it.
            if index not in self._of_thread.devices:
                self._device(index).set_current()
                self._of_thread.devices.add(index)
            self._launch(self._current(device), config, self._kernel(kernel), *values)

    def _kernel(self, name: str):
        if name not in self._kernels:
            self._kernels[name] = self._codes[name].get_kernel(name)
        return self._kernels[name]

    def _current(self, device: torch.device):
        handle = torch.cuda.current_stream(device).cuda_stream
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._stream(handle)
            if len(self._streams) < 256:
                self._streams[handle] = stream
        return stream


def pack(argument: Argument) -> int | ctypes.c_double:
    """Convert a kernel argument for cuda.core: tensors to addresses, floats to C doubles, None to 0."""
    if argument is None:
        return 0
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return ctypes.c_double(argument) if isinstance(argument, float) else int(argument)
