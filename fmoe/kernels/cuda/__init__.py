"""The CUDA backend (docs/cuda.md).

`loader` compiles and loads the kernels, and `calls` launches them. `rows`, `router`, `routing` and `ffn` wrap them as
differentiable torch operations. `gemm` chooses the matrix products.
"""
