"""Compiles Triton's kernels for an architecture, without a GPU; run as a program, outside of the interpreter.

``python triton_compile.py sm_90 bf16 some``: a line for each kernel with its shared memory, registers and spills.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fmoe.kernels.cuda import triton_gemm, triton_kernels

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Rows an expert, columns and depth of what the tiles are for, and whether all of it is a multiple of 16.
SHAPES = {"large": (4096, 4096, 1024, True), "odd": (40, 37, 99, False)}
INTEGERS = ("tiles", "experts", "width", "hidden", "per", "columns", "height", "assignments")
FLAGS = ("GATED", "HAS_BIAS", "IS_GATHERED", "HAS_WEIGHT", "NEEDS_ACTIVE", "NEEDS_HIDDEN", "NEEDS_WEIGHT")


def kind_of(name: str, dtype: str) -> str:
    """Triton's name of the type of an argument."""
    if name in ("tile_ptr", "end_ptr"):
        return "*i32"
    if name == "index_ptr":
        return "*i64"
    if name in ("weight_ptr", "dot_ptr"):
        return "*fp32"
    return "i32" if name in INTEGERS or name.startswith("stride") else f"*{dtype}"


def compile_one(kernel: str, arch: str, dtype: str, shape: str, **flags):
    """The compiled kernel with the configuration that it would be launched with."""
    rows, columns, depth, is_round = SHAPES[shape]
    function = getattr(triton_kernels, kernel)
    constants = {name: True for name in FLAGS if name in function.arg_names}
    constants |= {"A": 0, "EVEN": is_round, "PRECISION": "ieee", "GATHERS_LEFT": True, "GATHERS_RIGHT": False}
    constants |= {"ADDS": False, "EXPERTS": 64, "BLOCK": 128, "GROUP": 8}
    options = {}
    if kernel in triton_gemm.KINDS:
        gated = flags.get("GATED", True)
        sizes = (columns, columns, rows) if kernel == "weights" else (rows, columns, depth)
        config = triton_gemm.default_config(kernel, DTYPES[dtype], *sizes, gated)
        constants |= {"BLOCK_M": config.rows, "BLOCK_N": config.columns, "BLOCK_K": config.depth}
        options = {"num_warps": config.warps, "num_stages": config.stages}
    else:
        constants |= {"BLOCK_M": 64, "BLOCK_N": 128}
    constants = {name: value for name, value in {**constants, **flags}.items() if name in function.arg_names}
    signature = {n: "constexpr" if n in constants else kind_of(n, dtype) for n in function.arg_names}
    divisible = {}
    if is_round:  # what Triton finds out of the arguments at a launch
        whole = [i for i, name in enumerate(function.arg_names) if signature[name] != "constexpr"]
        named = {i: function.arg_names[i] for i in whole}
        divisible = {(i,): [["tt.divisibility", 16]] for i, n in named.items() if n not in ("tiles", "per", "experts")}
    source = ASTSource(
        function, signature, {(function.arg_names.index(n),): v for n, v in constants.items()}, divisible
    )
    return triton.compile(source, target=GPUTarget("cuda", int(arch[3:]), 32), options=options)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes of local memory, to which they spill."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


def cases(is_long: bool):
    yield "up", "large", {"GATED": True}
    yield "down_backward", "large", {"GATED": True}
    yield "weights", "odd", {}
    if not is_long:
        return
    yield "schedule", "large", {}
    yield "weights", "large", {"GATHERS_LEFT": False, "GATHERS_RIGHT": True, "ADDS": True}
    for shape in SHAPES:
        yield "up", shape, {"GATED": False}
        yield "multiply", shape, {}
    yield "up", "odd", {"GATED": True}
    yield "down_backward", "odd", {"GATED": False}


def main(arch: str, dtype: str, length: str) -> None:
    for kernel, shape, flags in cases(length == "all"):
        made = compile_one(kernel, arch, dtype, shape, **flags)
        registers, spilled = resources(made.asm["cubin"])
        told = {name.lower(): value for name, value in flags.items()}
        print(f"{arch} {dtype} {kernel} {shape} {told}: {made.metadata.shared} bytes of shared memory", end=", ")
        print(f"{made.metadata.num_warps} warps, {registers} registers, {spilled} bytes spilled")


if __name__ == "__main__":
    main(*sys.argv[1:])
