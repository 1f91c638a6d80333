"""Which tensors of a virtual worker are in memory: they leave with its turn, and come back when they are used.

[Note: leaving memory]
A dispatch mode in each worker's thread sees every torch operation there, and so knows, by weak reference, every storage
of `LEAST_BYTES` and more. When the turn passes, what has no up-to-date slot in the spill file is written, and the
storages are emptied: their tensors stay as they are, with no memory behind them. An operation that uses one brings it
back first, as pages of the file ([Note: mapping back]); what a call of sar's uses is copied where huge pages pay, as
kernels visit rows in no order, unless other workers read the same pages anyway. An operation that writes to one makes
its slot stale; slots themselves are never written again, as others may be reading what they hold.

Code that looks at memory past torch's dispatcher (DLPack, C++ extensions, `tolist`, `torch.save`) would find none. So
storages that operations outside sar's own calls have used are brought back when a call returns, and `_past_dispatcher`
restores for the rest. What only sar uses, such as the structure of graphs, comes back when it is used.

Tensors that autograd saves leave too: a hook gives autograd a handle, which has the tensor until the turn passes, and
then the slot. Torch leaves it to such hooks to notice changes in place, by the tensor's version.

A storage that numpy has a view of cannot be emptied. It stays, and is counted (`pinned`). So does one that DLPack has
handed on, such as the edges of a graph of DGL's, until that is gone: what is handed on owns a token (`lend`).
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sar import raw_memory
from sar.comm.allocator import give_back_scratch
from sar.comm.buffers import HUGE_PAGE
from sar.comm.virtual.in_files import TensorsInFiles
from sar.comm.virtual.spill import Published, Slot, SpillFile
from sar.errors import ConfigError
from sar.logging_setup import logger

LEAST_BYTES = 2**13
"""Of a storage that leaves memory. There are p x p blocks of edges, of which all that is smaller stays."""
MOST_PINNED = 0.1
"""Of a worker's tensors: there is a warning where more cannot leave."""
FIRST_PURGE = 4096
"""Storages known before those that are gone are looked for."""

_LIFT = torch.ops.aten.lift_fresh.default
"""How `torch.tensor` shows what it has made."""
_BATCH_NORM = torch.ops.aten.native_batch_norm.default
"""Writes to `running_mean` and `running_var`, its arguments 3 and 4, which its schema does not say."""

_here = threading.local()


class _Entry:
    """A storage: where it is in memory, by weak reference, and where in the file.

    out: whether it is emptied.
    lent: its memory as code outside torch has it, for as long as that has it.
    under: the slot that is mapped there ([Note: mapping back]).
    eager: whether it comes back with the turn.
    published: whether others read its slot where it lies, so that its pages are at hand.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.slot: Slot | None = None
        self.lent: weakref.WeakSet[Any] | None = None
        self.under: Slot | None = None
        self.eager = self.published = False
        self.bind(storage)

    def bind(self, storage: torch.UntypedStorage) -> None:
        self.nbytes = storage.nbytes()
        self.out = False
        self.key = storage._cdata  # nobody else's as long as there is a reference, even a weak one
        self._weak = StorageWeakRef(storage)

    def fill(self, storage: torch.UntypedStorage, copy: bool) -> None:
        """With what is in the slot: a copy, or the pages of the file where that is possible."""
        assert self.slot is not None
        if copy:
            self.slot.read(storage.data_ptr())
        else:
            self.under = self.slot if self.slot.fill(storage.data_ptr()) else None

    def storage(self) -> torch.UntypedStorage | None:
        """None where nobody has it any more."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        return found

    def stays(self, storage: torch.UntypedStorage) -> bool:
        """Whether others may have its address."""
        return not storage.resizable() or bool(self.lent)


class _Handle:
    """A tensor that autograd saved: itself, until the turn passes; then only where its bytes are."""

    def __init__(self, tensor: Tensor, entry: _Entry | None) -> None:
        self.tensor = tensor.detach()  # which has the same version
        self.entry = entry
        self.gone = False
        self.version = tensor._version
        self.form = tensor.storage_offset(), tensor.size(), tensor.stride()

    def let_go(self) -> None:
        """Forget the storage; what is left still tells the version. Others may hold the tensor that was here."""
        self.tensor = self.tensor.detach()
        self.tensor.data = self.tensor.new_empty(0)
        self.gone = True


class Residency(TorchDispatchMode):
    """What a virtual worker has in memory: see [Note: leaving memory]; a context of its thread.

    Args:
        file: the worker's own.
        rank: its global rank, for errors.

    Attributes:
        device: the type of that on which the tensors are.
        inside: whether a call of sar's runs, in which nothing comes back but what is used.
        pinned: bytes that could not leave when the turn last passed.
        left: bytes that did.
    """

    device = "cpu"

    def __init__(self, file: SpillFile, rank: int) -> None:
        super().__init__()
        self.file = file
        self.rank = rank
        self.in_files = TensorsInFiles(file)
        self.inside = False
        self.pinned = self.left = 0
        self._entries: dict[int, _Entry] = {}
        self._handles: weakref.WeakSet[_Handle] = weakref.WeakSet()
        self._purge_at = FIRST_PURGE
        self._warned = False

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Look after this thread's tensors inside."""
        _here.residency = self
        try:
            with self, saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            del _here.residency

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch asks whether to keep its compiler away, for which it would import that; nothing is compiled here."""
        return False

    # -- seeing what operations use

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given: set[int] = set()
        if func is not _LIFT:
            given = {self._use(tensor) for tensor in _tensors((*args, *kwargs.values()) if kwargs else args)}
        if func._schema.is_mutable:
            for i, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    target = args[i] if i < len(args) else kwargs.get(argument.name)
                    for tensor in _tensors(target):
                        self.written(tensor)
        elif func is _BATCH_NORM:
            for tensor in _tensors(args[3:5]):
                self.written(tensor)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self._make(tensor, given)
        return result

    def _use(self, tensor: Tensor) -> int:
        """Bring a tensor back that an operation uses; return what tells its storage from others."""
        if tensor.device.type != self.device or tensor.layout is not torch.strided:
            return 0
        storage = tensor.untyped_storage()
        entry = self._entries.get(storage._cdata)
        if entry is not None:
            if entry.out:
                self._bring_back(entry, storage)
            entry.eager |= not self.inside
        elif not storage.nbytes() and tensor.numel():
            raise ConfigError(
                f"Virtual worker {self.rank} uses a tensor of shape {tuple(tensor.shape)} that another virtual worker "
                "of this process has made, and that is out of memory now. Do not pass tensors between workers through "
                "globals or modules; use sar's collectives."
            )
        key: int = storage._cdata
        return key

    def _make(self, tensor: Tensor, given: set[int]) -> None:
        """Know the storage of an operation's result from now on, unless it is that of what was given.

        So what other workers have made, such as the sum of an `all_reduce`, is nobody's, and stays.
        """
        if tensor.device.type != self.device or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        entry, nbytes = self._entries.get(storage._cdata), storage.nbytes()
        if entry is not None and entry.out:  # seen through another one that the operation was given
            self._bring_back(entry, storage)
        elif entry is not None and entry.nbytes != nbytes:  # the operation has resized it
            entry.nbytes, entry.slot = nbytes, None
        elif entry is None and nbytes >= max(LEAST_BYTES, 1) and storage._cdata not in given and storage.resizable():
            entry = self._entries[storage._cdata] = _Entry(storage)
            entry.eager = not self.inside
            if len(self._entries) > self._purge_at:
                self._purge()

    def written(self, tensor: Tensor) -> None:
        """Note that a tensor changes."""
        entry = self._entries.get(tensor.untyped_storage()._cdata)
        if entry is not None:
            if entry.out:
                self._bring_back(entry, tensor.untyped_storage())
            entry.slot = None
        else:
            self.in_files.written(tensor)

    def _purge(self) -> None:
        self._entries = {key: entry for key, entry in self._entries.items() if entry.storage() is not None}
        self._purge_at = max(2 * len(self._entries), FIRST_PURGE)

    # -- leaving and coming back

    def leave(self) -> None:
        """Take all tensors out of memory."""
        self.pinned = self.left = 0
        for handle in list(self._handles):
            if not handle.gone and handle.entry is not None:
                if not handle.entry.out:
                    self._save(handle.entry, handle.tensor.untyped_storage())
                with _disable_current_modes():
                    handle.let_go()
        for entry in list(self._entries.values()):
            storage = entry.storage()
            if storage is None:
                del self._entries[entry.key]
            elif entry.stays(storage):
                self.pinned += entry.nbytes
            elif not entry.out:
                self._save(entry, storage)
                storage.resize_(0)
                entry.under = None
                entry.out = True
                self.left += entry.nbytes
        give_back_scratch()
        if self.pinned > MOST_PINNED * (self.pinned + self.left) and self.pinned > 2**20 and not self._warned:
            self._warned = True
            logger.warning(
                "%.1f MB of virtual worker %d's tensors cannot leave memory, because numpy has had views of them "
                "(Tensor.numpy); copy them instead",
                self.pinned / 2**20,
                self.rank,
            )

    def come_back(self) -> None:
        """Bring back what code that torch does not see might look at."""
        for entry in list(self._entries.values()):
            if entry.out and entry.eager and (storage := entry.storage()) is not None:
                self._bring_back(entry, storage)

    def ensure(self, tensor: Tensor) -> None:
        """Bring one tensor back."""
        entry = self._entries.get(tensor.untyped_storage()._cdata)
        if entry is not None and entry.out:
            self._bring_back(entry, tensor.untyped_storage())

    def lend(self, tensor: Tensor) -> Tensor:
        """A tensor of the same memory for code outside torch; that stays where it is until the code lets go of it."""
        entry = self._entries.get(tensor.untyped_storage()._cdata)
        if entry is None or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
            return tensor
        with _disable_current_modes():
            memory = raw_memory.as_array(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()))
            entry.lent = entry.lent or weakref.WeakSet()
            entry.lent.add(memory.base)
            storage = torch.from_numpy(memory).untyped_storage()
            return torch.empty(0, dtype=tensor.dtype).set_(
                storage, tensor.storage_offset(), tensor.size(), tensor.stride()
            )

    def _save(self, entry: _Entry, storage: torch.UntypedStorage) -> Slot:
        if entry.slot is None or entry.stays(storage):  # then it may have changed unseen
            entry.slot = self.file.slot(entry.nbytes)
            entry.slot.write(storage.data_ptr())
        return entry.slot

    def _bring_back(self, entry: _Entry, storage: torch.UntypedStorage) -> None:
        assert entry.slot is not None
        storage.resize_(entry.nbytes)
        entry.fill(storage, copy=self.inside and entry.nbytes >= HUGE_PAGE and not entry.published)
        entry.out = False

    # -- what autograd saves

    def _pack(self, tensor: Tensor) -> _Handle:
        with _disable_current_modes():
            tracked = tensor.device.type == self.device and tensor.layout is torch.strided
            handle = _Handle(tensor, self._entries.get(tensor.untyped_storage()._cdata) if tracked else None)
        self._handles.add(handle)
        return handle

    def _unpack(self, handle: _Handle) -> Tensor:
        entry = handle.entry
        if handle.tensor._version != handle.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {list(handle.form[1])}."
            )
        if not handle.gone:
            return handle.tensor
        assert entry is not None
        with _disable_current_modes():
            storage = entry.storage()
            if storage is None:
                assert entry.slot is not None
                self._entries.pop(entry.key, None)
                storage = torch.UntypedStorage(entry.nbytes, device=self.device)
                entry.fill(storage, copy=False)
                entry.bind(storage)
                self._entries[entry.key] = entry
            elif entry.out:
                self._bring_back(entry, storage)
            return handle.tensor.new_empty(0).set_(storage, *handle.form)

    # -- what other workers read

    def publish(self, tensor: Tensor) -> Published:
        """Rows for other workers to read; contents as they are now."""
        with _disable_current_modes():
            tensor = tensor.detach()
            if tensor.nbytes < max(LEAST_BYTES, 1):
                self.ensure(tensor)
                return Published(tensor.clone(memory_format=torch.contiguous_format))
            if (found := self.in_files.find(tensor)) is not None:
                return found
            entry = self._entries.get(tensor.untyped_storage()._cdata)
            if entry is not None and entry.nbytes == tensor.nbytes and tensor.is_contiguous():
                entry.published = True
                slot = entry.slot if entry.out else self._save(entry, tensor.untyped_storage())
                assert slot is not None
            else:
                self.ensure(tensor)
                tensor = tensor.contiguous()
                slot = self.file.slot(tensor.nbytes)
                slot.write(tensor.data_ptr())
            return Published(slot.mapped(tuple(tensor.shape), tensor.dtype), slot)

    def open_to_others(self, total: Tensor) -> Published:
        """Let other workers add to a tensor, which therefore has to stay where it is."""
        assert total.untyped_storage()._cdata not in self._entries, "a total that is not made by `roomy`"
        return self.in_files.opened(total)


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


# -- what torch's dispatcher does not see

PAST_DISPATCHER = ("tolist", "data_ptr", "__dlpack__", "__reduce_ex__", "share_memory_", "numpy")
EXPOSING = ("__dlpack__", "_to_dlpack", "share_memory_", "numpy")
"""Those of them that may change a tensor later."""


@contextmanager
def memory_is_watched() -> Iterator[None]:
    """Let threads with a `Residency` look past the dispatcher inside; torch itself is as before for all others."""
    kept = {name: getattr(Tensor, name) for name in PAST_DISPATCHER}
    to_dlpack = torch.utils.dlpack.to_dlpack
    raw_memory.writes_seen_by.append(_written)
    raw_memory.settled_by.append(_settled)
    for name, method in kept.items():
        setattr(Tensor, name, _brings_back(method))
    torch.utils.dlpack.to_dlpack = _brings_back(to_dlpack)
    try:
        yield
    finally:
        torch.utils.dlpack.to_dlpack = to_dlpack
        for name, method in kept.items():
            setattr(Tensor, name, method)
        raw_memory.settled_by.remove(_settled)
        raw_memory.writes_seen_by.remove(_written)


def _written(tensor: Tensor) -> None:
    if (residency := getattr(_here, "residency", None)) is not None:
        residency.written(tensor)


def _settled(tensor: Tensor) -> Tensor:
    residency: Residency | None = getattr(_here, "residency", None)
    if residency is None or tensor.device.type != residency.device:
        return tensor
    residency.ensure(tensor)
    with _disable_current_modes():
        return residency.in_files.settled(tensor)


def _brings_back(method: Callable[..., Any]) -> Callable[..., Any]:
    exposes, lends = method.__name__ in EXPOSING, "dlpack" in method.__name__

    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if (residency := getattr(_here, "residency", None)) is not None and tensor.device.type == residency.device:
            residency.ensure(tensor)
            if exposes:
                residency.in_files.exposed(tensor)
            if lends:
                tensor = residency.lend(tensor)
        return method(tensor, *args, **kwargs)

    return call
