"""Whether IDs that come in pieces are 0, 1, ... each once, in one bit for each."""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sar.id_slices import first_of_equals

_CHUNK = 2**18


class Once:
    """Numbers seen so far.

    count: of the numbers expected, 0 to count - 1.
    found: how many of these have been seen.
    repeated, outside: how many came again, and how many are none of these.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.outside = self.repeated = self.found = 0

    @cached_property
    def _seen(self) -> NDArray[np.uint8]:
        return np.zeros(-(-self.count // 8), np.uint8)

    @property
    def is_permutation(self) -> bool:
        """Whether what has been seen is 0 to count - 1, each once."""
        return self.found == self.count and not self.repeated and not self.outside

    def add(self, ids: NDArray[np.int64]) -> None:
        """See more numbers, (n,)."""
        for start in range(0, len(ids), _CHUNK):
            piece = np.sort(ids[start : start + _CHUNK])
            inside = piece[(piece >= 0) & (piece < self.count)]
            self.outside += len(piece) - len(inside)
            new = inside[first_of_equals(inside)]
            new = new[(self._seen[new >> 3] >> (new & 7).astype(np.uint8)) & 1 == 0]
            self.repeated += len(inside) - len(new)
            self.found += len(new)
            places = new >> 3
            firsts = first_of_equals(places).nonzero()[0]
            if len(firsts):
                bits = np.left_shift(1, new & 7).astype(np.uint8)
                self._seen[places[firsts]] |= np.bitwise_or.reduceat(bits, firsts)
