"""Operations on lists of IDs as tensors."""

import torch
from torch import Tensor


def to_offsets(counts: Tensor) -> Tensor:
    """(n + 1,) int64: 0 and the cumulative sums of `counts`."""
    offsets = torch.zeros(len(counts) + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=offsets[1:])
    return offsets


def less_first(ids: Tensor, first: int) -> Tensor:
    """`ids - first` as int32, (E,)."""
    # Both are taken modulo 2**32, which avoids a copy in int64.
    return ids.to(torch.int32, copy=True).sub_((first + 2**31) % 2**32 - 2**31)


def number_distinct(ids: Tensor, bound: int) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct IDs, ascending, the count of each, and the position of each input ID among them; int32.

    Many IDs are counted instead of sorted, which is faster; `bound` is one more than the greatest ID.
    """
    if len(ids) < bound // 2:
        distinct, places, counts = ids.unique(return_inverse=True, return_counts=True)
    else:
        counts = ids.bincount(minlength=bound)
        distinct = counts.nonzero().squeeze(1)
        places = ((counts > 0).cumsum(0, dtype=torch.int32) - 1).index_select(0, ids)
        counts = counts[distinct]
    return distinct.to(torch.int32), counts.to(torch.int32), places.to(torch.int32)


def find_sorted(known: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The positions of numbers in an ascending list, (N,), and whether they are in it; otherwise any position."""
    place = torch.searchsorted(known, wanted)
    if not len(known):
        return place, torch.zeros_like(place, dtype=torch.bool)
    place.clamp_(max=len(known) - 1)
    return place, known[place] == wanted


def is_sorted(keys: Tensor, ties: Tensor | None) -> bool:
    """Whether `keys` ascend, and `ties` ascend among equal keys."""
    if ties is None:
        return bool((keys[1:] >= keys[:-1]).all())
    after = keys[1:] > keys[:-1]
    return bool(after.logical_or_((keys[1:] == keys[:-1]).logical_and_(ties[1:] >= ties[:-1])).all())
