"""CUDA that compiles in a tenth of a second, and where it is built. Not a test itself."""

from pathlib import Path

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
