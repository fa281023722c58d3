"""Starting kernels: the registry of loaded kernels, the blocks of a launch (docs/kernels.md, "Geometry"), and launches
on torch's current stream."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from fmoe.errors import BuildError

Argument = Tensor | int | bool | float | None


@dataclass(frozen=True)
class Geometry:
    """Blocks of a launch.

    Attributes:
        grid, block: blocks and threads of a block.
        shared: bytes of dynamic shared memory of a block.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int = 0


class Launcher(Protocol):
    def __call__(self, kernel: str, geometry: Geometry, arguments: Sequence[Argument], device: torch.device) -> None:
        """Starts a kernel by its name expression. Integers and flags are passed as int64, reals as double, tensors as
        the addresses of their first elements, None as null."""


# Launchers by architecture: filled by `fmoe.kernels.cuda.loader`, and by tests, which run kernels on "cpu".
launchers: dict[str, Launcher] = {}
_arch_of_device: dict[torch.device, str] = {}


def architecture(device: torch.device | int | str | None) -> str:
    """``"sm_90"`` for a CUDA device (None: the current one), ``"cpu"`` for the CPU, ``"none"`` without CUDA devices."""
    if device is not None and torch.device(device).type == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        return "none"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def launcher(device: torch.device) -> Launcher | None:
    """The launcher of kernels for a device; None if none are loaded for it."""
    arch = _arch_of_device.get(device)
    if arch is None:
        if device.type == "cuda" and not launchers:
            return None
        arch = _arch_of_device[device] = architecture(device)
    return launchers.get(arch)


SHARED = 48 * 1024  # bytes that every kernel may have without asking for more


@lru_cache(4096)
def by_rows(rows: int, width: int, at_once: int, shared_per_warp: int = 0) -> Geometry:
    """*rows(M, width, n)*: ``at_once`` numbers a thread, several threads a row."""
    vectors = -(-width // at_once)
    across = 32
    while across < 256 and 4 * across < vectors:
        across *= 2
    down = 256 // across
    return Geometry((max(1, -(-rows // down)), 1, 1), (across, down, 1), shared_per_warp * down * across // 32)


@lru_cache(1024)
def num_warps(shared_of_block: int, shared_per_warp: int) -> int:
    """*warps*: as many as fit into shared memory, 8 at most and 1 at least."""
    return next((w for w in (8, 7, 6, 5, 4, 3, 2) if shared_of_block + w * shared_per_warp <= SHARED), 1)


def at_once(*tensors: Tensor | None) -> int:
    """Numbers that a thread takes at once: 16 bytes over the smallest of the element sizes that are moved."""
    return 16 // min(tensor.element_size() for tensor in tensors if tensor is not None)


class DeviceLauncher:
    """Kernels of one architecture, as `fmoe.kernels.cuda.build.read` gives them.

    Raises:
        BuildError: cuda.core is missing, or does not take the machine code.
    """

    def __init__(self, codes: Sequence[tuple[bytes, dict[str, str]]]):
        try:
            from cuda.core import LEGACY_DEFAULT_STREAM, LaunchConfig, ObjectCode, Stream, launch
        except ImportError as error:
            raise BuildError(f"cuda.core is not installed ({error}): pip install 'fmoe[cuda]'") from error
        self._launch, self._config, self._stream = launch, LaunchConfig, Stream.from_handle
        self._streams = {0: LEGACY_DEFAULT_STREAM}
        self._codes = {}
        for cubin, symbols in codes:
            mapping = {name: symbol.encode() for name, symbol in symbols.items()}  # bytes, as Program gives them
            code = ObjectCode.from_cubin(cubin, symbol_mapping=mapping)
            self._codes.update(dict.fromkeys(symbols, code))
        self._kernels: dict[str, object] = {}
        self._configs: dict[Geometry, object] = {}
        try:
            if self._codes:
                self._kernel(next(iter(self._codes)))  # what the driver does not take is met here
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise BuildError(f"the driver does not take the kernels: {reason}") from error

    def __call__(self, kernel: str, geometry: Geometry, arguments: Sequence[Argument], device: torch.device) -> None:
        config = self._configs.get(geometry)
        if config is None:
            config = self._config(grid=geometry.grid, block=geometry.block, shmem_size=geometry.shared)
            if len(self._configs) < 4096:
                self._configs[geometry] = config
        values = [pack(argument) for argument in arguments]
        if device.index is not None and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._launch(self._current(device), config, self._kernel(kernel), *values)
        else:
            self._launch(self._current(device), config, self._kernel(kernel), *values)

    def _kernel(self, name: str):
        found = self._kernels.get(name)
        if found is None:
            found = self._kernels[name] = self._codes[name].get_kernel(name)
        return found

    def _current(self, device: torch.device):
        handle = torch.cuda.current_stream(device).cuda_stream
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._stream(handle)
            if len(self._streams) < 256:
                self._streams[handle] = stream
        return stream


def pack(argument: Argument) -> int | ctypes.c_double:
    """As cuda.core takes it: integers and addresses are 8 bytes both."""
    if argument is None:
        return 0
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return ctypes.c_double(argument) if isinstance(argument, float) else int(argument)
