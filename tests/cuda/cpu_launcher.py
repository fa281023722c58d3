"""Has `fmoe.kernels.cuda` run its kernels on the CPU, through `emulator`. Not a test itself."""

import contextlib
import ctypes
from collections.abc import Iterator, Mapping, Sequence

import torch
from emulator import EmulationError, Library
from torch import Tensor

from fmoe.kernels.cuda import launch, loader
from fmoe.kernels.cuda.launch import Argument, Geometry


class CpuLauncher:
    """An `fmoe.kernels.cuda.launch.Launcher` for tensors of the CPU, in orders of threads that follow from the seed.

    Attributes:
        launched: name expressions, in order.
    """

    def __init__(self, libraries: Mapping[str, Library], seed: int = 0):
        self._libraries, self._seed = libraries, seed
        self.launched: list[str] = []

    def __call__(self, kernel: str, geometry: Geometry, arguments: Sequence[Argument], device: torch.device) -> None:
        library = self._libraries[kernel]
        kinds = "".join("d" if isinstance(a, float) else "i" if isinstance(a, int) else "p" for a in arguments)
        expected = library.signature(kernel)
        assert kinds == expected, f"{kernel} takes {expected}, not {kinds}"
        assert all(a.device == device for a in arguments if isinstance(a, Tensor)), kernel
        self.launched.append(kernel)
        seed = self._seed * 1000 + len(self.launched)
        values = [_value(argument) for argument in arguments]
        error = library.launch(kernel, geometry.grid, geometry.block, geometry.shared, values, seed)
        if error is not None:
            raise EmulationError(error)

    def names(self) -> set[str]:
        """Kernels that ran, without their template arguments."""
        return {name.partition("<")[0].removeprefix("fmoe::") for name in self.launched}


def _value(argument: Argument) -> ctypes._SimpleCData:
    if argument is None:
        return ctypes.c_void_p(None)
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_double(argument) if isinstance(argument, float) else ctypes.c_int64(argument)


@contextlib.contextmanager
def on_cpu(libraries: Mapping[str, Library], seed: int = 0) -> Iterator[CpuLauncher]:
    """Within, the cuda backend is there, on the CPU, and fresh memory is poisoned."""
    launcher = CpuLauncher(libraries, seed)
    before, was_fill = dict(loader._reasons), torch.utils.deterministic.fill_uninitialized_memory
    launchers = dict(launch.launchers)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    launch.launchers.update(cpu=launcher, none=launcher)
    loader._reasons.update(cpu=None, none=None)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield launcher
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = was_fill
        torch.use_deterministic_algorithms(was_deterministic)
        for registry, entries in ((launch.launchers, launchers), (loader._reasons, before)):
            registry.clear()
            registry.update(entries)
