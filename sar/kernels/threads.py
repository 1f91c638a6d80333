"""Kernels on several threads: those of torch's own OpenMP pool.

A pool of our own would meet threads of OpenMP that spin on the same cores, after each of torch's operations, in the
hope of another one.
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
    kernel: Callable[..., None], indptr: NDArray[Any], width: int, *args: object,
    private: Callable[[], Sequence[object]] | None = None,
) -> None:  # fmt: skip
    """Call kernel(begin, end, *args) on ranges of groups with about equal numbers of edges, on torch's threads.

    Args:
        kernel: a function that releases the GIL and does not write to other ranges' results.
        indptr: (groups + 1,) edges of group i are indptr[i]:indptr[i + 1].
        width: elements per edge, to judge whether threads pay.
        private: called for every range; makes further arguments that are its own. There is then a range per thread.
    """
    groups, edges = len(indptr) - 1, int(indptr[-1])
    count = _count_ranges(groups, edges * width, private is None)
    ends = (np.arange(1, count) * edges // count).astype(indptr.dtype)  # else numpy would convert all of indptr
    inner = np.searchsorted(indptr, ends).tolist() if count > 1 else []
    _run(kernel, [0, *inner, groups], args, private)


def run_rows(
    kernel: Callable[..., None], rows: int, width: int, *args: object,
    private: Callable[[], Sequence[object]] | None = None,
) -> None:  # fmt: skip
    """As `run_balanced`, on ranges of `rows` of equal length; `width` elements a row."""
    count = _count_ranges(rows, rows * width, private is None)
    _run(kernel, [i * rows // count for i in range(count + 1)], args, private)


def run_fixed(kernel: Callable[..., None], cuts: Sequence[int], private: Sequence[object], *args: object) -> None:
    """Call kernel(begin, end, own, *args) between all neighbouring cuts, whatever the number of threads.

    private: `own` of each thread; their number is that of the threads.
    """
    slices, count = list(pairwise(cuts)), len(private)

    def run(thread: int, _: int) -> None:
        for begin, end in slices[thread::count]:
            kernel(begin, end, private[thread], *args)

    _run(run, range(min(count, len(slices)) + 1), (), None)


def _count_ranges(most: int, work: int, several: bool) -> int:
    """How many ranges to take; with `several` for each thread, none waits long for one that was interrupted."""
    threads = torch.get_num_threads()
    if threads == 1 or work <= SERIAL_WORK:
        return 1
    count = max(threads, min(4 * threads, work // WORK_AT_ONCE)) if several else threads
    return max(min(count, most), 1)


def _run(
    kernel: Callable[..., None],
    cuts: Sequence[int],
    args: tuple[object, ...],
    private: Callable[[], Sequence[object]] | None,
) -> None:
    """Call kernel(begin, end, ...) between all neighbouring cuts. Threads take the next range when they are free."""
    own = [()] * (len(cuts) - 1) if private is None else [private() for _ in cuts[1:]]
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
