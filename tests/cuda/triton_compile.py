"""Launches Triton's kernels as `TritonGemms` does, outside of the interpreter; run by `stand_in.run`.

``triton_compile.py bf16 large`` prints a description of each launch of a GEMM, as JSON, in the order of the stand-in's
log. Instead of a shape, ``variants`` launches with many compile-time flags, and ``up`` or another kind of GEMM with
its configurations. Triton itself specialises the arguments, and compiles for the stand-in's architecture.
"""

import json
import sys
from dataclasses import astuple

import torch
import triton
from stand_in import Gpus

from fmoe.kernels.cuda import triton_gemm
from fmoe.kernels.cuda.triton_gemm import Config, TritonGemms

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Tokens, experts per token, experts, width, hidden width.
SHAPES = {"large": (4096, 2, 8, 4096, 1024), "odd": (40, 3, 7, 99, 37), "small": (8, 2, 4, 16, 16)}
new = torch.empty  # kernels do not run, so what is in tensors does not matter


class Experts:
    """The passes of experts, one GEMM at a time.

    Attributes:
        dtype: dtype of tokens and matrices.
        told: a description of each GEMM.
    """

    def __init__(self, dtype: str):
        self._name = dtype
        self.dtype = DTYPES[dtype]
        self.told: list[dict] = []

    def run(
        self,
        kind: str,
        shape: str,
        *,
        gated: bool = True,
        code: int = 3,
        bias: bool = False,
        tokens: bool = True,
        total: bool = False,
        precise: bool = True,
        config: Config | None = None,
    ) -> None:
        """Launch one GEMM.

        Args:
            code: index of the activation.
            bias: with biases; in the backward pass, without combine weights.
            tokens: gather rows of tokens.
            total: add the gradients of matrices to a tensor in float32.
            precise: without TF32.
            config: None for the default one.
        """
        count, top_k, experts, width, hidden = SHAPES[shape]
        rows = count * top_k
        height = hidden * (1 + gated)
        index, per = (new(rows, dtype=torch.int64), top_k) if tokens else (None, 1)
        gemms = TritonGemms(new(experts, dtype=torch.int32), rows, {} if config is None else {kind: config})
        torch.backends.cuda.matmul.allow_tf32 = not precise

        def normal(*sizes):
            return new(*sizes, dtype=self.dtype)

        x = normal(count if tokens else rows, width)
        w_in = normal(experts, height, width)
        w_out = normal(experts, width, hidden)
        if kind == "up":
            gemms.up(x, index, per, w_in, normal(experts, height) if bias else None, code, gated)
        elif kind == "multiply" and tokens:
            gemms.down(normal(rows, hidden), w_out, normal(experts, width) if bias else None)
        elif kind == "multiply":
            gemms.up_backward(normal(rows, height), w_in)
        elif kind == "down_backward":
            weight = None if bias else new(rows)
            needs = {"needs_active": not bias, "needs_hidden": True, "needs_weight": not bias}
            gemms.down_backward(x, index, per, w_out, normal(rows, height), weight, code, gated, **needs)
        else:
            out = new(experts, height, width) if total else None
            gemms.weights(normal(rows, height), x, index, per, gathered="right", total=out)
        options = {"gated": gated, "code": code, "bias": bias, "tokens": tokens, "total": total, "precise": precise}
        self.told.append(
            {"kind": kind, "shape": shape, "dtype": self._name, "config": config and astuple(config), **options}
        )


def some(experts: Experts, shape: str) -> None:
    """Launch each kind of GEMM once, as in a model with gated experts."""
    for kind in triton_gemm.KINDS:
        experts.run(kind, shape)
    experts.run("multiply", shape, tokens=False)


def variants(experts: Experts) -> None:
    """Launch each kind of GEMM with each compile-time flag that a caller can choose."""
    for shape in ("large", "odd"):
        for kind in triton_gemm.KINDS:
            experts.run(kind, shape)
            experts.run(kind, shape, tokens=False)
            experts.run(kind, shape, gated=False, code=2, bias=True)
        experts.run("weights", shape, total=True)
        if experts.dtype == torch.float32:
            for kind in triton_gemm.KINDS:
                experts.run(kind, shape, precise=False)
        for code in (0, 1, 4):
            experts.run("up", shape, code=code, bias=True)
            experts.run("down_backward", shape, code=code)


def configurations(experts: Experts, kind: str) -> None:
    """Launch each configuration that is measured for a kind of GEMM of a large model."""
    count, top_k, number, width, hidden = SHAPES["large"]
    rows = count * top_k // number
    sizes = {
        "up": (rows, hidden, width, True),
        "multiply": (rows, width, hidden, False),
        "down_backward": (rows, hidden, width, True),
        "weights": (2 * hidden, width, rows, False),
    }
    for config in triton_gemm.configs(kind, experts.dtype, *sizes[kind]):
        experts.run(kind, "large", config=config)


def main(dtype: str, cases: str) -> None:
    Gpus()
    from triton.backends.nvidia.driver import CudaDriver

    driver = CudaDriver()
    driver.get_current_device = torch.cuda.current_device
    driver.get_current_stream = lambda device: torch.cuda.current_stream(device).cuda_stream
    driver.get_device_capability = torch.cuda.get_device_capability
    triton.runtime.driver.set_active(driver)
    experts = Experts(dtype)
    if cases in triton_gemm.KINDS:
        configurations(experts, cases)
    elif cases in SHAPES:
        some(experts, cases)
    else:
        variants(experts)
    json.dump({"triton": triton.__version__, "launches": experts.told}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
