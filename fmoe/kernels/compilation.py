"""Compilation of the CUDA kernels on request, for ``fmoe build`` and ``fmoe info``."""

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from fmoe.errors import BuildError, UserError
from fmoe.kernels.cuda import build, loader, nvrtc


def describe() -> str:
    """Return one line on the CUDA kernels of this process: their state, or why they are not used."""
    return loader.describe()


def compile_cuda(
    archs: Sequence[str], *, force: bool = False, echo: Callable[[str], None] | None = None
) -> Iterator[str]:
    """Compile the CUDA kernels for each architecture, also on machines without a GPU, and yield lines of a report.

    Args:
        echo: called with the compiler's commands and the registers of each kernel; None for no call.

    Raises:
        UserError: NVRTC does not support an architecture.
    """
    compiler = nvrtc.find()
    for arch in archs:
        build.check_arch(arch, compiler)
    for arch in dict.fromkeys(archs):
        before = build.cached(arch)
        begin = time.monotonic()
        path = build.library(arch, force=force, echo=echo)
        seconds = time.monotonic() - begin
        size = f"{path.stat().st_size / 1e6:.1f} MB"
        if before == path and not force:
            yield f"{arch}: already built: {path} ({size})"
        else:
            yield f"{arch}: built in {seconds:.1f} s with {compiler.name}: {path} ({size})"
    if loader.is_off():
        yield "the CUDA kernels are not used while FMOE_CUDA=0 is set"


def compile_cuda_here(*, force: bool, echo: Callable[[str], None] | None) -> Iterator[str]:
    """Compile the kernels for the GPUs of this machine, if any, like `compile_cuda`; a failure is a line, too."""
    if not torch.cuda.is_available():
        return
    try:
        yield from compile_cuda(loader.architectures(), force=force, echo=echo)
    except (BuildError, UserError) as error:  # UserError: a GPU that NVRTC does not support
        yield f"the CUDA kernels were not built: {error}"
