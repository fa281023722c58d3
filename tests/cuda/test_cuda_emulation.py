"""The emulation finds what it is for: each kernel here is wrong in one way."""

import emulator
import pytest
import torch
from emulator import EmulationError, Emulator

from fmoe.kernels.cuda.launch import Geometry

pytestmark = pytest.mark.slow  # after a change of the emulation

FAULTS = r"""
#include "common.cuh"
namespace fmoe {
__global__ void right(const float* x, float* y, i64 n) {  // y[i] = x[n - 1 - i], through shared memory
  float* shared = reinterpret_cast<float*>(shared_memory());
  if (threadIdx.x < n) shared[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  if (threadIdx.x < n) y[threadIdx.x] = shared[n - 1 - threadIdx.x];
}
__global__ void no_barrier(const float* x, float* y, i64 n) {
  float* shared = reinterpret_cast<float*>(shared_memory());
  if (threadIdx.x < n) shared[threadIdx.x] = x[threadIdx.x];
  if (threadIdx.x < n) y[threadIdx.x] = shared[n - 1 - threadIdx.x];
}
__global__ void no_warp_barrier(const float* x, float* y, i64 n) {
  float* shared = reinterpret_cast<float*>(shared_memory());
  shared[threadIdx.x] = x[threadIdx.x];
  y[threadIdx.x] = shared[threadIdx.x ^ 1];
}
__global__ void barrier_in_branch(const float* x, float* y, i64 n) {
  if (threadIdx.x < 40) __syncthreads();
  y[threadIdx.x] = x[threadIdx.x];
}
__global__ void two_barriers(const float* x, float* y, i64 n) {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
}
__global__ void shuffle_in_branch(const float* x, float* y, i64 n) {
  float v = x[threadIdx.x];
  if (threadIdx.x != 5) v = warp_sum(v);
  y[threadIdx.x] = v;
}
__global__ void half_waits(const float* x, float* y, i64 n) {
  if (threadIdx.x % 2) __syncthreads();
  y[threadIdx.x] = warp_sum(x[threadIdx.x]);
  if (threadIdx.x % 2 == 0) __syncthreads();
}
__global__ void reads_past_the_end(const float* x, float* y, i64 n) { y[0] = x[n + threadIdx.x]; }
__global__ void writes_past_the_end(const float* x, float* y, i64 n) { y[n + threadIdx.x] = x[0]; }
__global__ void writes_before(const float* x, float* y, i64 n) { y[-1 - i64(threadIdx.x)] = x[0]; }
__global__ void shared_past_the_end(const float* x, float* y, i64 n) {
  reinterpret_cast<float*>(shared_memory())[n + threadIdx.x] = 1.0f;
}
__global__ void writes_half(const float* x, float* y, i64 n) {
  if (threadIdx.x % 2 && threadIdx.x < n) y[threadIdx.x] = x[threadIdx.x];
}
__global__ void shared_unwritten(const float* x, float* y, i64 n) {
  float* shared = reinterpret_cast<float*>(shared_memory());
  if (threadIdx.x == 0) shared[0] += x[0];
  __syncthreads();
  if (threadIdx.x < n) y[threadIdx.x] = shared[0];
}
__global__ void order_of_blocks(const float* x, float* y, i64 n) {
  if (threadIdx.x == 0) y[0] = y[0] * 2.0f + x[0] * float(blockIdx.x);
}
__global__ void order_of_atomics(int* x, int* y, i64 n) {
  if (threadIdx.x < n) y[threadIdx.x] = atomicAdd(x, 1);
}
}  // namespace fmoe
"""
NAMES = [line.split("void ")[1].split("(")[0] for line in FAULTS.splitlines() if "__global__" in line]
N = 64
X = torch.arange(N).float() + 1


def build(folder, code, names):
    (folder / "common.cuh").write_text((emulator.CUDA / "common.cuh").read_text())
    (folder / "faults.cu").write_text(code)
    return emulator.build(folder / "faults.cu", names, folder)


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    names = [f"fmoe::{name}" for name in NAMES]
    return dict.fromkeys(names, build(tmp_path_factory.mktemp("faults"), FAULTS, names))


def run(faults, name, x=X, y=None, seed=1, threads=N, grid=1, n=N):
    """Return y after a launch."""
    if y is None:
        y = torch.full_like(x, torch.nan) if x.is_floating_point() else torch.zeros_like(x)
    geometry = Geometry((grid, 1, 1), (threads, 1, 1), 4 * N)
    Emulator(faults, seed)(f"fmoe::{name}", geometry, (x.clone(), y, n), x.device)
    return y


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("barrier_in_branch", r"fmoe::barrier_in_branch, block \(0, 0, 0\).*divergent barrier"),
        ("two_barriers", r"divergent barrier: at __syncthreads in faults.cu:\d+, but others wait at .*faults.cu:\d+"),
        ("shuffle_in_branch", "divergent warp"),
        ("half_waits", "divergent barrier: thread .* waits at .*, others at __syncthreads"),
        ("reads_past_the_end", "outside every array: .* bytes past the end of argument 0"),
        ("writes_past_the_end", "outside every array: .* bytes past the end of argument 1"),
        ("writes_before", "writes beside argument 1"),
        ("shared_past_the_end", "past the end of shared memory"),
    ],
)
def test_what_is_wrong_is_named(faults, name, message):
    with pytest.raises(EmulationError, match=message):
        run(faults, name)
    assert torch.equal(run(faults, "right"), X.flip(0))  # the next launch is not affected


@pytest.mark.parametrize("name", ["no_barrier", "no_warp_barrier"])
def test_a_missing_barrier_shows(faults, name):
    x = X if name == "no_barrier" else X[:32]
    expected = x.flip(0) if name == "no_barrier" else x.view(-1, 2).flip(1).flatten()
    assert not any(torch.equal(run(faults, name, x, seed=seed, threads=len(x)), expected) for seed in range(5))
