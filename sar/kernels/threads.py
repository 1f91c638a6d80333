"""A pool of threads for kernels that release the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

SERIAL_WORK = 1 << 16  # elements below which handing work to another thread costs more than it saves

_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def run_balanced(
    kernel: Callable[..., None],
    indptr: NDArray[Any],
    width: int,
    *args: object,
    private: Callable[[], Sequence[object]] = tuple,
) -> None:
    """Call kernel(begin, end, *args) on ranges of groups with about equal numbers of edges, one per torch thread.

    Args:
        kernel: a function that releases the GIL and does not write to other ranges' results.
        indptr: (groups + 1,) edges of group i are indptr[i]:indptr[i + 1].
        width: elements per edge, to judge whether threads pay.
        private: called for every thread; makes further arguments that are its own.
    """
    groups, edges = len(indptr) - 1, int(indptr[-1])
    count = _count_threads(groups, edges * width)
    inner = np.searchsorted(indptr, np.arange(1, count) * edges // count).tolist() if count > 1 else []
    _run([0, *inner, groups], kernel, args, private)


def run_rows(
    kernel: Callable[..., None], rows: int, width: int, *args: object, private: Callable[[], Sequence[object]] = tuple
) -> None:
    """As `run_balanced`, on ranges of `rows` of equal length; `width` elements a row."""
    count = _count_threads(rows, rows * width)
    _run([i * rows // count for i in range(count + 1)], kernel, args, private)


def run_fixed(kernel: Callable[..., None], cuts: Sequence[int], private: Sequence[object], *args: object) -> None:
    """Call kernel(begin, end, own, *args) between all neighbouring cuts, whatever the number of threads.

    private: `own` of each thread; their number is that of the threads.
    """
    slices, count = list(pairwise(cuts)), len(private)

    def run(thread: int, _: int) -> None:
        for begin, end in slices[thread::count]:
            kernel(begin, end, private[thread], *args)

    _run(list(range(min(count, len(slices)) + 1)), run, (), tuple)


def _count_threads(most: int, work: int) -> int:
    return max(min(torch.get_num_threads(), most), 1) if work > SERIAL_WORK else 1


def _run(
    cuts: list[int], kernel: Callable[..., None], args: tuple[object, ...], private: Callable[[], Sequence[object]]
) -> None:
    """Call kernel(begin, end, ...) between all neighbouring cuts; the calling thread takes the first range."""
    global _pool, _pool_size
    others, first = len(cuts) - 2, private()
    if others > 0 and (_pool is None or _pool_size < others):
        _pool, _pool_size = ThreadPoolExecutor(others, thread_name_prefix="sar-kernel"), others
    ranges = pairwise(cuts[1:])
    running = [_pool.submit(kernel, begin, end, *args, *private()) for begin, end in ranges] if _pool else []
    kernel(cuts[0], cuts[1], *args, *first)
    for each in running:
        each.result()


def _forget_pool() -> None:
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget_pool)  # threads do not survive a fork
