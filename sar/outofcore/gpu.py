"""What a process has on its GPU: the tensors of the partition that computes, and as much of the others' as fits.

[Note: leaving the GPU]
No other pages can be put under an address of a GPU. So a tensor leaves by a copy: the bytes of its storage go to the
host, and the storage is emptied. Views and what autograd has saved refer to the storage, and so find it empty, and
filled again. What may not stay leaves when the turn passes, and comes back when it is used. The dispatch mode
sees operations ([Note: leaving memory]), those of a backward, too, which runs in the worker's own thread. `Addresses`
sees who asks for an address, as Triton's kernels and `torch.save` do. A C++ extension that is no operator of torch is
seen by neither, and finds a null pointer.

Nobody can tell whether a kernel has written to a tensor, so what has been used is copied again when it leaves. The
structure of graphs, which never changes, is copied once. So are rows that others read: what they read is the host's
copy, and the next one goes elsewhere. Gradients of such rows are added to the host's copy, too, while their owner does
not have the turn.

[Note: three levels]
What waits stays on the GPU, as far as `GPU_SHARE` of its memory goes. Turns go round, so what has left last is needed
last: what has been there the longest stays, and the rest leaves. Where the partition that computes needs more than
there is left, half of what stays leaves, until there is room, and no more stays from then on.

The host's copies are in pinned memory, from which a GPU reads at full speed and while it computes. They may take
`PINNED_SHARE` of the memory that the host or its control group has left when the turns begin, divided among the
processes of the host; the rest goes to the spill file of the worker that leaves. The log says when each level is first
used.

Rows that other partitions read are copied likewise: on the GPU, or to the host. There they are gathered, and brought in
a stream beside the one that computes, while the tile before is computed ([Note: reading ahead]).
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from sar.comm.transport import SharedTensor
from sar.host.memory import available_memory
from sar.logging_setup import logger
from sar.outofcore.spill import Mapping, Published, SpillFile
from sar.raw_memory import side_stream

T = TypeVar("T")

GPU_SHARE: Final = 0.5
"""Of the GPU's memory, or what a process may use of it. The partition that computes has the rest, with torch's gaps."""
PINNED_SHARE: Final = 0.5
"""Of the memory that is available. Torch's allocator of pinned memory keeps what is freed for blocks of its size."""
_GIVES_ADDRESSES: Final = {
    *(torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.__deepcopy__, torch.Tensor.__dlpack__),
    torch.Tensor.__cuda_array_interface__.__get__,
}


class _Copy(NamedTuple):
    """The host's copy of a storage."""

    bytes: Tensor  # (n,) uint8
    mapping: Mapping | None  # where it is in the file; None in pinned memory

    def take(self, given: Tensor) -> None:
        """Take in (n,) bytes of the GPU, once it comes to that."""
        self.bytes.copy_(given, non_blocking=self.mapping is None)
        if self.mapping is not None:
            self.mapping.slot.file.written += given.nbytes

    def give(self, wanted: Tensor) -> None:
        """Fill (n,) bytes of the GPU, before whatever is computed next."""
        if self.mapping is not None:
            self.mapping.populate()
            self.mapping.slot.file.read += self.mapping.slot.nbytes
        wanted.copy_(self.bytes, non_blocking=self.mapping is None)


class OnGpu:
    """A storage on the GPU, by weak reference."""

    def __init__(self, memory: "GpuMemory", storage: torch.UntypedStorage) -> None:
        self.nbytes = storage.nbytes()
        self.copy: _Copy | None = None
        self.away = False  # whether nobody has used it since it was left, there or on the host
        self.copied = False  # whether the copy is what it has
        self.fixed = False  # whether it never changes
        self.published = False  # whether others may read the copy
        self._memory = memory
        self.key: int = storage._cdata
        self.storage = weakref.ref(storage, partial(memory.forget, self.key))

    def come_back(self) -> None:
        """Be there, for whoever uses it now."""
        storage = self.storage()
        assert storage is not None, "a storage that is used"
        self.away = self.copied = False
        self._memory.here[self.key] = self
        if storage.nbytes() != self.nbytes:
            assert self.copy is not None, "a storage that has left"
            with _disable_current_modes():
                self._memory.fitting(lambda: storage.resize_(self.nbytes))
                self.copy.give(_bytes(storage))

    def copy_out(self, storage: torch.UntypedStorage, file: SpillFile) -> _Copy:
        """Have the host's copy be what there is now."""
        if not self.copied and not (self.fixed and self.copy is not None):
            if self.copy is None or self.published or self.nbytes != storage.nbytes():
                self.nbytes = storage.nbytes()
                self.copy, self.published = self._memory.place(self.nbytes, file), False
            self.copy.take(_bytes(storage))
        assert self.copy is not None
        self.away = self.copied = True
        return self.copy

    def stay(self, storage: torch.UntypedStorage) -> None:
        """Wait on the GPU."""
        self.nbytes, self.away = storage.nbytes(), True


class GpuMemory:
    """The tensors of a process on its GPU: see [Note: leaving the GPU].

    pinned: bytes of pinned memory that the host's copies may take.
    processes: of the host.
    """

    def __init__(self, pinned: int, processes: int = 1) -> None:
        self.known: dict[int, OnGpu] = {}  # by what tells storages apart, `_cdata`
        self.here: dict[int, OnGpu] = {}  # of these all that are not empty, the first to come first
        self._processes = processes
        self._lent = 0  # bytes here of rows that others read
        self._room = pinned
        self._file: SpillFile | None = None  # of the worker that left last
        self._told: set[str] = set()

    @cached_property
    def stays(self) -> int:
        """Bytes that may stay, until the GPU is full."""
        return gpu_limit(self._processes)

    def know(self, storage: torch.UntypedStorage) -> None:
        """Have a storage leave with the turn from now on, unless it may stay."""
        key: int = storage._cdata
        if key not in self.known:
            self.known[key] = self.here[key] = OnGpu(self, storage)

    def leave(self, file: SpillFile) -> int:
        """Have all that is there wait, here or elsewhere; return how many bytes have left."""
        if not self.here:
            return 0
        self._file = file
        return self._settle(self._storages())

    def _storages(self) -> list[tuple[OnGpu, torch.UntypedStorage]]:
        """All that are there, the first to come first."""
        found = [(known, known.storage()) for known in list(self.here.values())]
        return [(known, storage) for known, storage in found if storage is not None and storage.nbytes()]

    def _settle(self, waiting: list[tuple[OnGpu, torch.UntypedStorage]]) -> int:
        """Keep of these what may stay, and copy the others to the host or to a worker's file; return their bytes."""
        room, leaving = self.stays - self._lent, []
        for known, storage in waiting:
            if known.copied or storage.nbytes() > room:
                leaving.append((known, storage))
            else:
                room -= storage.nbytes()
                known.stay(storage)
                self._tell("the GPU's memory", room)
        nbytes = sum(storage.nbytes() for _, storage in leaving)
        if leaving:
            assert self._file is not None
            with _disable_current_modes():
                for known, storage in leaving:
                    known.copy_out(storage, self._file)
                _wait_for_copies(*(storage.device for _, storage in leaving))
                for known, storage in leaving:
                    storage.resize_(0)
                    del self.here[known.key]
        return nbytes

    def fitting(self, call: Callable[[], T]) -> T:
        """What a call returns, which changes nothing where the GPU has too little memory for it."""
        while True:
            try:
                return call()
            except torch.cuda.OutOfMemoryError:
                waiting = [(known, storage) for known, storage in self._storages() if known.away]
                if not waiting:
                    raise
            _wait_for_copies(*(storage.device for _, storage in waiting))
            self.stays = self._lent + sum(storage.nbytes() for _, storage in waiting) // 2
            logger.info("the GPU is full: at most %d MB of tensors that wait stay there", self.stays >> 20)
            self._settle(waiting)

    def place(self, nbytes: int, file: SpillFile) -> _Copy:
        """Room for a copy: see [Note: three levels]."""
        taken = 1 << (nbytes - 1).bit_length()  # by torch's allocator of pinned memory
        if taken > self._room:
            self._tell(f"the file in {file.folder}, as no more memory may be pinned", self._room)
            mapping = Mapping(file.slot(nbytes))
            return _Copy(mapping.tensor((nbytes,), torch.uint8), mapping)
        self._tell("pinned memory", self._room)
        place = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available())
        self._room -= taken
        weakref.finalize(place.untyped_storage(), self._free, taken)
        return _Copy(place, None)

    def _tell(self, level: str, room: int) -> None:
        if level not in self._told:
            self._told.add(level)
            logger.info("tensors of partitions that wait are in %s (%d MB left)", level, room >> 20)

    def _free(self, nbytes: int) -> None:
        self._room += nbytes

    def _return(self, nbytes: int) -> None:
        self._lent -= nbytes

    def forget(self, key: int, _: object) -> None:
        """Nobody has a storage any more."""
        self.known.pop(key, None)
        self.here.pop(key, None)

    # -- what other workers read

    def publish(self, tensor: Tensor, file: SpillFile) -> SharedTensor:
        """Rows for other workers to read, contents as they are now: on the GPU where they fit, else on the host."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            tensor = tensor.detach()
            storage = tensor.untyped_storage()
            known = self.known.get(storage._cdata)
            if self._lent + sum(storage.nbytes() for _, storage in self._storages()) + tensor.nbytes <= self.stays:
                with suppress(torch.cuda.OutOfMemoryError):
                    return self._lend(tensor, known)
            nbytes = known.nbytes if known is not None and known.away else storage.nbytes()
            if known is not None and tensor.nbytes == nbytes and tensor.is_contiguous():
                copy = known.copy_out(storage, file)
                known.published = True
            else:
                if known is not None and known.away:
                    known.come_back()
                copy = self.place(tensor.nbytes, file)
                copy.bytes.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            _wait_for_copies(tensor.device)
            return _Rows(copy, tensor)

    def _lend(self, tensor: Tensor, known: OnGpu | None) -> SharedTensor:
        if known is not None and known.away:
            known.come_back()
        rows = tensor.clone(memory_format=torch.contiguous_format)
        self._lent += rows.nbytes
        weakref.finalize(rows.untyped_storage(), self._return, rows.nbytes)
        return SharedTensor(rows)

    def open_to_others(self, total: Tensor) -> SharedTensor:
        """Let other workers add to a tensor."""
        with torch._C.DisableTorchFunction():
            known = self.known.get(total.untyped_storage()._cdata)
        return SharedTensor(total) if known is None else _Total(total, known)

    def fixed(self, tensor: Tensor) -> Tensor:
        """A tensor that stays as it is, with what this one has: what has left once is not copied again."""
        known = self.known.get(tensor.untyped_storage()._cdata)
        if known is not None and not known.fixed:
            tensor = tensor.clone()
            known = self.known.get(tensor.untyped_storage()._cdata)
        if known is not None:
            known.fixed = True
        return tensor


class _Rows(SharedTensor):
    """Rows of a tensor of the GPU, as the host has them; those asked for are on their way to the GPU."""

    def __init__(self, copy: _Copy, tensor: Tensor) -> None:
        super().__init__(copy.bytes.view(tensor.dtype).view(tensor.shape))
        self._in_file = None if copy.mapping is None else Published(self.rows, copy.mapping.slot)
        self._device = tensor.device
        # Which, what, and the event at which it is there; in the order in which all of them are read.
        self._coming: deque[tuple[Tensor, Tensor, Any]] = deque()

    def will_need(self, rows: Tensor | None = None) -> None:
        """See [Note: reading ahead]."""
        if rows is not None:
            if self._in_file is not None:
                self._in_file.will_need(rows)
            self._coming.append((rows, *_brought(self.rows, rows, self._device)))

    def read(self, rows: Tensor, place: Tensor | None = None) -> Tensor:
        asked_for, values, there = self._coming.popleft()
        assert asked_for is rows, "rows that were asked for next"
        if there is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(there)
            values.record_stream(stream)
        return values


class _Total(SharedTensor):
    """A tensor of the GPU that others add to."""

    def __init__(self, total: Tensor, known: OnGpu) -> None:
        super().__init__(total)
        self._known = known

    def current(self) -> Tensor:
        copy = self._known.copy
        if not self._known.copied or copy is None:
            return self.rows
        size, begin = self.rows.nbytes, int(self.rows.storage_offset()) * self.rows.itemsize
        return copy.bytes[begin : begin + size].view(self.rows.dtype).view(self.rows.shape)


class Addresses(TorchFunctionMode):
    """Has tensors be there whose address somebody asks for."""

    def __init__(self, memory: GpuMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _GIVES_ADDRESSES and isinstance(args[0], Tensor) and not args[0].is_cpu:
            known = self._memory.known.get(args[0].untyped_storage()._cdata)
            if known is not None and known.away:
                known.come_back()
        return func(*args, **(kwargs or {}))


def gpu_limit(workers_of_host: int) -> int:
    """Bytes of what waits that each of so many processes may leave on its GPU: see [Note: three levels]."""
    if not torch.cuda.is_initialized():
        return 0
    sharing = -(-workers_of_host // torch.cuda.device_count())
    allowed = getattr(torch.cuda, "get_per_process_memory_fraction", lambda: 1.0)()  # older torch does not tell
    return int(GPU_SHARE * min(allowed, 1 / sharing) * torch.cuda.mem_get_info()[1])


def pinned_limit(workers_of_host: int) -> int:
    """Bytes that each of so many processes may pin: see [Note: three levels]."""
    return int(PINNED_SHARE * available_memory()) // workers_of_host


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """All that a storage has, (n,) uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# -- what only CUDA has: streams, events, pinned memory. Other devices copy in order.


def _wait_for_copies(*devices: torch.device) -> None:
    """Of devices that need not be the current one."""
    for device in set(devices) if torch.cuda.is_initialized() else ():
        torch.cuda.synchronize(device)


def _brought(values: Tensor, rows: Tensor, device: torch.device) -> tuple[Tensor, Any]:
    """Some rows of the host on their way to the GPU, and the event at which they are there; None where they are."""
    cuda = device.type == "cuda"
    gathered = torch.empty((len(rows), *values.shape[1:]), dtype=values.dtype, device="cpu", pin_memory=cuda)
    torch.index_select(values, 0, rows, out=gathered)
    if not cuda:
        return gathered.to(device), None
    side = side_stream(device)
    with torch.cuda.stream(side):
        return gathered.to(device, non_blocking=True), side.record_event()
