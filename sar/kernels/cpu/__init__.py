"""Compiled loops over edges, for CPUs (Numba)."""
