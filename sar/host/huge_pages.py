"""Huge pages for tensors, which torch requests if a variable is set before the first tensor is created."""

import ctypes
import os
from collections.abc import Mapping


def ask_for_huge_pages() -> None:
    """Make torch request huge pages for large tensors, unless the user has chosen: see [Note: allocator]."""
    if left_alone(os.environ) is None:
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def left_alone(environ: Mapping[str, str]) -> str | None:
    """The reason not to change the allocator, or None."""
    for name in environ:
        if name == "GLIBC_TUNABLES" or name.startswith("MALLOC_"):
            return f"{name} is set"
    program = ctypes.CDLL(None)
    if not hasattr(program, "gnu_get_libc_version"):
        return "the C library is not glibc"
    ours, glibcs = (ctypes.cast(lib.malloc, ctypes.c_void_p).value for lib in (program, ctypes.CDLL("libc.so.6")))
    return None if ours == glibcs else "another allocator is loaded"
