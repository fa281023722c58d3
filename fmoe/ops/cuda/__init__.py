"""Operations on a GPU over our own CUDA kernels (docs/cuda.md), with fake kernels and derivatives.

`kernels` starts them, `rows` and `routing` and `ffn` make torch custom operations of them, `gemm` multiplies.
`fmoe.cuda.load` comes first.
"""
