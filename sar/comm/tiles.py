"""Tiles, the unit of exchange and of computation, and the gradients that return for them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from sar.comm.halo_plan import HaloSlice


class Tile(NamedTuple):
    """Rows of another worker on which the edges that read them can now be computed."""

    halo: HaloSlice | None  # position in the sender's halo list; None for this worker's own rows
    rows: list[Tensor] | None  # the fetched fields, (tile rows, ...) each; None in an exchange that fetches nothing
    # Sums of the rows' gradients, `GradientReturn.start` at first; None in an exchange that returns nothing.
    grads: list[Tensor] | None
    # If `rows` and `grads` have a row for each node of the sender: indices of the tile's rows, (tile rows,) ascending.
    sources: Tensor | None = None


OWN_ROWS = Tile(None, None, None)
"""Stands for a tile to compute the edges that read this worker's own rows."""


class LocalFields(NamedTuple):
    """Further fields for readers in the same process; remote readers compute them from the fields that travel."""

    fields: Sequence[Tensor] = ()  # fields of this worker, (N_src, ...) each
    totals: Sequence[Tensor] = ()  # totals of their gradients; see `GradientReturn`


class GradientReturn(NamedTuple):
    """Accumulates the gradients that other workers send for this worker's rows."""

    totals: Sequence[Tensor]  # (N_src, ...) each, from `empty_spillable`: workers of one process add to each other's
    # Called with indices of this worker's rows, (n,), one reader's gradients for them, (n, ...), and the total.
    add: Callable[[Tensor, Tensor, Tensor], object]
    start: float = 0.0  # the neutral element of `add`
