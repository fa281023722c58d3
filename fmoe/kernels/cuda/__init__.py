"""The CUDA backend (docs/cuda.md).

`loader` compiles and loads the kernels, `calls` launches them, `rows`, `router`, `routing` and `ffn` wrap them as
differentiable torch operations, and `gemm` has the matrix products.
"""
