"""Which tensors of a worker are in memory: they leave with its turn, and are read from the file from then on.

[Note: leaving memory]
A dispatch mode in each worker's thread sees the results of torch's operations there, and so knows, by weak reference,
every storage of `LEAST_BYTES` and more. When the turn passes, the spill file's pages take the place of theirs ([Note:
memory of the file]). Their addresses stay, and so does what is there, whoever reads or writes it: autograd, other
threads, C++ extensions, numpy, `torch.save`. What the mode does not see stays in memory, which costs that and nothing
else; so does what the allocator has not given pages of its own. The first operation of a turn that uses a storage has
the system read all of it at once.

Hooks on what autograd saves would not be enough: while a call's backward waits, autograd holds the gradient of another
branch, such as `fc_self` of SAGEConv, where nothing but a mode sees it. So SAGE in 8 partitions would take 1/4.6 of the
memory that it takes at once, for 1/13.

[Note: tensors in files]
What a worker reads of its partition's files, such as features, goes slice by slice to a slot of its spill file, and is
mapped from there: the system keeps as much of it in memory as there is room for. The partition's own files could not be
mapped: an array of DGL's begins right after its name, and code for numbers needs aligned addresses. The structure of
graphs goes there, too, and totals of gradients, to which other workers add; small pieces, such as the edges between
each two of p partitions, share a slot. Such a tensor is published without a copy: it is frozen,
and what it becomes goes to another slot, while others read on what was published.
"""

import ctypes
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from resource import RUSAGE_SELF, getrusage
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sar import spillable
from sar.comm.transport import SharedTensor
from sar.errors import ConfigError
from sar.outofcore.spill import Mapping, Pages, Published, SpillFile, has_its_own_pages

FIRST_PURGE: Final = 4096
"""Storages known before those that are gone are looked for."""
SHARED_SLOT: Final = 2**18
"""Bytes of a slot for several small tensors that stay as they are."""
ALIGNED: Final = 64
"""Bytes at whose multiples these begin."""
QUIET_BLOCKS: Final = 64
"""Of 512 bytes, read from disks from one turn to the next: for fewer, reading ahead costs more than it saves."""

_free_mkl: Final[Callable[[], object] | None] = getattr(ctypes.CDLL(torch._C.__file__), "mkl_serv_free_buffers", None)
"""Frees half a megabyte a thread, which MKL keeps for the next product of matrices; None where torch has no MKL."""

_SEQUENCES: Final = (list, tuple)
_all: Final[set["Residency"]] = set()


class _Known:
    """A storage, by weak reference."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.nbytes = storage.nbytes()
        self.pages: Pages | None = None  # where it is in the file, once it has left
        self.away = False  # whether nobody has used it since
        self._weak = StorageWeakRef(storage)  # which keeps its key from being given to another one

    def storage(self) -> torch.UntypedStorage | None:
        """None where nobody has it any more."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        return found

    def come_back(self) -> None:
        """Be at hand, for whoever uses it now."""
        if self.pages is not None:
            self.pages.populate()
            self.pages.slot.file.read += self.pages.slot.nbytes
            self.away = False


class Residency(TorchDispatchMode):
    """What a worker has in memory, and a `TensorFile`: see [Note: leaving memory] and [Note: tensors in files].

    The file is the worker's own. `left` counts bytes that were out of memory when the turn last passed; `at_hand` is as
    of `TensorFile`.
    """

    device = "cpu"

    def __init__(self, file: SpillFile, at_hand: float) -> None:
        super().__init__()
        self.file = file
        self.at_hand = at_hand
        self.left = 0
        self._reads = 0  # of this process from disks, as of this worker's last turn
        self._storages: dict[int, _Known] = {}  # by what tells storages apart, `_cdata`
        self._purge_at = FIRST_PURGE
        self._in_file: weakref.WeakValueDictionary[int, Mapping] = weakref.WeakValueDictionary()  # by address
        self._room = torch.empty(
            0, dtype=torch.uint8, device="cpu"
        )  # of the slot that small tensors share, what is left

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Look after this thread's tensors inside."""
        _all.add(self)
        try:
            with spillable.tensor_file.set_to(self), self:
                yield
        finally:
            _all.discard(self)  # its file is closed, whoever still has a tensor of it

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch asks whether to keep its compiler away, for which it would import that; nothing is compiled here."""
        return False

    # -- seeing what operations use

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {self.use(tensor) for tensor in _tensors((*args, *kwargs.values()) if kwargs else args)}
        result = func(*args, **kwargs)
        if args and isinstance(args[0], list) and func._schema.is_mutable:
            # Operations on lists of tensors leave that to others that they consist of, which do not do it under a mode.
            increment_version([tensor for tensor in args[0] if not tensor.is_inference()])
        for tensor in _tensors((result,)):
            self._know(tensor, given)
        return result

    def use(self, tensor: Tensor) -> int:
        """As `TensorFile.use`; return what tells its storage from others."""
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        known: _Known | Mapping | None = self._storages.get(key)
        if known is None:
            known = self._in_file.get(storage.data_ptr())
        if known is not None and known.away:
            known.come_back()
        return key

    def _know(self, tensor: Tensor, given: set[int]) -> None:
        """Know the storage of an operation's result from now on, unless it is that of what was given.

        So what other workers have made, such as the sum of an `all_reduce`, is nobody's, and stays.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in given or storage.nbytes() < max(spillable.LEAST_BYTES, 1) or not storage.resizable():
            return
        if not tensor.is_cpu:
            raise ConfigError(
                f"A worker that shares its process (SAR_RESIDENT) has made a tensor on {tensor.device}. Partitions "
                "that take turns stay on the CPU; start a process for each of them to use GPUs."
            )
        if key not in self._storages:
            self._storages[key] = _Known(storage)
            if len(self._storages) > self._purge_at:
                self._storages = {key: one for key, one in self._storages.items() if one.storage() is not None}
                self._purge_at = max(2 * len(self._storages), FIRST_PURGE)

    # -- leaving

    def leave(self) -> None:
        """Take all tensors out of memory."""
        self.left = 0
        for key, known in list(self._storages.items()):
            storage = known.storage()
            if storage is None:
                del self._storages[key]
            elif known.away or self._put_away(known, storage) is not None:
                known.away = True
                self.left += known.nbytes
        for mapping in list(self._in_file.values()):
            if not mapping.away:
                mapping.renew()
                mapping.away = True
        if _free_mkl is not None:
            _free_mkl()
        usage, before = getrusage(RUSAGE_SELF), self._reads
        self._reads = usage.ru_inblock + usage.ru_majflt  # the latter where a file system does not count blocks
        self.file.quiet = self.file.quiet + 1 if self._reads - before < QUIET_BLOCKS else 0

    def _put_away(self, known: _Known, storage: torch.UntypedStorage) -> Pages | None:
        """Have the file's pages in place of a storage's, with what is there now; None where that is not possible."""
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if known.pages is not None and (known.pages.address, known.nbytes) == (address, nbytes):
            known.pages.renew()
        else:
            known.nbytes, known.pages = nbytes, None
            elsewhere = storage.is_shared() or (torch.cuda.is_initialized() and storage.is_pinned())
            if nbytes and not elsewhere and has_its_own_pages(address):
                slot = self.file.slot(nbytes)
                known.pages = Pages(slot, address).fill(slot)
        return known.pages

    def before_fork(self) -> None:
        """Leave this process and its child each what is there now."""
        self.file.keep()
        mine = [known.pages for known in self._storages.values() if known.pages and known.storage() is not None]
        for pages in (*mine, *self._in_file.values()):
            pages.freeze()

    # -- what other workers read

    def publish(self, tensor: Tensor) -> SharedTensor:
        """Rows for other workers to read; contents as they are now."""
        tensor = tensor.detach()
        if tensor.nbytes < max(spillable.LEAST_BYTES, 1):
            return SharedTensor(tensor.clone(memory_format=torch.contiguous_format))
        if (mapping := self._frozen(tensor)) is not None:
            return Published.of(mapping.slot, tensor.shape, tensor.dtype, _begin(tensor, mapping))
        storage = tensor.untyped_storage()
        known, pages = self._storages.get(storage._cdata), None
        if known is not None and storage.nbytes() == tensor.nbytes and tensor.is_contiguous():
            pages = self._put_away(known, storage)
        if pages is not None:
            pages.freeze()
            slot = pages.slot
        else:
            tensor = tensor.contiguous()
            slot = self.file.slot(tensor.nbytes)
            slot.write(tensor.data_ptr())
        return Published.of(slot, tensor.shape, tensor.dtype)

    def open_to_others(self, total: Tensor) -> SharedTensor:
        """Let other workers add to a tensor, which therefore has to stay where it is."""
        assert total.untyped_storage()._cdata not in self._storages, "a total that `empty_spillable` has not made"
        if (mapping := self._in_file.get(_address(total))) is None:
            return SharedTensor(total)
        mapping.visit_rows()
        return Published(total, mapping.slot, _begin(total, mapping))

    # -- tensors in the file

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._tensor(Mapping(self.file.slot(prod(shape) * dtype.itemsize)), shape, dtype)

    def moved(self, tensor: Tensor) -> Tensor:
        """As `TensorFile.moved`; small tensors share a slot."""
        nbytes = tensor.nbytes
        if not nbytes or _address(tensor) in self._in_file:
            return tensor
        if nbytes > SHARED_SLOT // 4:
            return self.empty(tensor.shape, tensor.dtype).copy_(tensor)
        if nbytes > len(self._room):
            self._room = self.empty((SHARED_SLOT,), torch.uint8)
        place = self._room[:nbytes].view(tensor.dtype).view(tensor.shape).data  # changed by itself, says autograd
        self._room = self._room[-(-nbytes // ALIGNED) * ALIGNED :]
        return place.copy_(tensor)

    def _tensor(self, mapping: Mapping, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self._in_file[mapping.address + mapping.begin] = mapping
        return mapping.tensor(shape, dtype)

    def _frozen(self, tensor: Tensor) -> Mapping | None:
        """Where a tensor lies in the file, which stays as it is; None where it is not there."""
        mapping = self._in_file.get(_address(tensor)) if tensor.is_contiguous() else None
        if mapping is not None:
            mapping.freeze()
        return mapping


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _begin(tensor: Tensor, mapping: Mapping) -> int:
    """The byte of a slot with which a tensor begins."""
    return mapping.begin + int(tensor.storage_offset()) * tensor.itemsize


def _tensors(given: Sequence[Any], found: list[Tensor] | None = None) -> list[Tensor]:
    """All tensors with memory among the arguments or results of an operation; of a sparse one those it is made of."""
    found = [] if found is None else found
    for one in given:
        if isinstance(one, Tensor):
            if one.layout is torch.strided:
                if not one.is_meta:
                    found.append(one)
            elif one.layout is torch.sparse_coo:
                _tensors((one._indices(), one._values()), found)
            elif one.layout is torch.sparse_csr:
                _tensors((one.crow_indices(), one.col_indices(), one.values()), found)
        elif isinstance(one, _SEQUENCES):
            _tensors(one, found)
    return found


def _before_fork() -> None:
    for residency in _all:
        residency.before_fork()


def _in_child() -> None:
    """The files are the parent's."""
    _all.clear()
    spillable.tensor_file.value = None


os.register_at_fork(before=_before_fork, after_in_child=_in_child)
