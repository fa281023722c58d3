"""CUDA that compiles in a tenth of a second, and where it is built. Not a test itself."""

import os
from pathlib import Path

from fmoe.kernels.cuda import build
from fmoe.kernels.cuda.build import Sources

FILL = """#include "value.cuh"
namespace small {
template <class T> __global__ void fill(T* out, long long n) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) out[i] = T(VALUE);
}
}
"""
KERNELS = {"fill.cu": ("small::fill<float>", "small::fill<double>")}


def sources(folder: Path, code: str = FILL) -> Sources:
    """A file, its header and two instances of its kernel."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fill.cu").write_text(code)
    (folder / "value.cuh").write_text("#define VALUE 42\n")
    return Sources(folder, KERNELS)


def build_in(cache: str, folder: str, arch: str, log: str) -> str:
    """For another process: the path of what was built there; each compilation adds a line to ``log``."""
    from fmoe.kernels.cuda import nvrtc

    os.environ["FMOE_CACHE"] = cache
    compile_file = nvrtc.compile_file

    def counting(*arguments, **options):
        with open(log, "a") as file:
            file.write("compiled\n")
        return compile_file(*arguments, **options)

    nvrtc.compile_file = counting
    return str(build.library(arch, Sources(Path(folder), KERNELS)))
