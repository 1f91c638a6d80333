"""How this process's allocator deals with freed memory, set once by `initialize_comms`; huge pages, by `import sar`.

[Note: allocator]
glibc gives a large block a mapping of its own, which goes back to the system when it is freed, but raises the size from
which it does so to that of any such block freed (up to 32 MB). After one epoch nearly all tensors come from heaps, in
which freed blocks stay, and resident memory is several times the live tensors. Fixed thresholds keep it near them.
Fresh mappings cost page faults, which huge pages make cheap: torch asks for them where an environment variable says so
when the first tensor is made, and `import torch_geometric` makes one.

Mini-batches ask for blocks of the same sizes over and over: for them, "kept" does the opposite. "auto" is "least" until
there is a loader of mini-batches, and then "kept". Tensors of workers that share a process have mappings of their own
from a smaller size on, which become pages of a file ([Note: memory of the file]).
"""

import ctypes
import os
from collections.abc import Mapping

from sar.config import Config
from sar.errors import ConfigError
from sar.logging_setup import logger

LARGE = 2**18
"""Bytes from which "least" gives a block a mapping of its own."""
SMALL = 2**14
"""As much for workers that share a process: what is smaller stays in memory."""

# The parameters of `mallopt`, from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -3, -4, -8
_MANY = 2**16  # mappings; glibc's own maximum
_PARAMETERS = {
    "least": {_M_MMAP_MAX: _MANY, _M_MMAP_THRESHOLD: LARGE, _M_TRIM_THRESHOLD: 2**21, _M_ARENA_MAX: 1},
    "spilled": {_M_MMAP_MAX: _MANY, _M_MMAP_THRESHOLD: SMALL, _M_TRIM_THRESHOLD: SMALL, _M_TOP_PAD: 0, _M_ARENA_MAX: 1},
    "kept": {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1},
}


def ask_for_huge_pages() -> None:
    """Let torch ask for huge pages for large tensors, unless the user has chosen: see [Note: allocator]."""
    if _left_alone(os.environ) is None:
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def set_allocator(*, spilled: bool = False, batches: bool = False) -> None:
    """Set glibc's allocator as `Config.allocator` says, unless the user has set it: see [Note: allocator].

    With `batches`, "auto" keeps memory. `spilled` is for workers that share a process: it is set in any case; a
    ConfigError says that it is not glibc's.
    """
    policy = "spilled" if spilled else Config.allocator
    if policy == "auto":
        policy = "kept" if batches else "least"
    if policy == "system":
        return
    if (reason := _left_alone({} if spilled else os.environ)) is not None:
        if spilled:
            raise ConfigError(
                f"Workers that share a process (SAR_RESIDENT) need glibc's allocator, but {reason}; see LD_PRELOAD."
            )
        logger.info("allocator left as it is: %s", reason)
        return
    mallopt = ctypes.CDLL(None).mallopt
    refused = [name for name, value in _PARAMETERS[policy].items() if not mallopt(name, value)]
    if refused:
        logger.warning("glibc refuses the parameters %s of mallopt; expect more memory in use.", refused)
    logger.info("allocator: freed memory is %s", "kept" if policy == "kept" else "given back")


def _left_alone(environ: Mapping[str, str]) -> str | None:
    """Why the allocator is not ours to set; None where it is."""
    for name in environ:
        if name == "GLIBC_TUNABLES" or name.startswith("MALLOC_"):
            return f"{name} is set"
    program = ctypes.CDLL(None)
    if not hasattr(program, "gnu_get_libc_version"):
        return "the C library is not glibc"
    ours, glibcs = (ctypes.cast(lib.malloc, ctypes.c_void_p).value for lib in (program, ctypes.CDLL("libc.so.6")))
    return None if ours == glibcs else "another allocator is loaded"
