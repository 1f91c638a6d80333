"""What stays in memory of a virtual worker whose turn has passed."""

import ctypes

import pytest
import torch

import sar
from sar.comm.allocator import _mkl_free_buffers
from tests.virtual.virtual_pool import VirtualPool


class _Allocated(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks"]] + [
        ("rest", ctypes.c_size_t * 4)
    ]


def multiplies():
    """Bytes in blocks of the allocator's with mappings of their own, after everybody has multiplied matrices."""
    torch.rand(2000, 256) @ torch.rand(256, 256)
    sar.all_sum(0)
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Allocated
    return library.mallinfo2().hblkhd


@pytest.mark.skipif(_mkl_free_buffers() is None, reason="torch is built without MKL")
def test_rooms_of_matrix_products():
    few, many = (max(VirtualPool(1, places).run(multiplies)) for places in (2, 8))
    assert many < few + 2**23
