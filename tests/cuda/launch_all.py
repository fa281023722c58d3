"""Launches every CUDA kernel with the argument lists of its callers; run by `stand_in.run`.

``launch_all.py few`` compiles and launches instances of few dtypes: no float16, experts in bfloat16 alone.
It prints what was given to the launcher, as JSON; the stand-in's log has what arrived.
"""

import json
import re
import struct
import subprocess
import sys
import threading
from dataclasses import astuple
from itertools import product

import torch
from cuda.core import LEGACY_DEFAULT_STREAM, LaunchConfig, ObjectCode
from cuda.core import launch as core_launch
from stand_in import Gpus

from fmoe.kernels.cuda import build, calls, launch, loader, router, routing, rows, tuning
from fmoe.kernels.cuda.calls import TokenTiles
from fmoe.kernels.cuda.instances import DTYPES, MAX_EXPERTS, MAX_SEGMENTS
from fmoe.kernels.cuda.routing import Rule
from fmoe.kernels.cuda.variants import Batch, backward, forward
from fmoe.optim import Lamb

FLOAT = torch.float32
BF16 = torch.bfloat16
new = torch.empty  # kernels do not run, so what is in tensors does not matter


def signatures(symbols: list[str]) -> dict[str, str]:
    """p, i or d for each parameter of a kernel, by its symbol: a pointer, int64, double."""
    done = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True)
    kinds = {"long long": "i", "double": "d"}
    found = {}
    for symbol, line in zip(symbols, done.stdout.splitlines(), strict=True):
        words = re.search(r"\(([^()]*)\)$", line)[1].split(", ")
        found[symbol] = "".join("p" if word.endswith("*") else kinds[word] for word in words)
    return found


class Sender:
    """A launcher for tensors on the CPU that passes launches on to a launcher of a GPU, and notes them.

    Attributes:
        device: the GPU.
        sent: launches as the stand-in logs them.
    """

    def __init__(self, launcher: launch.Launcher, gpus: Gpus, symbols: dict[str, str]):
        self._launcher = launcher
        self._gpus = gpus
        self._symbols = symbols
        self._signatures = signatures(list(symbols.values()))
        self.device = torch.device("cuda", 0)
        self.sent: list[dict] = []

    def __call__(self, kernel, geometry, arguments, device):
        symbol = self._symbols[kernel]
        kinds = "".join("d" if isinstance(a, float) else "i" if isinstance(a, int) else "p" for a in arguments)
        assert kinds == self._signatures[symbol], f"{kernel} takes {self._signatures[symbol]}, not {kinds}"
        self._launcher(kernel, geometry, arguments, self.device)
        self.sent.append(
            {
                "kernel": symbol,
                "device": self.device.index,
                "thread": threading.get_native_id(),
                "stream": self._gpus.streams[self.device.index] or 1,  # cuda.core's LEGACY_DEFAULT_STREAM
                "grid": list(geometry.grid),
                "block": list(geometry.block),
                "shared": geometry.shared,
                "arguments": [[8, _bits(argument)] for argument in arguments],
            }
        )


def _bits(argument: launch.Argument) -> int:
    value = 0 if argument is None else argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
    return struct.unpack("<Q", struct.pack("<d" if isinstance(value, float) else "<q", value))[0]


def experts(dtype, code, gated, tokens=5, top_k=2, count=3, width=24, hidden=16):
    """Forward and backward pass of experts with biases, of tokens and of rows; no row reaches a GEMM."""
    assignments = tokens * top_k
    height = 2 * hidden if gated else hidden
    is_large = width > 1000
    w_in = new(count, height, width, dtype=dtype)
    b_in = new(count, height, dtype=dtype)
    w_out = new(count, width, hidden, dtype=dtype)
    b_out = new(count, width, dtype=dtype)
    perm = new(assignments, dtype=torch.int64)
    inverse = new(tokens, top_k, dtype=torch.int64)
    end = new(count, dtype=torch.int32)
    limit = new(1, dtype=torch.int64)
    x = new(tokens, width, dtype=dtype)
    rows_MD = new(assignments, width, dtype=dtype)
    parameters = (w_in, b_in, w_out, b_out)
    options = ([0] * count, code, gated)
    for batch in (
        Batch(x, new(tokens, top_k), *parameters, perm, inverse, end, limit, *options),
        Batch(rows_MD, new(assignments), *parameters, None, None, end, None, *options),
    ):
        y, pre_activations = forward(batch, "loop")
        # Experts without rows get gradients of zero, for each of fused.NAMES.
        needs = [True, True, not is_large, True, not is_large, True]
        backward(batch, torch.empty_like(y), pre_activations, needs, "loop", {})
    calls.activate(new(assignments, height, dtype=dtype), b_in, end, limit, code, gated)
    calls.add_bias(rows_MD, b_out, end)
    calls.combine(rows_MD, inverse, new(tokens, top_k), limit, b_out, end)
    calls.combine_backward(x, rows_MD, inverse, new(tokens, top_k), limit)


def route(dtype, tokens, count, top_k, capacity, half_width=0.01, groups=0, sequences=1):
    """A router in one operation, and its backward pass; then sigmoid scores, with a plain backward pass."""
    x = torch.zeros(tokens, 8, dtype=dtype)
    weight = torch.zeros(count, 8, dtype=dtype)
    length = max(1, tokens // sequences)
    rule = Rule(groups=groups, kept_groups=max(1, groups // 2), best_of=1 + (groups > 0))
    if router.fits(count, top_k, rule, capacity is not None):
        shape = (length, sequences, length)
        found = router._router(
            x, weight, None, top_k, *astuple(rule), *shape, capacity or 0.0, half_width, 2**63 - 1, 7
        )
        expert, _, weights, balance, z, stats, _, logits, logsumexp, fraction, jittered = found
        given = (weights, balance, z, torch.zeros_like(x), jittered if half_width else x, weight, None, expert, stats)
        sizes = (True, 1.0, *shape, half_width, 2**63 - 1, 7, [True, True])
        router._router_backward(*given, logits, logsumexp, fraction, *sizes)
    logits = new(tokens, count)
    mask = new(tokens, dtype=torch.bool)
    bias = new(count)
    out = routing.route(logits, top_k, Rule(is_sigmoid=True, groups=groups), bias_E=bias, mask_T=mask)
    # Not by autograd: its threads ask the CUDA runtime, which needs more of a driver.
    given = (out.expert_TK, out.logsumexp_T, out.weight_TK, out.score_TE, out.logsumexp_T)
    routing._route_backward(logits, *given, True, True, 1.0)
    chosen = new(tokens, top_k, dtype=torch.int64)
    rows.drop_over_capacity(chosen, mask, count, length, sequences, length, 1.25)
    calls.queue(calls.count_choices(chosen, None, count, TokenTiles(tokens, max(1, tokens))), top_k, None)
    rows.place(chosen, count)


def lamb(dtype, grad_dtype):
    """A step of the optimizer with a stack of experts, a matrix, and a vector of more than one chunk."""
    weights = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in ((3, 4, 5), (6, 7), (70_000,))]
    weights[0].is_stacked = True
    for weight in weights:
        weight.grad_dtype = grad_dtype
        weight.grad = torch.zeros(weight.shape, dtype=grad_dtype)
    Lamb(weights).step()


def few(names):
    """Return the name expressions of instances of few dtypes."""
    others = re.compile(r"fmoe::f16|fmoe::(activate|combine|bias_gradients|add_bias)\w*<float")
    return tuple(name for name in names if not others.search(name))


def launch_all(of_experts, dtypes):
    """Launch every kernel, with sizes from none to those of large models."""
    for dtype in of_experts:
        for code, gated in (*product(range(4), (False, True)), (4, True)):
            experts(dtype, code, gated)
        experts(dtype, 0, True, tokens=0)
        experts(dtype, 3, True, 8192, 2, 8, 4096, 14336)  # Mixtral
        experts(dtype, 3, True, 8192, 8, 128, 2048, 768)  # Qwen3
    for dtype in dtypes:
        for other in dtypes:
            calls.gather(new(4, 6, dtype=dtype), new(9, dtype=torch.int64), 2, 9, scale=new(9), dtype=other)
        lamb(dtype, dtype)
        lamb(dtype, FLOAT)
        for capacity in (None, 1.25):
            route(dtype, 33, 8, 2, capacity)
    for count in (1, 40, 100, 200, 300, 513):
        route(BF16, 300, count, 1, 1.0, 0.0)
        route(FLOAT, 300, count, min(8, count), None, sequences=3)
    route(FLOAT, 0, 8, 2, 1.25)
    route(BF16, 16384, 128, 8, 1.25)
    route(FLOAT, 64, 256, 8, None, groups=8)
    route(FLOAT, 8, MAX_EXPERTS, 8, None)
    rows.place(new(8192, 8, dtype=torch.int64), MAX_EXPERTS)
    segments = new(MAX_SEGMENTS, dtype=torch.int64)
    calls.segment_order(segments, segments, 70_000)


def in_cold_thread(function, *arguments):
    """Call a function in a thread that has called nothing of CUDA before."""
    errors = []

    def call():
        try:
            function(*arguments)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def faults(launcher, sender, gpus):
    """Return the error of each planted fault, by name."""
    arguments = (new(4, dtype=torch.int64), 4, 4, 512, new(1, 5, dtype=torch.int32))
    kernel = "fmoe::count_tiles"
    device = torch.device("cuda", 0)
    cubin, symbols = next(code for code in build.read(build.library(launch.architecture(device))) if kernel in code[1])
    code = ObjectCode.from_cubin(cubin, symbol_mapping={kernel: symbols[kernel].encode()}).get_kernel(kernel)
    config = LaunchConfig(grid=1, block=32)

    def start(launcher=launcher, grid=(1, 1, 1), block=(32, 1, 1), shared=64, given=arguments):
        launcher(kernel, launch.Geometry(grid, block, shared), given, device)

    def on_a_stream_of_the_other_device():
        gpus.streams[0] = gpus.streams[1]
        try:
            start()
        finally:
            gpus.streams[0] = 0

    return {
        name: _error(function, *given)
        for name, function, *given in (
            ("shared memory", lambda: start(shared=launch.SHARED + 4)),
            ("grid", lambda: start(grid=(1, 65536, 1))),
            ("block", lambda: start(block=(2048, 1, 1))),
            ("argument order", lambda: start(sender, given=arguments[1:] + arguments[:1])),
            ("argument count", lambda: start(sender, given=arguments[:-1])),
            ("no context", in_cold_thread, lambda: core_launch(LEGACY_DEFAULT_STREAM, config, code, 0, 0, 4, 512, 0)),
            ("stream", on_a_stream_of_the_other_device),
            ("name", lambda: launch.DeviceLauncher([(cubin, {"fmoe::gone": "_Zgone"})])),
            ("image", lambda: launch.DeviceLauncher([(cubin[100:], symbols)])),
        )
    }


def _error(function, *given) -> str | None:
    try:
        function(*given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def main(*words: str) -> None:
    dtypes = (list(DTYPES), list(DTYPES))
    if words:
        dtypes = ([BF16], [FLOAT, BF16])
        shipped = build.SHIPPED
        kernels = {source: few(names) for source, names in shipped.kernels.items()}
        build.SHIPPED = build.Sources(shipped.folder, kernels)
    tuning.self_check = lambda device: None  # it reads results
    gpus = Gpus()
    device = torch.device("cuda", 0)
    assert loader.load(device), loader.why(device)
    launcher = launch.launchers[launch.architecture(device)]
    symbols: dict[str, str] = {}
    for _cubin, of_file in build.read(build.library(launch.architecture(device))):
        symbols |= of_file
    sender = launch.launchers["cpu"] = Sender(launcher, gpus, symbols)
    launch_all(*dtypes)
    in_cold_thread(launch_all, *dtypes)
    gpus.make_stream(1)
    sender.device = torch.device("cuda", 1)
    in_cold_thread(launch_all, *dtypes)
    lamb(BF16, FLOAT)
    sender.device = device
    lamb(BF16, FLOAT)
    result = {"symbols": symbols, "main_thread": threading.get_native_id(), "sent": sender.sent}
    json.dump({**result, "faults": faults(launcher, sender, gpus)}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
