"""Huge pages for tensors, which torch asks for if a variable is set before the first one is made."""

import ctypes
import os
from collections.abc import Mapping


def ask_for_huge_pages() -> None:
    """Let torch ask for huge pages for large tensors, unless the user has chosen: see [Note: allocator]."""
    if left_alone(os.environ) is None:
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def left_alone(environ: Mapping[str, str]) -> str | None:
    """The reason not to change the allocator; None if there is none."""
    for name in environ:
        if name == "GLIBC_TUNABLES" or name.startswith("MALLOC_"):
            return f"{name} is set"
    program = ctypes.CDLL(None)
    if not hasattr(program, "gnu_get_libc_version"):
        return "the C library is not glibc"
    ours, glibcs = (ctypes.cast(lib.malloc, ctypes.c_void_p).value for lib in (program, ctypes.CDLL("libc.so.6")))
    return None if ours == glibcs else "another allocator is loaded"
