"""The CUDA backend (docs/cuda.md): `loader` compiles and loads the kernels, `calls` starts them, `rows`, `routing` and
`ffn` make differentiable torch operations of them, `gemm` multiplies."""
