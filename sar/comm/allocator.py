"""Settings of this process's allocator for freed memory (`initialize_comms`), and of huge pages (`import sar`).

[Note: allocator]
glibc gives a large block a separate mapping, which returns to the system when it is freed. But each freed block of this
kind raises the threshold to its size (up to 32 MB). After one epoch nearly all tensors come from heaps, which keep
freed blocks, and resident memory is several times the live tensors. Fixed thresholds keep it close to live tensors.
Fresh mappings cost page faults, which huge pages make cheap. Torch requests huge pages if an environment variable is
set before the first tensor is created. `import torch_geometric` creates one, so `import sar` sets the variable.

mimalloc also keeps freed blocks, but returns other memory, so it needs little more memory and no fresh
pages. It must be loaded before the process starts, which `sar launch` does.

Mini-batches allocate the same sizes repeatedly, so "kept" does the opposite for them. "auto" is "least"
until a mini-batch loader exists, and then "kept". For workers that share a process, smaller blocks also get
separate mappings, because only these can become pages of a file ([Note: memory of the file]).
"""

import ctypes
import ctypes.util
import importlib.metadata
import os

from sar.config import Config
from sar.errors import ConfigError
from sar.host.huge_pages import left_alone
from sar.logging_setup import logger

LARGE = 2**18
"""Minimum size in bytes of blocks with separate mappings under "least"."""
SMALL = 2**14
"""The same for workers that share a process. Smaller blocks stay in memory."""

# The parameters of `mallopt`, from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -3, -4, -8
_MANY = 2**16  # mappings; glibc's own maximum
_PARAMETERS = {
    "least": {_M_MMAP_MAX: _MANY, _M_MMAP_THRESHOLD: LARGE, _M_TRIM_THRESHOLD: 2**21, _M_ARENA_MAX: 1},
    "spilled": {_M_MMAP_MAX: _MANY, _M_MMAP_THRESHOLD: SMALL, _M_TRIM_THRESHOLD: SMALL, _M_TOP_PAD: 0, _M_ARENA_MAX: 1},
    "kept": {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1},
}


def set_allocator(*, spilled: bool = False, batches: bool = False) -> None:
    """Configure glibc's allocator by `Config.allocator`, unless the user has done so: see [Note: allocator].

    With `batches`, "auto" keeps memory. `spilled`, for workers that share a process, overrides both settings, and
    raises a ConfigError if the allocator is not glibc's.
    """
    policy = "spilled" if spilled else Config.allocator
    if policy == "auto":
        policy = "kept" if batches else "least"
    if policy == "system":
        return
    if (reason := left_alone({} if spilled else os.environ)) is not None:
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


def preloads() -> dict[str, str]:
    """Environment variables that load mimalloc into a new process; empty if it is not installed."""
    try:
        files = importlib.metadata.files("cmeel-mimalloc") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    paths = [str(file.locate()) for file in files if file.name == "libmimalloc.so"]
    found = paths[0] if paths else ctypes.util.find_library("mimalloc")
    usable = found is not None and not {" ", ":"} & set(found)  # which divide LD_PRELOAD into several paths
    return {"LD_PRELOAD": str(found)} if usable else {}
