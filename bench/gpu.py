"""``python -m bench gpu STEP``: what a machine with a GPU has, whether the layer works on it, and where its time goes.

These are steps of ``bench/gpu_hour.sh``. With ``--rehearse`` they run small sizes on the CPU, and name skipped checks.
"""

import functools
import importlib.metadata
import platform
import shutil
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

import fmoe
from bench import report
from bench.layer import bandwidth, contenders
from bench.layer.device import EventClock
from bench.layer.problem import SHAPES, Problem
from fmoe import random
from fmoe.errors import UserError, known_names, one_line
from fmoe.experts import initial
from fmoe.gates.naive import NaiveRouter
from fmoe.kernels.cuda import calls, tuning
from fmoe.kernels.cuda import loader as cuda
from fmoe.routing import RoutingGroups

PACKAGES = (
    "torch",
    "triton",
    "cuda-core",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "megatron-core",
    "transformers",
    "transformer-engine",
    "sonic-moe",
    "scattermoe",
    "apex",
    "pytest",
    "sentencepiece",
    "datasets",
)
GATES = ("naive", "sigmoid", "switch", "gshard")


class Skipped(Exception):
    """A check does not apply to this device; the message gives the reason."""


def main(argv: Sequence[str]) -> int:
    """Run a step; return 1 if a check failed, else 0."""
    parser = ArgumentParser(prog="python -m bench gpu", description=__doc__)
    parser.add_argument(
        "step",
        choices=["probe", "smoke", "profile", "kernels", "launch"],
        help="smoke: run every part of the CUDA backend once; profile: time of a layer's step by kernel; kernels: "
        "bandwidth of the memory-bound kernels, and Nsight Compute on the slowest; launch: run KERNELs once each",
    )
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help="names of kernels, for launch")
    parser.add_argument("--rehearse", action="store_true", help="run the checks on the CPU, in small sizes")
    arguments = parser.parse_args(argv)
    if not arguments.rehearse and not torch.cuda.is_available():
        raise UserError(f"torch {torch.__version__} sees no GPU; pass --rehearse to run on the CPU")
    device = torch.device("cpu") if arguments.rehearse else torch.device("cuda", torch.cuda.current_device())
    if arguments.step == "launch":
        return launch(device, arguments.kernels)
    return {"probe": probe, "smoke": smoke, "profile": profile, "kernels": kernels}[arguments.step](device)


def probe(device: torch.device) -> int:
    """Print versions, the device, and its rates of bf16 GEMMs and of copies."""
    for name in PACKAGES:
        try:
            print(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{name} is not installed")
    name = platform.processor() or "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    print(f"python {platform.python_version()}, CUDA {torch.version.cuda}, {name}")
    size, num_bytes = (256, 1 << 20) if device.type == "cpu" else (8192, 1 << 30)
    a = torch.randn(size, size, device=device).bfloat16()
    b = torch.empty(num_bytes, device=device, dtype=torch.uint8)
    c = torch.empty_like(b)
    print(f"bf16 GEMM of {size}: {2 * size**3 / _seconds(lambda: a @ a, device) / 1e12:.3g} TFLOP/s")
    print(f"copy of {num_bytes} bytes: {2 * num_bytes / _seconds(lambda: c.copy_(b), device) / 1e12:.3g} TB/s")
    return 0


def _seconds(step: Callable[[], object], device: torch.device) -> float:
    """Return the least seconds of a call: of ten calls on the CPU, of three measurements on a GPU."""
    if device.type == "cuda":
        return min(tuning.milliseconds(step) for _ in range(3)) / 1e3
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return min(times)


def profile(device: torch.device) -> int:
    """Print the time of a layer's forward and backward pass by kernel."""
    problem = _problem(device)
    step = contenders.layer_step(contenders.Layer(contenders.ours), problem, backward=True)
    for _ in range(3):  # compiles, and measures GEMMs
        step()
    with torch.profiler.profile() as found:
        for _ in range(3):
            step()
    times = found.key_averages()
    print(times.table(sort_by=f"self_{device.type}_time_total", row_limit=20, max_name_column_width=60))
    return 0


def kernels(device: torch.device) -> int:
    """Print the bandwidth of the memory-bound kernels; run Nsight Compute on the slowest three, if it is installed."""
    if device.type == "cpu":
        print("skipped: the kernels need a GPU")
        return 0
    _load(device)
    problem = _problem(device)
    measured = bandwidth.measure(problem, f"{problem.shape}, kernels", 5, 0, EventClock())
    print("\n".join([*report.rows_table([measured]), *report.failures([measured])]), flush=True)
    slowest = sorted(measured.seconds.keys() - {bandwidth.COPY}, key=measured.throughput)[:3]
    if shutil.which("ncu") is None:
        print("ncu is not installed: no profile of single kernels")
        return 0
    sections = ("SpeedOfLight", "MemoryWorkloadAnalysis", "Occupancy", "LaunchStats", "WarpStateStats")
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off"]
    for section in sections:
        command += ["--section", section]
    return subprocess.run([*command, sys.executable, "-m", "bench", "gpu", "launch", *slowest]).returncode


def launch(device: torch.device, names: Sequence[str]) -> int:
    """Launch kernels once each, between the marks for a profiler."""
    _only_on_gpu(device)
    _load(device)
    steps = {kernel.name: kernel.step for kernel in bandwidth.kernels_of(_problem(device))}
    for name in names:
        if name not in steps:
            raise UserError(f"KERNEL={name!r} is not known; {known_names(name, steps)}")
        steps[name]()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for name in names:
        steps[name]()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    return 0


def _problem(device: torch.device) -> Problem:
    small = device.type == "cpu"
    return Problem(SHAPES["tiny" if small else "qwen3"], torch.bfloat16, device=device.type)


def smoke(device: torch.device) -> int:
    """Run every check, even after failures of others, and print a line for each."""
    failed = 0
    for name, check in checks(device):
        begin = time.perf_counter()
        try:
            said = check()
        except Skipped as reason:
            print(f"skipped  {name}: {reason}", flush=True)
            continue
        except Exception as error:  # of any kind: the next check may pass
            failed += 1
            print(f"FAILED   {name}: {one_line(error, 400, with_type=True)}", flush=True)
            continue
        print(f"ok       {name} ({time.perf_counter() - begin:.1f} s){'' if said is None else f': {said}'}", flush=True)
    print(f"{failed} checks failed")
    return int(failed > 0)


def checks(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the checks by name, in an order in which each needs only those before it."""
    yield "the kernels compile, load and pass their self-check", lambda: _load(device)
    yield "Triton's GEMMs pass their self-check", lambda: _triton(device)
    yield "a thread that has not called CUDA before can launch", lambda: _cold_thread(device)
    yield "initial weights have the bits of the CPU's", lambda: _initial_weights(device)
    yield "the router multiplies 16 bits into float32", lambda: _router(device)
    for gate in GATES:
        yield f"{gate}: forward and backward", functools.partial(_step, device, gate)
        yield f"{gate}: the host does not wait", functools.partial(_no_wait, device, gate)
    yield "GEMMs are measured and chosen, and agree with torch's", lambda: _measured(device)
    yield "gradients are added to main_grad", lambda: _main_grad(device)
    yield "a CUDA graph replays forward and backward", lambda: _graph(device)
    yield "batches are copied in one transfer", lambda: _batch(device)


def _only_on_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise Skipped("needs a GPU")


def _load(device: torch.device) -> str | None:
    _only_on_gpu(device)
    if not cuda.load(device):
        raise RuntimeError(cuda.why(device))
    return cuda.describe()


def _triton(device: torch.device) -> None:
    _only_on_gpu(device)
    if (wrong := tuning.failure(device, gemm="triton")) is not None:
        raise RuntimeError(wrong)


def _cold_thread(device: torch.device) -> None:
    _only_on_gpu(device)
    x = torch.randn(64, 32, device=device)
    found = []

    def launch() -> None:
        try:
            found.append(calls.gather(x, None, 1, 64))
        except Exception as error:
            found.append(error)

    torch.cuda.synchronize()
    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    _near(found[0], x, 0.0)


def _initial_weights(device: torch.device) -> None:
    keys = [random.key("smoke", number) for number in range(3)]
    count = 60_000
    keys_L = torch.tensor(keys)
    _near(initial.draw(keys, count, device, 1.0, True), random.exact_normal(keys_L, count), 0.0)
    _near(initial.draw(keys, count, device, 1.0, False), random.uniform(keys_L, count) * 2 - 1, 0.0)


def _router(device: torch.device) -> None:
    with torch.device(device):
        gate = NaiveRouter(64, 8, 2).to(torch.bfloat16)
        x = torch.randn(40, 64, dtype=torch.bfloat16)
        logits_TE = gate.logits(x, RoutingGroups(1, 40))
    if logits_TE.dtype != torch.float32:
        raise AssertionError(f"logits are {logits_TE.dtype}")
    _near(logits_TE, x.double() @ gate.weight.double().t(), 1e-5)


def _layer(device: torch.device, gate: str = "naive", gemm: str = "auto") -> tuple[fmoe.FMoE, Tensor]:
    small = device.type == "cpu"
    width, count = (32, 64) if small else (512, 4096)
    options = {"bias": False, "gemm": gemm}
    sizes = {"d_model": width, "num_experts": 16, "d_hidden": width, "top_k": 2 if gate != "switch" else 1, "seed": 1}
    layer = fmoe.FMoE(gate=gate, expert="swiglu", expert_options=options, **sizes).to(device, torch.bfloat16)
    return layer, torch.randn(count, width, device=device).bfloat16().requires_grad_()


def _run(layer: fmoe.FMoE, x: Tensor) -> Tensor:
    layer.zero_grad(set_to_none=True)
    x.grad = None
    y = layer(x)
    y.sum().backward()
    return y


def _step(device: torch.device, gate: str) -> None:
    layer, x = _layer(device, gate)
    y = _run(layer, x)
    if not y.isfinite().all() or x.grad is None or not x.grad.isfinite().all():
        raise AssertionError("output or gradient is not finite")


def _no_wait(device: torch.device, gate: str) -> None:
    _only_on_gpu(device)
    layer, x = _layer(device, gate, gemm="grouped")  # "loop" reads the counts
    _run(layer, x)  # compiles and allocates
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _run(layer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _measured(device: torch.device) -> str:
    layer, x = _layer(device)
    found = _run(layer, x).detach(), x.grad
    plain, _ = _layer(device, gemm="loop")
    plain.load_state_dict(layer.state_dict())
    for own, other in zip(found, (_run(plain, x).detach(), x.grad), strict=True):
        _near(own, other, 2e-2)
    return layer.experts.backend


def _main_grad(device: torch.device) -> None:
    layer, x = _layer(device)
    _run(layer, x)
    experts = layer.experts
    expected = experts.weight_in.grad.float()
    layer.zero_grad(set_to_none=True)
    experts.into_main_grad = True
    for weight in (experts.weight_in, experts.weight_out):
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        weight.grad_added_to_main_grad = False
    layer(x).sum().backward()
    if not experts.weight_in.grad_added_to_main_grad:
        raise Skipped("the backend in use leaves main_grad to Megatron-core")
    _near(experts.weight_in.main_grad, expected, 2e-2)


def _graph(device: torch.device) -> None:
    _only_on_gpu(device)
    layer, x = _layer(device, gemm="grouped")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            _run(layer, x)
    torch.cuda.current_stream().wait_stream(stream)
    expected = x.grad.clone()
    graph = torch.cuda.CUDAGraph()
    layer.zero_grad(set_to_none=True)
    x.grad = None
    with torch.cuda.graph(graph):
        layer(x).sum().backward()
    graph.replay()
    _near(x.grad, expected, 0.0)


def _batch(device: torch.device) -> None:
    from pretrain.models.batch import to_device

    batch = {"tokens": torch.arange(12).view(3, 4), "loss_weight": torch.rand(3, 4), "documents": torch.ones(3, 4) > 0}
    for name, tensor in to_device(batch, device).items():
        _near(tensor, batch[name], 0.0)


def _near(found: Tensor, expected: Tensor, limit: float) -> None:
    """Raise unless the relative error is at most ``limit``; 0 for the same bits."""
    found = found.detach().cpu()
    expected = expected.detach().cpu()
    if limit == 0:
        if not torch.equal(found, expected):
            raise AssertionError("the bits differ")
        return
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    if not error <= limit:
        raise AssertionError(f"relative error {error:.2e}, limit {limit:.0e}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
