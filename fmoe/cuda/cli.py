"""``fmoe build --arch``: compiles the CUDA kernels ahead, on machines without a GPU too."""

import time
from collections.abc import Sequence

import torch

from fmoe import cuda
from fmoe.cuda import build, nvrtc
from fmoe.errors import BuildError


def build_ahead(archs: Sequence[str], force: bool = False, verbose: bool = False) -> int:
    """Compiles the kernels for each architecture, and says what was done.

    Returns:
        Exit code: 0.

    Raises:
        UserError: an architecture that NVRTC does not know; before any is compiled.
        BuildError: NVRTC is missing, a compile error, no cache folder.
    """
    found = nvrtc.find()
    for arch in archs:
        build.check_arch(arch, found)
    for arch in dict.fromkeys(archs):
        before = build.cached(arch)
        begin = time.monotonic()
        path = build.library(arch, force=force, echo=print if verbose else None)
        seconds = time.monotonic() - begin
        size = f"{path.stat().st_size / 1e6:.1f} MB"
        if before == path and not force:
            print(f"{arch}: there already: {path} ({size})")
        else:
            print(f"{arch}: built in {seconds:.1f} s with {found.name}: {path} ({size})")
    if cuda.is_off():
        print("not used while FMOE_CUDA=0 is set")
    return 0


def build_here(force: bool = False, verbose: bool = False) -> None:
    """The kernels for the GPUs of this machine, where there are some."""
    if not torch.cuda.is_available():
        return
    try:
        build_ahead(cuda.architectures(), force, verbose)
    except BuildError as error:
        print(f"no CUDA kernels: {error}")
