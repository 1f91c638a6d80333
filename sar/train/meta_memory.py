"""Counts the bytes of tensors on torch's device "meta" while they live, and answers what code asks of their values.

[Note: sums of gradients]
Where a tensor is read twice, autograd adds the second gradient to the first in place if nobody else holds that. While a
dispatch mode is active it does not, which would count one tensor too much at the peak; so `MetaMemory` does it instead.
Among virtual workers a mode is always active, so there it does not.
"""

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from sar.comm.buffers import BufferPool
from sar.errors import ConfigError

_aten = torch.ops.aten
_TORCH_FRAMES = ("inner", "_fn")
_OWN_HOLDERS = 2  # the tensor, and the object that asks


class MetaMemory(TorchDispatchMode):
    """While active, counts the bytes of all tensors on "meta" that operations make, as long as they live.

    Where code asks whether values have a property, such as "does any node have no in-edge?", the answer is no, and
    yes if it asks whether all have it. What is copied to the CPU is 1.

    Args:
        sums_in_place: whether autograd does, where the model is run; see the note.

    live: bytes now.
    peak: the most since `restart`.
    peak_buffers: of which in buffers, as `counted_as_buffers` marks them.
    """

    def __init__(self, *, sums_in_place: bool = True) -> None:
        super().__init__()
        self.live = 0
        self.buffers = 0
        self.peak = 0
        self.peak_buffers = 0
        self._sums_in_place = sums_in_place
        self._known: dict[int, tuple[int, int]] = {}  # bytes of each storage, and those of them that count
        self._in_buffers = False

    def restart(self) -> None:
        """Forget the peak."""
        self.peak, self.peak_buffers = self.live, self.buffers

    @contextmanager
    def counted_as_buffers(self) -> Iterator[None]:
        """Count what is made inside as buffers too."""
        before, self._in_buffers = self._in_buffers, True
        try:
            yield
        finally:
            self._in_buffers = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        of_meta = bool(args) and isinstance(args[0], Tensor) and args[0].device.type == "meta"
        if of_meta and func is _aten._local_scalar_dense.default:
            return _scalar(args[0])
        if of_meta and func is _aten.all.default:
            return torch.ones((), dtype=torch.bool)
        if of_meta and func is _aten._to_copy.default and torch.device(kwargs.get("device") or "meta").type != "meta":
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if self._sums_in_place and func is _aten.add.Tensor and _accumulates(args[0], args[1]):
            return args[0]
        made = func(*args, **kwargs)
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.device.type == "meta":
                self.count(tensor.untyped_storage())
        return made

    def count(self, storage: torch.UntypedStorage, counted: int | None = None) -> None:
        """Count a storage that may be new, or have another size than when it was last counted.

        Args:
            storage: which one.
            counted: bytes of it that count. Default: all of one that is new or has another size, else as before.
        """
        key, size = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is None:
            if size == 0:
                return
            of_buffers = size if self._in_buffers else 0
            self.buffers += of_buffers
            weakref.finalize(storage, self._forget, key, of_buffers)
            known = 0, 0
        if counted is None:
            counted = known[1] if known[0] == size else size
        self.live += counted - known[1]
        self._known[key] = size, counted
        if self.live > self.peak:
            self.restart()

    def _forget(self, key: int, of_buffers: int) -> None:
        self.live -= self._known.pop(key)[1]
        self.buffers -= of_buffers


class CountedPool(BufferPool):
    """Message buffers on "meta", counted as such."""

    def __init__(self, memory: MetaMemory) -> None:
        super().__init__(torch.device("meta"))
        self._memory = memory

    def take(self, size: int) -> Tensor:
        """A buffer of at least `size` bytes; it does not leave memory with a turn."""
        with _disable_current_modes():
            buffer = super().take(size)
        with self._memory.counted_as_buffers():
            self._memory.count(buffer.untyped_storage())
        return buffer


def _accumulates(total: Any, grad: Any) -> bool:
    """Whether autograd itself adds a gradient to another that nobody else holds: see [Note: sums of gradients]."""
    frame = sys._getframe(2)  # who called __torch_dispatch__: what runs the backward, but for frames of torch's own
    while frame.f_back is not None and frame.f_code.co_name in _TORCH_FRAMES:
        frame = frame.f_back
    if frame.f_code.co_name != "_engine_run_backward" or total.shape != grad.shape:
        return False
    holders = torch._C._storage_Use_Count(total.untyped_storage()._cdata)
    return bool(holders <= _OWN_HOLDERS)


def _scalar(value: Tensor) -> bool:
    if value.dtype != torch.bool:
        raise ConfigError(
            "the model reads the number that is in a tensor, but a plan has sizes and no values. Compute it on the "
            "device, or give the model a constant while it is planned."
        )
    return False
