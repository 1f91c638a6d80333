"""Tensors of virtual workers that lie in the spill file from the first, and so are never in memory as a whole.

[Note: tensors in files]
What a worker reads of its partition's files, such as features, goes slice by slice to a slot of its spill file, and is
mapped from there: the system keeps as much of it in memory as there is room for. The partition's own files could not be
mapped: an array of DGL's begins right after its name, wherever that ends, and code for numbers needs aligned addresses.

The structure of graphs settles there, too: it stays as it is, and small pieces of it, such as the edges between each
two of p partitions, share a slot.

Such a tensor is published, and kept for later, as it is: nothing is written or copied. The first change after that goes
to another slot, mapped in place of this one at the same address, while others read on what was published. Who has got
the address itself, as numpy does, may change it unseen: from then on, what is published is a copy.
"""

from collections.abc import Sequence
from math import prod
from typing import Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sar.comm.virtual.spill import Mapping, Published, SpillFile

ROOM_BYTES: Final = 2**18
ALIGNED: Final = 64


class _Own(Mapping):
    """What a tensor in the file has for its memory.

    shared: whether others may read the slot.
    """

    shared = False


class TensorsInFiles:
    """Those of one virtual worker: see [Note: tensors in files]."""

    def __init__(self, file: SpillFile) -> None:
        self._file = file
        self._room = torch.empty(0, dtype=torch.uint8)  # of the slot that small tensors share, what is left
        self._known: WeakValueDictionary[int, _Own] = WeakValueDictionary()  # by address; they live with the tensors

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor, contents undefined."""
        own = _Own(self._file.slot(prod(shape) * dtype.itemsize))
        self._known[own.address] = own
        with _disable_current_modes():
            return own.tensor(shape, dtype)

    def settled(self, tensor: Tensor) -> Tensor:
        """A tensor with what this one has; small ones share a slot."""
        nbytes = tensor.nbytes
        if not nbytes or tensor.untyped_storage().data_ptr() in self._known:
            return tensor
        if nbytes > len(self._room):
            self._room = self.empty((max(nbytes, ROOM_BYTES),), torch.uint8)
        with _disable_current_modes():
            begin = int(self._room.storage_offset())
            place: Tensor = tensor.new_empty(0)
            place.set_(self._room.untyped_storage(), begin // tensor.itemsize, tensor.shape)  # type: ignore[call-overload]
            self._room = self._room[-(-nbytes // ALIGNED) * ALIGNED :]
            return place.copy_(tensor)

    def find(self, tensor: Tensor) -> Published | None:
        """What a tensor has now, in the file; None where it is not there."""
        own = self._known.get(tensor.untyped_storage().data_ptr())
        if own is None or not tensor.is_contiguous():
            return None
        own.shared = True
        begin = int(tensor.storage_offset()) * tensor.itemsize
        return Published(own.slot.mapped(tensor.shape, tensor.dtype, begin), own.slot, begin)

    def written(self, tensor: Tensor) -> None:
        """Note that a tensor is about to change."""
        own = self._known.get(tensor.untyped_storage().data_ptr())
        if own is not None and own.shared:
            slot = self._file.slot(own.slot.nbytes)
            slot.write(own.address)
            own.show(slot)
            own.shared = False

    def exposed(self, tensor: Tensor) -> None:
        """Note that a tensor may change unseen from now on."""
        self.written(tensor)
        self._known.pop(tensor.untyped_storage().data_ptr(), None)
