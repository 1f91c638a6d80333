"""A pool of virtual workers, with the interface of `tests.workers.WorkerPool`: W processes of V threads each."""

import ctypes
import importlib
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sar.comm.allocator import _M_MMAP_THRESHOLD, SMALL, set_allocator
from sar.outofcore import pages, spill, workers
from sar.outofcore.pages import has_its_own_pages
from sar.tensors import spillable
from tests.workers import Err, Ok, WorkerFailure, _pickle, shared_pool

SPILL_ALL = 1
"""Bytes from which storages leave memory in tests, whose graphs are small."""
LEAST_BLOCK = 2**12
"""Bytes from which they have pages of their own, so that they can."""


class VirtualPool:
    """`processes` x `each` workers; with `spill`, their tensors leave memory with every turn.

    Unless the graph `fits`, rows are laid out for each reader, and files are read and written past the page cache.
    """

    def __init__(self, processes: int, each: int, spill: bool = True, fits: bool = True) -> None:
        self.processes = processes
        self.each = each
        self.spill, self.fits = spill, fits
        self.world_size = processes * each

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 60, per_rank: Sequence[Any] | None = None
    ) -> list[Any]:
        outcomes = self.outcomes(function, *args, timeout=timeout, per_rank=per_rank)
        if any(isinstance(outcome, Err) for outcome in outcomes):
            raise WorkerFailure(f"{function.__module__}.{function.__qualname__}", outcomes)
        return [outcome.value for outcome in outcomes if isinstance(outcome, Ok)]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, timeout: float = 60, per_rank: Sequence[Any] | None = None
    ) -> list[Ok | Err]:
        given = [args] * self.world_size if per_rank is None else [(one, *args) for one in per_rank]
        shares = [given[w * self.each : (w + 1) * self.each] for w in range(self.processes)]
        case = (function.__module__, function.__qualname__, self.spill, self.fits)
        limit = timeout * self.each  # as they run in turns
        there = shared_pool(self.processes).outcomes(_run_case, *case, timeout=limit, per_rank=shares)
        found: list[Ok | Err] = []
        for outcome in there:
            found += outcome.value if isinstance(outcome, Ok) else [outcome] * self.each
        return found


def fill_the_heap() -> list[torch.Tensor]:
    """Where this process has freed memory between small blocks, larger ones would go, and stay there."""
    filling = [torch.empty(SMALL, dtype=torch.uint8)]
    while not has_its_own_pages(filling[-1].data_ptr()):
        filling.append(torch.empty(SMALL, dtype=torch.uint8))
    return filling


def _run_case(given: list[tuple[Any, ...]], module: str, name: str, spills: bool, fits: bool) -> list[Ok | Err]:
    """Run a case as virtual workers of this process."""
    function = getattr(importlib.import_module(module), name)
    before = spillable.LEAST_BYTES, workers.AT_HAND, spill.POOLED, pages.READ_PAST_CACHE
    spillable.LEAST_BYTES = SPILL_ALL
    if not fits:
        workers.AT_HAND, spill.POOLED, pages.READ_PAST_CACHE = 0.0, 2**30, 0
    set_allocator(spilled=spills)
    if spills:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LEAST_BLOCK)
    try:
        with tempfile.TemporaryDirectory() as folder:
            threads = workers.run_in_turns(
                len(given), lambda place: _pickle(function(*given[place])), Path(folder) if spills else None
            )
            assert not os.listdir(folder)
    finally:
        set_allocator()
        spillable.LEAST_BYTES, workers.AT_HAND, spill.POOLED, pages.READ_PAST_CACHE = before
    return [
        _failed(threads.failures[place]) if place in threads.failures else Ok(pickle.loads(result))
        for place, result in enumerate(threads.results)
    ]


def _failed(error: BaseException) -> Err:
    text = "".join(traceback.format_exception(error))
    return Err(type(error).__name__, str(error), text, tuple(base.__name__ for base in type(error).__mro__))
