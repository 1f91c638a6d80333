"""Moves a worker's tensors out of memory when its turn ends, and reads them from its spill file afterwards.

[Note: leaving memory]
A dispatch mode in each worker's thread sees the results of torch's operations there. It keeps a weak reference to every
storage of `LEAST_BYTES` and more. When the turn passes, the spill file's pages take the place of their pages ([Note:
memory of the file]). Addresses and contents stay the same for every reader and writer: autograd, other threads, C++
extensions, numpy, `torch.save`. Storages that the mode does not see, or that have no separate pages, stay in
memory, which only costs memory. The first operation of a turn that uses a storage makes the system read all of it.

A thread writes leaving tensors during the next worker's turn. Once the files exceed the page cache, tensors are
written and read past it, and pages of features and structure are dropped from it. The next worker's tensors are
prefetched: those with the numbers that the previous worker used in this turn, because all run the same script.

Hooks on the tensors that autograd saves would not be enough: while a call's backward waits, autograd holds the gradient
of another branch, such as `fc_self` of SAGEConv, and only a mode sees it. With hooks, SAGE in 8 partitions took 1/4.6
of the memory of all partitions at once; with the mode it takes 1/13.

[Note: budget]
SAR_MEMORY limits the processes of a machine: their own memory, and pages of files. A quarter of the memory that is
available at the start is for rows that all workers read in place. The page cache may hold three times that much of the
files, or half of the budget that the largest partition so far leaves. The process's own memory is compared with the
budget by operations that create a large tensor, and at the end of a turn. If a partition needs more, although all
leaving tensors are written and nothing is prefetched, its worker raises an error.

[Note: tensors in files]
A worker copies features and other data of its partition slice by slice to a slot of its spill file, and maps the slot:
the system keeps as much of it in memory as there is room for. The partition's own files could not be mapped: an array
of DGL's begins right after its name, and numerical code needs aligned addresses. The structure of graphs is also stored
there. Small pieces, such as the edges between two of p partitions, share a slot. Such a tensor is published without
a copy: it is frozen, so later writes go to another slot and other workers still read the published contents.
"""

import ctypes
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from math import prod
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import TorchDispatchMode

from sar.comm.transport import SharedTensor
from sar.config import Config
from sar.errors import ConfigError
from sar.host.memory import anonymous_memory
from sar.outofcore.pages import AT_ONCE, Mapping, Pages, Published, TrackedStorage, can_leave, forget_zeros
from sar.outofcore.spill import PAGE, MemoryPool, Slot, SpillFile, Transfer, memory_at
from sar.tensors import spillable

FIRST_PURGE: Final = 4096
"""Number of tracked storages after which freed ones are removed for the first time."""
SHARED_SLOT: Final = 2**18
"""Bytes of a slot that several small, constant tensors share."""
ALIGNED: Final = 64
"""Alignment in bytes of the tensors in a shared slot."""

_free_mkl: Final[Callable[[], object] | None] = getattr(ctypes.CDLL(torch._C.__file__), "mkl_serv_free_buffers", None)
"""Frees the half megabyte per thread that MKL keeps for the next matrix product. None if torch has no MKL."""

COMPARED: Final = 2**20
"""Bytes of a new tensor from which memory is compared with the budget, and zeros are not written to the file."""

_all: Final[set["Residency"]] = set()
_empty: Final = torch.ops.aten.empty.memory_format


class Residency(TorchDispatchMode):
    """Tracks a worker's tensors and moves them out of memory when its turn ends ([Note: leaving memory]).

    It is also the worker's `TensorFile` ([Note: tensors in files]), with a file that no other worker writes to. `left`
    counts the bytes that left memory when the turn last passed. `at_hand` is documented in `TensorFile`.
    """

    device = "cpu"

    def __init__(self, file: SpillFile, at_hand: float) -> None:
        super().__init__()
        self.file = file
        self.at_hand = at_hand
        self.left = 0
        self._tracked = 0  # storages so far
        self._used: list[TrackedStorage] = []  # those that were read back in this turn
        self._used_in_file: set[int] = set()  # numbers of the mappings that were used in this turn
        self._mapped = 0  # mappings so far
        self._leaving: Transfer | None = None  # writes what has left memory
        self._storages: dict[int, TrackedStorage] = {}  # by `_cdata`, which identifies a storage
        self._purge_at = FIRST_PURGE
        self._in_file: weakref.WeakValueDictionary[int, Mapping] = weakref.WeakValueDictionary()  # by address
        self._room = torch.empty(0, dtype=torch.uint8, device="cpu")  # unused rest of the slot that small tensors share

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Track this thread's tensors inside the context."""
        _all.add(self)
        try:
            with spillable.tensor_file.set_to(self), self:
                yield
        finally:
            _all.discard(self)  # its file is closed next, even if tensors of it are still alive

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, because torch would import its compiler to skip it, and nothing is compiled under this mode."""
        return False

    # -- tracking the operands and results of operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Function modes, such as that of [Note: captured tensors], see the user's operations, not these calls.
        modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
        try:
            operands = {self.use(tensor) for tensor in _tensors((*args, *kwargs.values()) if kwargs else args)}
            result = func(*args, **kwargs)
            if args and isinstance(args[0], list) and func._schema.is_mutable:
                # In-place operations on lists of tensors rely on the operations they call to increment the version
                # counters. Those do not do so under a dispatch mode, so we do it.
                increment_version([tensor for tensor in args[0] if not tensor.is_inference()])
            for tensor in _tensors((result,)):
                # Track the storage from now on, unless it belongs to one of the operands. Results of other workers,
                # such as the sum of an `all_reduce`, are never tracked, and stay in memory.
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key in operands or storage.nbytes() < max(spillable.LEAST_BYTES, 1) or not storage.resizable():
                    continue
                if not tensor.is_cpu:
                    raise ConfigError(
                        f"A worker that shares its process (SAR_RESIDENT) has made a tensor on {tensor.device}. "
                        "Partitions that take turns stay on the CPU; start a process for each of them to use GPUs."
                    )
                if storage.nbytes() >= COMPARED:
                    self._keep_budget(storage.nbytes() if func is _empty else 0)
                if key not in self._storages:
                    self._tracked += 1
                    self._storages[key] = TrackedStorage(storage, self._tracked)
                    if len(self._storages) > self._purge_at:
                        alive = {key: each for key, each in self._storages.items() if each.storage() is not None}
                        self._storages, self._purge_at = alive, max(2 * len(alive), FIRST_PURGE)
        finally:
            for mode in reversed(modes):
                torch._C._push_on_torch_function_stack(mode)
        return result

    def use(self, tensor: Tensor) -> int:
        """Read a tensor back if it is out of memory, as `TensorFile.use` does; return the key of its storage."""
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        tracked: TrackedStorage | Mapping | None = self._storages.get(key)
        if tracked is None:
            tracked = self._in_file.get(storage.data_ptr())
        if tracked is not None and tracked.away:
            if isinstance(tracked, TrackedStorage):
                if tracked.pages is not None and not tracked.pages.read_ahead():
                    for used in self._used:  # reuse the memory of freed ones
                        used.storage()
                self._used.append(tracked)
            else:
                self._used_in_file.add(tracked.number)
            tracked.come_back()
        return key

    def _keep_budget(self, untouched: int = 0) -> None:
        """Raise a ConfigError if memory, plus bytes to be allocated, exceeds the budget: [Note: budget]."""
        disk = self.file.disk
        if disk.limit == float("inf"):
            return
        needed = anonymous_memory() + disk.memory.size + untouched
        if needed > disk.limit:
            _wait_for_writes()
            for each in (*_all, self):
                for known in each._storages.values():
                    if known.pages is not None:
                        known.pages.ahead = None
            for used in self._used:
                if used.storage() is not None and used.pages is not None:
                    used.pages.renew()
                    used.pages.drop()
            disk.memory.free()
            needed = anonymous_memory() + disk.memory.size + untouched
        if needed > disk.limit:
            more = needed - disk.limit
            raise ConfigError(
                f"A worker needs {needed / 1e6:,.0f} MB at once so far, {more / 1e6:,.0f} MB more than the "
                f"{disk.limit / 1e6:,.0f} MB that --memory (SAR_MEMORY) leaves its process. Divide the graph into more "
                "partitions, or allow more memory: `sar plan DIR --memory SIZE` says how many partitions a size takes."
            )
        disk.room = min(disk.room, (disk.limit - needed) / 2)

    # -- leaving

    def leave(self, turn: int = 0) -> None:
        """Take all tensors out of memory. A thread writes them, while the next worker has its turn."""
        self._keep_budget()
        self.left, disk = 0, self.file.disk
        exceeds = disk.exceeds_cache
        new: list[tuple[TrackedStorage, torch.UntypedStorage, Slot]] = []
        for key, tracked in list(self._storages.items()):
            storage = tracked.storage()
            if storage is None:
                del self._storages[key]
                continue
            if not tracked.away and tracked.pages is not None:
                tracked.away = True
                tracked.pages.renew()
                if exceeds:
                    tracked.pages.drop()
            elif not tracked.away and can_leave(storage):
                tracked.away = True
                address, nbytes = storage.data_ptr(), storage.nbytes()
                if nbytes < COMPARED or not forget_zeros(address, nbytes):
                    new.append((tracked, storage, self.file.slot(nbytes, address % PAGE)))
            elif tracked.pages is not None:
                tracked.pages.ahead = None
            self.left += storage.nbytes() * tracked.away
        for mapping in list(self._in_file.values()):
            if not mapping.away:
                mapping.renew()
                mapping.away = True
            if exceeds and (mapping.slot.nbytes > AT_ONCE or disk.prefetched > disk.room / 2):
                mapping.drop()
        if sum(storage.nbytes() for _, storage, _ in new) > self.at_hand:  # too much in addition to the next worker's
            _write_out(new)
        if disk.limit < float("inf"):  # keep no more than one worker's tensors and pages that are not written
            _wait_for_writes()
        if new or exceeds:
            self._leaving = self.file.start(_write_out, new, self.file if exceeds else None)
        if _free_mkl is not None:
            _free_mkl()
        disk.latest, self._used = (turn, [used.number for used in self._used], self._used_in_file), []
        self._used_in_file = set()

    def arrive(self) -> None:
        """Begin a turn: wait until leaving tensors are written."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.wait()

    def prefetch(self, turn: int) -> None:
        """Read in the background the tensors that the previous worker used in this turn."""
        disk = self.file.disk
        of, numbers, in_file = disk.latest
        if of != turn or not disk.exceeds_cache or (self._leaving is not None and not self._leaving.future.done()):
            return
        for mapping in self._in_file.values():
            if mapping.number in in_file and mapping.away and mapping.slot.nbytes <= AT_ONCE:
                mapping.slot.will_need(0, mapping.slot.nbytes)
        away = {each.number: each.pages for each in self._storages.values() if each.away and each.pages is not None}
        for number in numbers:
            if number in away and not away[number].read_ahead():
                break

    # -- tensors that other workers read

    def publish(self, tensor: Tensor) -> SharedTensor:
        """Snapshot of a tensor for other workers to read."""
        tensor = tensor.detach()
        if tensor.nbytes < max(spillable.LEAST_BYTES, 1):
            return SharedTensor(tensor.clone(memory_format=torch.contiguous_format))
        mapping = self._in_file.get(_address(tensor)) if tensor.is_contiguous() else None
        if mapping is not None:
            mapping.freeze()
            return Published.of(mapping.slot, tensor.shape, tensor.dtype, _begin(tensor, mapping.begin))
        storage = tensor.untyped_storage()
        tracked, pages = self._storages.get(storage._cdata), None
        if tracked is not None and storage.nbytes() == tensor.nbytes and tensor.is_contiguous():
            pages = tracked.put_away(self.file)
        if pages is not None:
            pages.freeze()
            slot = pages.slot
        else:
            tensor = tensor.contiguous()
            slot = self.file.slot(tensor.nbytes)
            self.file.transfer(os.pwritev, memory_at(tensor.data_ptr(), tensor.nbytes), slot.begin)
            self.file.written += tensor.nbytes
        return Published.of(slot, tensor.shape, tensor.dtype)

    def contents(self, tensors: Sequence[Tensor]) -> Any:
        """See `Transport.contents`. It is known of tensors in the file, whose slots are written once."""
        found = []
        for tensor in tensors:
            mapping = self._in_file.get(_address(tensor)) if tensor.is_contiguous() else None
            if mapping is None or tensor.requires_grad:
                return None
            mapping.freeze()
            found.append((mapping.slot, _begin(tensor, mapping.begin), tensor.shape, tensor.dtype))
        return found

    def open_to_others(self, total: Tensor) -> SharedTensor:
        """Handle through which other workers add to a tensor. The tensor must not move, so it has to be in the file."""
        storage = total.untyped_storage()
        if (tracked := self._storages.get(storage._cdata)) is not None:
            pages = tracked.put_away(self.file)  # its address stays
            return SharedTensor(total) if pages is None else Published(total, pages.slot, _begin(total, 0))
        if (mapping := self._in_file.get(_address(total))) is None:
            return SharedTensor(total)
        mapping.visit_rows()
        return Published(total, mapping.slot, _begin(total, mapping.begin))

    # -- tensors in the file

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self._mapped += 1
        mapping = Mapping(self.file.slot(prod(shape) * dtype.itemsize), number=self._mapped)
        self._in_file[mapping.address + mapping.begin] = mapping
        return mapping.tensor(shape, dtype)

    def moved(self, tensor: Tensor) -> Tensor:
        """Move a tensor to the file, as `TensorFile.moved` does. Small tensors share a slot."""
        nbytes = tensor.nbytes
        if not nbytes or _address(tensor) in self._in_file:
            return tensor
        if nbytes > SHARED_SLOT // 4:
            return self.empty(tensor.shape, tensor.dtype).copy_(tensor)
        self.use(tensor)
        with torch._C._DisableTorchDispatch():  # operations on so small tensors take less than tracking them
            if nbytes > len(self._room):
                self._room = self.empty((SHARED_SLOT,), torch.uint8)
            place = self._room[:nbytes].view(tensor.dtype).view(tensor.shape).data  # with a separate version counter
            self._room = self._room[-(-nbytes // ALIGNED) * ALIGNED :]
            return place.copy_(tensor)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _begin(tensor: Tensor, begin: int) -> int:
    """Offset of a tensor in its slot, in bytes, if its storage begins there."""
    return begin + int(tensor.storage_offset()) * tensor.itemsize


def _wait_for_writes() -> None:
    """Wait until leaving tensors are written."""
    wait([each._leaving.future for each in _all if each._leaving is not None], Config.timeout)


def _write_out(
    leaving: list[tuple[TrackedStorage, torch.UntypedStorage, Slot]], forget: SpillFile | None = None
) -> None:
    """Write storages, which are alive meanwhile, to their slots. Then forget a file's cache."""
    while leaving:
        tracked, storage, slot = leaving.pop(0)
        tracked.pages = Pages(slot, storage.data_ptr()).fill(slot)
    if forget is not None:
        forget.forget()


def _tensors(values: Sequence[Any], tensors: list[Tensor] | None = None) -> list[Tensor]:
    """All tensors with memory among the operands or results of an operation; for sparse ones, their components."""
    tensors = [] if tensors is None else tensors
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is torch.strided:
                if not value.is_meta:
                    tensors.append(value)
            elif value.layout is torch.sparse_coo:
                _tensors((value._indices(), value._values()), tensors)
            elif value.layout is torch.sparse_csr:
                _tensors((value.crow_indices(), value.col_indices(), value.values()), tensors)
        elif isinstance(value, (list, tuple)):
            _tensors(value, tensors)
    return tensors


def _before_fork() -> None:
    """Freeze all pages, so that after the fork neither process sees the other's writes."""
    for residency in _all:
        residency.arrive()
        residency.file.keep()
        alive = [tracked for tracked in residency._storages.values() if tracked.storage() is not None]
        for pages in (*(tracked.pages for tracked in alive), *residency._in_file.values()):
            if pages is not None:
                pages.ahead = None
                pages.freeze()
                if pages.memory is not None:
                    pages.drop()


def _in_child() -> None:
    """Forget the files in a forked process; they belong to the parent, whose threads read ahead."""
    for residency in _all:
        residency.file.disk.memory = MemoryPool(0)
    _all.clear()
    spillable.tensor_file.value = None


os.register_at_fork(before=_before_fork, after_in_child=_in_child)
