"""Triton's kernels in its interpreter. Not a test itself."""

import os

import numpy as np
import pytest
import torch

from fmoe.kernels.cuda import gemm, triton_gemm
from fmoe.kernels.cuda.triton_gemm import Config

SMALL = Config(16, 16, 16, 4, 2, 2)  # many tiles of small shapes


def prepare(monkeypatch) -> None:
    """Skips where Triton is not there, or runs on a GPU."""
    if triton_gemm.why() is not None:
        pytest.skip(triton_gemm.why())
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton's kernels run on the GPU: tests/gpu")
    import triton
    from triton.runtime import interpreter

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
        pytest.skip(f"the interpreter of Triton {triton.__version__} does not take loops up to a tensor: 3.9 does")

    made = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        """Triton's own takes the bits of bfloat16 for integers."""
        return made(self, _in_float(interpreter, a), _in_float(interpreter, b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(triton_gemm, "default_config", lambda *_: SMALL)
    monkeypatch.setattr(gemm, "_checked", {torch.device("cpu"): None})  # the check takes a second here


def _in_float(interpreter, handle):
    tl = interpreter.tl
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    wide = handle.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(wide.view(np.float32), tl.float32)
