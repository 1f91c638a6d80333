"""Which tensors of a virtual worker are in memory: they leave with its turn, and are read from the file from then on.

[Note: leaving memory]
A dispatch mode in each worker's thread sees the results of torch's operations there, and so knows, by weak reference,
every storage of `LEAST_BYTES` and more. When the turn passes, those that are new go to the spill file, whose pages take
the place of theirs ([Note: memory of the file]). Tensors notice nothing of it: neither their addresses change nor what
is there, whoever reads it or writes to it. So what knows nothing of virtual workers needs not know: autograd and what
it saves, other threads, C++ extensions, numpy, `torch.save`, `copy.deepcopy`. What the mode does not see stays in
memory, which costs that and nothing else; so does what the allocator has not given pages of its own.

The first operation of a turn that uses a storage has the system read all of it at once.
"""

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sar import raw_memory
from sar.comm.allocator import give_back_scratch
from sar.outofcore.in_files import TensorsInFiles
from sar.outofcore.spill import Pages, Published, SpillFile, has_its_own_pages

LEAST_BYTES = 2**13
"""Of a storage that leaves memory. There are p x p blocks of edges, of which all that is smaller stays."""
FIRST_PURGE = 4096
"""Storages known before those that are gone are looked for."""

_here = threading.local()
_all: Final[weakref.WeakSet["Residency"]] = weakref.WeakSet()


class _Entry:
    """A storage, by weak reference.

    pages: where it is in the file, once it has left.
    away: whether nobody has used it since.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.nbytes = storage.nbytes()
        self.pages: Pages | None = None
        self.away = False
        self._weak = StorageWeakRef(storage)  # which keeps its key from being given to another one

    def storage(self) -> torch.UntypedStorage | None:
        """None where nobody has it any more."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        return found


class Residency(TorchDispatchMode):
    """What a virtual worker has in memory: see [Note: leaving memory]; a context of its thread.

    Args:
        file: the worker's own.

    Attributes:
        device: the type of that on which the tensors are.
        left: bytes that were out of memory when the turn last passed.
    """

    device = "cpu"

    def __init__(self, file: SpillFile) -> None:
        super().__init__()
        self.file = file
        self.in_files = TensorsInFiles(file)
        self.left = 0
        self._entries: dict[int, _Entry] = {}  # by what tells storages apart, `_cdata`
        self._purge_at = FIRST_PURGE
        _all.add(self)

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Look after this thread's tensors inside."""
        _here.residency, raw_memory.here.settle = self, self._settle
        try:
            with self:
                yield
        finally:
            _leave_thread()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch asks whether to keep its compiler away, for which it would import that; nothing is compiled here."""
        return False

    # -- seeing what operations use

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {self._use(tensor) for tensor in _tensors((*args, *kwargs.values()) if kwargs else args)}
        result = func(*args, **kwargs)
        if args and isinstance(args[0], list) and func._schema.is_mutable:
            # Operations on lists of tensors leave that to others that they consist of, which do not do it under a mode.
            increment_version([tensor for tensor in args[0] if not tensor.is_inference()])
        for tensor in _tensors(result):
            self._make(tensor, given)
        return result

    def _use(self, tensor: Tensor) -> int:
        """Have a tensor at hand that an operation uses; return what tells its storage from others."""
        if tensor.device.type != self.device or tensor.layout is not torch.strided:
            return 0
        key: int = tensor.untyped_storage()._cdata
        entry = self._entries.get(key)
        if entry is not None and entry.away and entry.pages is not None:
            entry.pages.populate()
            entry.away = False
        return key

    def _make(self, tensor: Tensor, given: set[int]) -> None:
        """Know the storage of an operation's result from now on, unless it is that of what was given.

        So what other workers have made, such as the sum of an `all_reduce`, is nobody's, and stays.
        """
        if tensor.device.type != self.device or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if nbytes >= max(LEAST_BYTES, 1) and key not in given and key not in self._entries and storage.resizable():
            self._entries[key] = _Entry(storage)
            if len(self._entries) > self._purge_at:
                self._entries = {key: one for key, one in self._entries.items() if one.storage() is not None}
                self._purge_at = max(2 * len(self._entries), FIRST_PURGE)

    # -- leaving

    def leave(self) -> None:
        """Take all tensors out of memory."""
        self.left = 0
        for key, entry in list(self._entries.items()):
            storage = entry.storage()
            if storage is None:
                del self._entries[key]
            elif self._puts_away(entry, storage):
                entry.away = True
                self.left += entry.nbytes
        self.in_files.renew()
        give_back_scratch()

    def _puts_away(self, entry: _Entry, storage: torch.UntypedStorage) -> bool:
        """Have the file's pages in place of a storage's, with what is there now, if that is possible."""
        address, pages = storage.data_ptr(), entry.pages
        if pages is not None and (pages.address, entry.nbytes) == (address, storage.nbytes()):
            pages.renew()
            return True
        entry.nbytes, entry.pages = storage.nbytes(), self._pages_for(storage)
        if entry.pages is not None:
            entry.pages.move()
        return entry.pages is not None

    def _pages_for(self, storage: torch.UntypedStorage) -> Pages | None:
        if not storage.nbytes() or storage.is_shared() or not has_its_own_pages(storage.data_ptr()):
            return None
        return Pages(storage.data_ptr(), self.file.slot(storage.nbytes()))

    def before_fork(self) -> None:
        """Leave this process and its child each what is there now."""
        self.file.keep()
        mine = [entry.pages for entry in self._entries.values() if entry.pages and entry.storage() is not None]
        for pages in (*mine, *self.in_files):
            pages.freeze()

    def _settle(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != self.device:
            return tensor
        with _disable_current_modes():
            return self.in_files.settled(tensor)

    # -- what other workers read

    def publish(self, tensor: Tensor) -> Published:
        """Rows for other workers to read; contents as they are now."""
        with _disable_current_modes():
            tensor = tensor.detach()
            if tensor.nbytes < max(LEAST_BYTES, 1):
                return Published(tensor.clone(memory_format=torch.contiguous_format))
            if (found := self.in_files.find(tensor)) is not None:
                return found
            storage = tensor.untyped_storage()
            entry = self._entries.get(storage._cdata)
            if (
                entry is not None
                and storage.nbytes() == tensor.nbytes
                and tensor.is_contiguous()
                and self._puts_away(entry, storage)
            ):
                assert entry.pages is not None
                entry.pages.freeze()
                slot = entry.pages.slot
            else:
                tensor = tensor.contiguous()
                slot = self.file.slot(tensor.nbytes)
                slot.write(tensor.data_ptr())
            return Published(slot.mapped(tuple(tensor.shape), tensor.dtype), slot)

    def open_to_others(self, total: Tensor) -> Published:
        """Let other workers add to a tensor, which therefore has to stay where it is."""
        assert total.untyped_storage()._cdata not in self._entries, "a total that is not made by `roomy`"
        return self.in_files.opened(total)


def _before_fork() -> None:
    for residency in _all:
        residency.before_fork()


def _in_child() -> None:
    """The files are the parent's."""
    _all.clear()
    _leave_thread()


def _leave_thread() -> None:
    vars(_here).clear()
    vars(raw_memory.here).clear()


os.register_at_fork(before=_before_fork, after_in_child=_in_child)


def spills(device: torch.device) -> bool:
    """Whether this worker's tensors on a device wait in a file for its turns."""
    residency: Residency | None = getattr(_here, "residency", None)
    return residency is not None and device.type == residency.device


def roomy(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu", *, zeros: bool = False
) -> Tensor:
    """A tensor, undefined or zeros; in a file where memory is left to it: see [Note: tensors in files]."""
    residency: Residency | None = getattr(_here, "residency", None)
    small = prod(shape) * dtype.itemsize < max(LEAST_BYTES, 1)
    if residency is None or small or not spills(torch.device(device)):
        return (torch.zeros if zeros else torch.empty)(shape, dtype=dtype, device=device)
    with _disable_current_modes():
        place = residency.in_files.empty(shape, dtype)
        return place.zero_() if zeros else place


def copied(tensor: Tensor) -> Tensor:
    """What a tensor has now, for whatever becomes of it; without memory of its own where it is in a file."""
    residency: Residency | None = getattr(_here, "residency", None)
    with _disable_current_modes():
        found = residency.in_files.copied(tensor.detach()) if residency is not None else None
    return tensor.clone() if found is None else found


def _tensors(given: Any) -> Sequence[Tensor]:
    """All tensors among the arguments or results of an operation; of a sparse one those that it is made of."""
    if isinstance(given, Tensor):
        return (given._indices(), given._values()) if given.layout is torch.sparse_coo else (given,)
    if isinstance(given, list | tuple):
        return [tensor for one in given if isinstance(one, Tensor | list | tuple) for tensor in _tensors(one)]
    return ()
