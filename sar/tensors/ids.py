"""Work on long lists of IDs in pieces, so that temporaries stay small beside the lists."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PIECE = 2**14
"""IDs in a piece: 128 KB as int64, so that the processor's cache holds it, and the allocator takes it from a heap."""


def pieces(count: int, size: int = PIECE) -> Iterator[slice]:
    """Cut `count` rows into slices of `size`, the last one shorter."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def to_offsets(counts: Tensor) -> Tensor:
    """(n + 1,) int64: 0 and the cumulative sums of `counts`."""
    offsets = torch.zeros(len(counts) + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=offsets[1:])
    return offsets


def less_first(ids: Tensor, first: int) -> Tensor:
    """`ids - first` as int32, (E,)."""
    # Both are taken modulo 2**32, so that no copy in int64 is needed.
    return ids.to(torch.int32, copy=True).sub_((first + 2**31) % 2**32 - 2**31)


def number_distinct(ids: Tensor, bound: int) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct IDs, ascending, how often each is there, and the position of each given one among them; int32.

    If they are many, by counting them, which is faster than sorting; `bound` is one more than the greatest.
    """
    if len(ids) < bound // 2:
        distinct, places, counts = ids.unique(return_inverse=True, return_counts=True)
    else:
        counts = ids.bincount(minlength=bound)
        distinct = counts.nonzero().squeeze(1)
        places = ((counts > 0).cumsum(0, dtype=torch.int32) - 1).index_select(0, ids)
        counts = counts[distinct]
    return distinct.to(torch.int32), counts.to(torch.int32), places.to(torch.int32)


def first_of_equals(ascending: NDArray[Any]) -> NDArray[np.bool_]:
    """Which of ascending IDs differ from the one before, (n,)."""
    first = np.ones(len(ascending), np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=first[1:])
    return first


def distinct(ids: Tensor) -> Tensor:
    """As `ids.unique()` on the CPU, several times faster: NumPy sorts with vector instructions."""
    ascending = np.sort(ids.numpy())
    return torch.from_numpy(ascending[first_of_equals(ascending)])


def is_permutation(ids: Tensor, start: int, end: int) -> bool:
    """Whether IDs, (n,), are `start` to `end` - 1, each once."""
    if len(ids) != end - start:
        return False
    if bool((ids[1:] > ids[:-1]).all()):
        return not len(ids) or (int(ids[0]), int(ids[-1])) == (start, end - 1)
    if not bool(((ids >= start) & (ids < end)).all()):
        return False
    return bool(torch.zeros(end - start, dtype=torch.bool, device="cpu").index_fill_(0, ids - start, True).all())


def find_sorted(known: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The positions of numbers among ascending ones, (N,), and whether they are there; else any position."""
    place = torch.searchsorted(known, wanted)
    if not len(known):
        return place, torch.zeros_like(place, dtype=torch.bool)
    place.clamp_(max=len(known) - 1)
    return place, known[place] == wanted


def is_sorted(keys: Tensor, ties: Tensor | None) -> bool:
    """Whether `keys` ascend, and among equal ones `ties`."""
    if ties is None:
        return bool((keys[1:] >= keys[:-1]).all())
    after = keys[1:] > keys[:-1]
    return bool(after.logical_or_((keys[1:] == keys[:-1]).logical_and_(ties[1:] >= ties[:-1])).all())
