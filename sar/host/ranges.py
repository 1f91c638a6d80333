"""Names ranges of tiles, waits and kernels in the traces of torch.profiler, and the running module."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch.autograd.profiler import record_function

_NOTHING = nullcontext()

traced: Callable[[], bool] = torch.autograd._profiler_enabled
"""Whether torch.profiler is running."""


def named(what: str) -> AbstractContextManager[Any]:
    """A range of this name in the trace if torch.profiler is running (otherwise 0.1 microseconds)."""
    return record_function(what) if traced() else _NOTHING


def running_module() -> tuple[str, str]:
    """Name and class of the innermost module whose forward is running; both are empty outside of modules.

    The name is relative to the outermost module, and empty for the outermost module.
    """
    frame: FrameType | None = sys._getframe()
    running: list[torch.nn.Module] = []
    while frame is not None:
        if frame.f_code is torch.nn.Module._call_impl.__code__:
            running.append(frame.f_locals["self"])
        frame = frame.f_back
    if not running:
        return "", ""
    names = {module: name for name, module in running[-1].named_modules()}
    return names.get(running[0], ""), type(running[0]).__name__
