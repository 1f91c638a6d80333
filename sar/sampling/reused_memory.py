"""Memory for the features of batches, used again when the tensors in it are gone.

[Note: page faults]
Features of a batch are tens of megabytes. The allocator takes blocks of that size from the system and gives them back,
so that each batch would pay for having all of its pages mapped and cleared, which takes longer than filling them.
"""

import threading
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LEAST_BYTES = 2**20
"""Smaller tensors are the allocator's."""
KEPT = 4
"""Unused blocks that are kept at most; the smallest go first."""
SLACK = 1.25
"""How much larger than asked for a block is made, since the next batch is another size."""

_free: list[NDArray[np.uint8]] = []
_lock = threading.RLock()  # a finalizer may run inside `empty`


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As `torch.empty`, contiguous and on the CPU, in memory that is used again: see [Note: page faults]."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if nbytes < LEAST_BYTES:
        return torch.empty(tuple(shape), dtype=dtype)
    block = _take(nbytes)
    lease = block[:nbytes]
    # The tensor's storage holds on to the lease, which therefore ends with the last tensor in it.
    weakref.finalize(lease, _give_back, block).atexit = False
    return torch.from_numpy(lease).view(dtype).view(tuple(shape))


def _take(nbytes: int) -> NDArray[np.uint8]:
    """The smallest unused block that is large enough, or a new one."""
    with _lock:
        fits = [number for number, block in enumerate(_free) if block.nbytes >= nbytes]
        block = _free.pop(min(fits, key=lambda number: _free[number].nbytes)) if fits else None
    if block is None:
        block = np.empty(int(nbytes * SLACK), dtype=np.uint8)
    return block


def _give_back(block: NDArray[np.uint8]) -> None:
    with _lock:
        _free.append(block)
        _free.sort(key=len, reverse=True)
        del _free[KEPT:]
