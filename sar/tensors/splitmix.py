"""SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").

Random draws and hashes in sar are `mix(seed + count * STEP)`: they depend on a counter, not on the worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

STEP = np.uint64(0x9E3779B97F4A7C15)
FACTOR_1, FACTOR_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SHIFT_1, SHIFT_2, SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


def mix(x: Any) -> Any:
    """Hashes 64 bits: uint64 arrays of NumPy, and uint64 numbers in loops that Numba compiles."""
    x = (x ^ (x >> SHIFT_1)) * FACTOR_1
    x = (x ^ (x >> SHIFT_2)) * FACTOR_2
    return x ^ (x >> SHIFT_3)


def mix_tensor(x: Tensor) -> Tensor:
    """As `mix`, of int64 tensors, which wrap around as uint64 does."""
    x = (x ^ shift_right(x, 30)) * as_signed(FACTOR_1)
    x = (x ^ shift_right(x, 27)) * as_signed(FACTOR_2)
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Shifts int64 right as an unsigned number."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def as_signed(bits: Any) -> int:
    """The int64 that has the same 64 bits as an unsigned number."""
    number = int(bits)
    return number - 2**64 if number >= 2**63 else number
