"""The emulation finds what it is for: each kernel here is wrong in one way."""

import subprocess
from pathlib import Path

import emulator
import pytest
import torch
from emulator import EmulationError, Emulator, InOut, Library, Output

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
__global__ void writes_input(float* x, float* y, i64 n) { x[0] = y[0] = 7.0f; }
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


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    (folder / "common.cuh").write_text((emulator.CUDA / "common.cuh").read_text())
    (folder / "faults.cu").write_text(FAULTS)
    path = emulator.build(folder / "faults.cu", [f"fmoe::{name}" for name in NAMES], folder)
    library = Library(path)
    return {f"fmoe::{name}": library for name in NAMES}


def run(faults, name, x=X, y=None, seed=1, threads=64, shared=4 * N, grid=1):
    y = Output((N,), torch.float32) if y is None else y
    return Emulator(faults, seed)(f"fmoe::{name}", (grid, threads, shared), x, y, N)


def test_right_is_right(faults):
    for seed in range(5):
        assert torch.equal(run(faults, "right", seed=seed)[0], X.flip(0))


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
        ("writes_input", "writes to what it only reads"),
        ("shared_past_the_end", "past the end of shared memory"),
    ],
)
def test_what_is_wrong_is_named(faults, name, message):
    with pytest.raises(EmulationError, match=message):
        run(faults, name)
    run(faults, "right")  # and the next launch is as if nothing had been


@pytest.mark.parametrize("name", ["no_barrier", "no_warp_barrier"])
def test_a_missing_barrier_shows(faults, name):
    x, threads = (X, 64) if name == "no_barrier" else (X[:32], 32)
    results = [run(faults, name, x, Output(x.shape, torch.float32), seed, threads)[0] for seed in range(5)]
    expected = x.flip(0) if name == "no_barrier" else x.view(-1, 2).flip(1).flatten()
    assert not any(torch.equal(result, expected) for result in results)


def test_what_is_not_written_is_not_a_number(faults):
    assert run(faults, "writes_half")[0][::2].isnan().all()
    assert run(faults, "shared_unwritten")[0].isnan().all()


def test_the_order_of_blocks_shows(faults):
    results = {run(faults, "order_of_blocks", y=InOut(torch.zeros(N)), seed=s, grid=5)[0][0].item() for s in range(6)}
    assert len(results) > 1


def test_the_order_of_threads_shows(faults):
    def ranks(seed):
        zeros = torch.zeros(N, dtype=torch.int32)
        return run(faults, "order_of_atomics", InOut(zeros), Output((N,), torch.int32), seed)[1]

    first = ranks(0)
    assert torch.equal(first.sort().values, torch.arange(N, dtype=torch.int32))
    assert torch.equal(first, ranks(0))  # the same seed, the same order
    assert not torch.equal(first, ranks(1))


def test_arguments_are_checked(faults):
    with pytest.raises(AssertionError, match="takes ppi, not ppd"):
        Emulator(faults)("fmoe::right", (1, 32, 0), X, Output((N,), torch.float32), 1.0)
    with pytest.raises(EmulationError, match="blocks of"):
        run(faults, "right", threads=33)


def test_floats_are_not_added_by_atomics(tmp_path):
    """Their sum would depend on the order of threads: it does not compile here."""
    (tmp_path / "common.cuh").write_text((emulator.CUDA / "common.cuh").read_text())
    code = '#include "common.cuh"\n__global__ void f(float* x) { atomicAdd(x, 1.0f); }\n'
    (tmp_path / "floats.cu").write_text(code)
    with pytest.raises(AssertionError, match="depend on the order of threads"):
        emulator.build(tmp_path / "floats.cu", ["f"], tmp_path)


def test_sources_are_built_once(tmp_path, monkeypatch):
    (tmp_path / "common.cuh").write_text("")
    source = tmp_path / "one.cu"
    source.write_text("__global__ void one(int* x) { *x = 1; }\n")
    first = emulator.build(source, ["one"], tmp_path)
    real, runs = subprocess.run, []
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: runs.append(a) or real(*a, **k))
    assert emulator.build(source, ["one"], tmp_path) == first and not runs
    source.write_text("__global__ void one(int* x) { *x = 2; }\n")
    second = emulator.build(source, ["one"], tmp_path)
    assert second != first and len(runs) == 1 and not Path(first).exists()
