"""What sar changes in how Numba compiles and keeps code; with `sar.kernels.cpu.vector` all that touches its insides."""
