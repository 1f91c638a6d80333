"""Parity with single-machine DGL."""
