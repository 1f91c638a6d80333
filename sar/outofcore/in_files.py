"""Tensors of virtual workers that lie in the spill file from the first, and so are never in memory as a whole.

[Note: tensors in files]
What a worker reads of its partition's files, such as features, goes slice by slice to a slot of its spill file, and is
mapped from there: the system keeps as much of it in memory as there is room for. The partition's own files could not be
mapped: an array of DGL's begins right after its name, wherever that ends, and code for numbers needs aligned addresses.

The structure of graphs settles there, too: it stays as it is, and small pieces of it, such as the edges between each
two of p partitions, share a slot.

Such a tensor is published, and kept for later, as it is: nothing is written or copied, and it is frozen
([Note: memory of the file]): what it becomes goes to another slot, while others read on what was published.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from sar.outofcore.spill import Mapping, Published, Slot, SpillFile

ROOM_BYTES: Final = 2**18
ALIGNED: Final = 64


class _Own(Mapping):
    """What a tensor in the file has for its memory, from byte `begin` of a slot on."""

    def __init__(self, slot: Slot, begin: int = 0) -> None:
        super().__init__(slot)
        self.begin = begin


class TensorsInFiles:
    """Those of one virtual worker, whose dispatch mode does not see what is done here: see [Note: tensors in files]."""

    def __init__(self, file: SpillFile) -> None:
        self._file = file
        self._room = torch.empty(0, dtype=torch.uint8)  # of the slot that small tensors share, what is left
        self._known: WeakValueDictionary[int, _Own] = WeakValueDictionary()  # by address; they live with the tensors

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor, contents undefined."""
        return self._tensor(_Own(self._file.slot(prod(shape) * dtype.itemsize)), shape, dtype)

    def settled(self, tensor: Tensor) -> Tensor:
        """A tensor with what this one has; small ones share a slot."""
        nbytes = tensor.nbytes
        if not nbytes or _address(tensor) in self._known:
            return tensor
        if nbytes > ROOM_BYTES // 4:
            place = self.empty(tensor.shape, tensor.dtype)
        else:
            place = tensor.new_empty(0)
            if nbytes > len(self._room):
                self._room = self.empty((ROOM_BYTES,), torch.uint8)
            begin = int(self._room.storage_offset()) // tensor.itemsize
            place.set_(self._room.untyped_storage(), begin, tensor.shape)  # type: ignore[call-overload]
            self._room = self._room[-(-nbytes // ALIGNED) * ALIGNED :]
        return place.copy_(tensor)

    def find(self, tensor: Tensor) -> Published | None:
        """What a tensor has now, in the file; None where it is not there."""
        if (own := self._shared(tensor)) is None:
            return None
        begin = own.begin + int(tensor.storage_offset()) * tensor.itemsize
        return Published(own.slot.mapped(tensor.shape, tensor.dtype, begin), own.slot, begin)

    def opened(self, tensor: Tensor) -> Published:
        """A tensor itself, for others to visit rows of; in the file where it is there."""
        if (own := self._known.get(_address(tensor))) is None:
            return Published(tensor)
        own.visit_rows()
        return Published(tensor, own.slot, own.begin + int(tensor.storage_offset()) * tensor.itemsize)

    def copied(self, tensor: Tensor) -> Tensor | None:
        """What a tensor has now as one of its own, in the same slot; None as `find`."""
        if (own := self._shared(tensor)) is None:
            return None
        begin = own.begin + int(tensor.storage_offset()) * tensor.itemsize
        copy = _Own(own.slot, begin)
        copy.freeze()
        return self._tensor(copy, tensor.shape, tensor.dtype)

    def renew(self) -> None:
        """Put what has changed since others may read it in the file again."""
        for own in self:
            own.renew()

    def __iter__(self) -> Iterator[Mapping]:
        return iter(list(self._known.values()))

    def _tensor(self, own: _Own, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self._known[own.address + own.begin] = own
        return own.tensor(shape, dtype, own.begin)

    def _shared(self, tensor: Tensor) -> _Own | None:
        own = self._known.get(_address(tensor)) if tensor.is_contiguous() else None
        if own is not None:
            own.freeze()
        return own


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
