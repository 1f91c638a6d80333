"""The kernels compiled with Numba, a backend of `sar.kernels.backend`: float32 and float64 tensors in CPU memory.

`docs/kernels.md` tells how this folder works and how to maintain it. Importing `kernels` loads the compiler.
"""
