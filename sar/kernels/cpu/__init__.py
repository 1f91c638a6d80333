"""The kernels compiled with Numba, a backend of `sar.kernels.api`, for floating-point tensors in CPU memory.

`docs/kernels.md` tells how this folder works and how to maintain it. Importing `kernels` loads the compiler.
"""
