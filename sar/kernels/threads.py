"""Kernels on several threads: those of torch's own OpenMP pool.

A separate pool would compete for the cores with OpenMP's threads, which keep spinning after each of torch's
operations.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

SERIAL_WORK = 1 << 16  # elements below which handing work to another thread costs more than it saves
WORK_AT_ONCE = 1 << 20  # elements of a range, if threads take several ranges each

_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_is_forked = False


def run_balanced(
    kernel: Callable[..., None], over: int | NDArray[Any], width: int, *args: object,
    total: NDArray[Any] | None = None, private: Callable[[], Sequence[object]] = tuple,
) -> None:  # fmt: skip
    """Call kernel(begin, end, *args) on ranges of rows, or of groups with about equal numbers of edges.

    Args:
        kernel: a function that releases the GIL and does not write to other ranges' results.
        over: the number of rows; or (groups + 1,), where group i has the edges over[i]:over[i + 1].
        width: elements per row or edge, to judge whether threads pay.
        total: a result that the kernel adds to, after `args`. Ranges after the first get zeros, which are then added.
        private: called for each range; returns arguments only for this range. With these or a total there is a
            range per thread; otherwise there are several, so that no thread waits long for an interrupted one.
    """
    rows, work = (over, over) if isinstance(over, int) else (len(over) - 1, int(over[-1]))
    threads = torch.get_num_threads()
    if threads == 1 or work * width <= SERIAL_WORK:
        kernel(0, rows, *args, *(() if total is None else (total,)), *private())
        return
    shared = total is None and private is tuple
    count = max(threads, min(4 * threads, work * width // WORK_AT_ONCE)) if shared else threads
    count = max(min(count, rows), 1)
    if isinstance(over, int):
        cuts = [i * rows // count for i in range(count + 1)]
    else:
        ends = (np.arange(1, count) * work // count).astype(over.dtype)  # else numpy would convert all of `over`
        cuts = [0, *np.searchsorted(over, ends).tolist(), rows]
    totals = [] if total is None else [total, *(np.zeros_like(total) for _ in cuts[2:])]
    own: list[Sequence[object]] = [[each, *private()] for each in totals] or [private() for _ in cuts[1:]]
    _run(kernel, cuts, args, own)
    for part in totals[1:]:
        totals[0] += part


def run_fixed(kernel: Callable[..., None], cuts: Sequence[int], private: Sequence[object], *args: object) -> None:
    """Call kernel(begin, end, own, *args) between all neighbouring cuts, whatever the number of threads.

    private: `own` of each thread; their number is that of the threads.
    """
    slices, count = list(pairwise(cuts)), len(private)

    def run(thread: int, _: int) -> None:
        for begin, end in slices[thread::count]:
            kernel(begin, end, private[thread], *args)

    threads = min(count, len(slices))
    _run(run, range(threads + 1), (), [()] * threads)


def _run(
    kernel: Callable[..., None],
    cuts: Sequence[int],
    args: tuple[object, ...],
    own: Sequence[Sequence[object]],
) -> None:
    """Call kernel(begin, end, *args, *own[i]) between all neighbouring cuts. Free threads take the next range."""
    ranges = iter([*zip(pairwise(cuts), own, strict=True)])  # whose `next` the GIL makes atomic
    raised: list[BaseException] = []

    def take(_: object = None) -> None:
        try:
            for (begin, end), more in ranges:
                kernel(begin, end, *args, *more)
        except BaseException as error:  # nobody hears of it in a thread of OpenMP
            raised.append(error)

    threads = min(torch.get_num_threads(), len(own))
    parallel = None if threads == 1 or _is_forked else _openmp()
    if parallel is None:
        take()
    else:
        parallel(_Body(take), None, threads, 0)
    if raised:
        raise raised[0]


@cache
def _openmp() -> Callable[..., None] | None:
    """GOMP_parallel(body, data, threads, flags) of the OpenMP that torch uses; None if it uses another interface."""
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None


def _note_fork() -> None:
    global _is_forked
    _is_forked = True


os.register_at_fork(after_in_child=_note_fork)  # OpenMP's threads do not survive a fork, and it would wait for them
