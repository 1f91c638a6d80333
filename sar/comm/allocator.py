"""Giving freed memory back to the operating system.

glibc keeps what is freed in arenas, one for each thread; autograd's thread has another than the main program's. With
tensors of some megabytes, resident memory comes to several times the live tensors. Nothing about the allocator is
changed here: what is free at a moment when much is free goes back.
"""

import ctypes
from collections.abc import Callable
from functools import cache

from sar.config import Config

LEAST_FREE = 32 * 2**20
"""Bytes that arenas may keep in any case."""


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def give_back() -> None:
    """Return free memory of the allocator to the system, where it is more than `Config.keep_free` of what is in use."""
    if Config.keep_free is None or (functions := _glibc()) is None:
        return
    info, trim = functions
    found = info()
    if found.fordblks > max(LEAST_FREE, Config.keep_free * (found.uordblks + found.hblkhd)):
        trim(0)


@cache
def _glibc() -> tuple[Callable[[], _MallocInfo], Callable[[int], int]] | None:
    """glibc's `mallinfo2` and `malloc_trim`; None where the C library has no such functions."""
    try:
        library = ctypes.CDLL(None)
        info, trim = library.mallinfo2, library.malloc_trim
    except (OSError, AttributeError):
        return None
    info.restype, trim.argtypes = _MallocInfo, (ctypes.c_size_t,)
    return info, trim
