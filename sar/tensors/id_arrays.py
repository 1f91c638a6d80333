"""Operations on long lists of IDs as arrays, in pieces, to keep temporaries small, and without torch."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

PIECE = 2**14
"""IDs in a piece: 128 KB as int64, which fits in the processor's cache and is allocated from a heap."""


def pieces(count: int, size: int = PIECE) -> Iterator[slice]:
    """Cut `count` rows into slices of `size`, the last one shorter."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def first_of_equals(ascending: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each of the ascending IDs differs from its predecessor, (n,)."""
    first = np.ones(len(ascending), np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=first[1:])
    return first


def is_permutation(ids: NDArray[Any], start: int, end: int) -> bool:
    """Whether IDs, (n,), are a permutation of `start` to `end` - 1."""
    if len(ids) != end - start:
        return False
    if (ids[1:] > ids[:-1]).all():
        return not len(ids) or (int(ids[0]), int(ids[-1])) == (start, end - 1)
    if not ((ids >= start) & (ids < end)).all():
        return False
    seen = np.zeros(end - start, np.bool_)
    seen[ids - start] = True
    return bool(seen.all())
