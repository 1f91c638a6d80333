"""Memory of storages whose pages are those of a spill file, so that it can be dropped and read again.

[Note: memory of the file]
A tensor that leaves memory keeps its address: its bytes go to a slot, and the slot's pages are mapped in place of the
allocator's pages (`Pages`). This needs two things. A slot has the same offset to a page boundary as the memory that is
written to it (`Slot.shift`). And the block has separate pages, which return to the system when it is freed. glibc's
large blocks have such pages with [Note: allocator]; the words in front of a block tell (`has_its_own_pages`).

Other workers may read the slot of a published tensor. From then on the owner's writes go to private pages of the
process (`Pages.freeze`). The system reports private pages, so no write is missed (`Pages.renew`). A
process that forks freezes all slots, and uses none of them again, so that neither process sees the other's writes.

Once the files exceed the page cache, all mappings are private, and returning tensors are read past the cache into
reusable `Memory`, which replaces the slot's pages. With pages of the cache, the system took a third of the processor
time, to find, clear, map and free them.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sar.comm.transport import SharedTensor
from sar.outofcore.spill import PAGE, Memory, Slot, SpillFile, Transfer, memory_at
from sar.tensors.views import as_numpy

AT_ONCE: Final = 2**22
"""Size in bytes up to which a mapping is read completely on first use. Larger ones are paged in on demand."""
READ_PAST_CACHE = 2**20
"""Minimum size in bytes of tensors that are read back past the page cache."""
_MADV_RANDOM, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 1, 22, 23  # from linux/mman.h
_IS_MMAPPED = 2  # from glibc's malloc.c
_OWN_PAGES: Final = {2, 4, 6}
"""Values of bits 61 to 63 in Linux's pagemap for private pages: in memory and not of a file, or swapped out."""
_SEES_WRITES: Final = os.access("/proc/self/pagemap", os.R_OK)
"""Whether the system reports private pages. Otherwise every tensor that was read back is written again."""
_Address, _Size = ctypes.c_void_p, ctypes.c_size_t
_libc: Final = ctypes.CDLL(None)


@dataclass(eq=False)
class Pages:
    """Memory of the process that is backed by a slot's pages: see [Note: memory of the file]."""

    slot: Slot
    address: int
    frozen: bool = field(init=False, default=False)  # whether others may read the slot, so that writes go elsewhere
    _fresh: bool = field(init=False, default=True)  # True until the page table has entries for the pages
    _private: bool = field(init=False, default=False)  # whether writes are noticed, and do not reach the slot
    memory: Memory | None = field(init=False, default=None)  # is mapped in place of the slot
    ahead: tuple[Memory, Transfer] | None = field(init=False, default=None)  # is read into

    def fill(self, slot: Slot) -> "Pages":
        """Write the present contents to a slot that nobody else reads, and map it in place."""
        file = slot.file
        file.transfer(os.pwritev, memory_at(self._begin, slot.paged), slot.begin, direct=file.disk.exceeds_cache)
        file.written += slot.nbytes
        self._map(slot, private=self._past_cache)
        self.slot, self.frozen = slot, False  # frees the old slot, which is no longer mapped
        return self

    def freeze(self) -> None:
        """Let others read the slot from now on; this process's writes no longer reach it."""
        self.renew()
        if not self._private:
            self._map(self.slot, private=True)
        self.frozen = True

    def renew(self) -> None:
        """Write the contents to the slot if they differ from it: to a new one if others may read the present one."""
        if self._changed():
            slot = self.slot
            self.fill(slot.file.slot(slot.nbytes, slot.shift) if self.frozen else slot)

    def read_ahead(self) -> bool:
        """Begin to read past the page cache, in the background; False if there is no memory left to read into."""
        if not (self._private and self._past_cache) or self.memory is not None or self.ahead is not None:
            return True
        slot, file = self.slot, self.slot.file
        memory = file.disk.memory.take(slot.room)
        if memory is not None:
            self.ahead = memory, file.start(_read_past_cache, slot, memory)
        return memory is not None

    def populate(self) -> None:
        """Read all pages into memory, as far as there is room."""
        self.read_ahead()
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            ahead[1].wait()
            if not self._changed():
                self._map(self.slot, private=True, memory=ahead[0])
        dropped = self.memory is None and self.slot.file.disk.exceeds_cache  # maybe; else the page cache has them
        if dropped:
            self.slot.will_need(0, self.slot.nbytes)
        if self._fresh or dropped:
            # Linux before 5.14 refuses, and reads page by page as they are used.
            _libc.madvise(_Address(self._begin), _Size(self.slot.paged), _MADV_POPULATE_READ)
            self._fresh = False

    def drop(self) -> None:
        """Take the pages out of memory and of the page cache. They are read again when they are used."""
        private = self.frozen or self._past_cache
        if not self._fresh or self.memory is not None or private != self._private:
            self._map(self.slot, private=private)
        os.posix_fadvise(self.slot.file.fd, self.slot.begin, self.slot.paged, os.POSIX_FADV_DONTNEED)

    def _map(self, slot: Slot, *, private: bool, memory: Memory | None = None) -> None:
        """Map a slot, or memory with its contents, at the address."""
        slot.map(mmap.MAP_PRIVATE if private else mmap.MAP_SHARED, self._begin, memory)
        self._private, self.memory, self._fresh = private, memory, True  # frees the memory mapped before

    def _changed(self) -> bool:
        """Whether the process has written to the pages, or it is not known, since they were mapped privately."""
        if not self._private:
            return False
        try:  # pages that the process has written to are private to it
            with open("/proc/self/pagemap", "rb", 0) as file:
                entries = os.pread(file.fileno(), 8 * self.slot.paged // PAGE, 8 * (self._begin // PAGE))
        except OSError:
            return True  # the system does not say
        kinds = {byte >> 5 for byte in set(entries[7::8])}
        return len(entries) // 8 * PAGE < self.slot.paged or not kinds.isdisjoint(_OWN_PAGES)

    @property
    def _past_cache(self) -> bool:
        return _SEES_WRITES and self.slot.nbytes >= READ_PAST_CACHE and self.slot.file.disk.exceeds_cache

    @property
    def _begin(self) -> int:
        return self.address - self.address % PAGE


class TrackedStorage:
    """A storage, held by weak reference, and its pages in the file."""

    def __init__(self, storage: torch.UntypedStorage, number: int) -> None:
        self.number = number  # counts the worker's storages; workers that do the same give the same numbers
        self.pages: Pages | None = None  # its pages in the file; None if it has not left memory, or left it as zeros
        self.away = False  # True from leaving memory until the next use
        self._weak = StorageWeakRef(storage)  # keeps `_cdata`, its key, from being used again for another storage

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, or None if it has been freed. Pages are forgotten then, and if it has been resized."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        if self.pages is not None:
            now = None if storage is None else (storage.data_ptr(), storage.nbytes())
            self.pages = self.pages if now == (self.pages.address, self.pages.slot.nbytes) else None
        return storage

    def come_back(self) -> None:
        """Read the storage back into memory before its first use in a turn."""
        storage, self.away = self.storage(), False
        if self.pages is not None:
            self.pages.populate()
            self.pages.slot.file.read += self.pages.slot.nbytes
        elif storage is not None:  # zeros, which will be changed; a read first would cost a copy of each page
            begin = storage.data_ptr() // PAGE * PAGE
            _libc.madvise(_Address(begin), _Size(storage.data_ptr() - begin + storage.nbytes()), _MADV_POPULATE_WRITE)

    def put_away(self, file: SpillFile) -> Pages | None:
        """Its pages in the file, with its present contents; None if it cannot leave memory."""
        storage = self.storage()
        if self.pages is not None:
            self.pages.renew()
        elif storage is not None and can_leave(storage):
            slot = file.slot(storage.nbytes(), storage.data_ptr() % PAGE)
            self.pages = Pages(slot, storage.data_ptr()).fill(slot)
        return self.pages


class Mapping(Pages):
    """A mapping of a slot at a separate address. Tensors in it keep it alive. It is read through the page cache."""

    _past_cache = False

    def __init__(self, slot: Slot, begin: int = 0, number: int = 0) -> None:
        super().__init__(slot, slot.map(mmap.MAP_SHARED) + slot.shift)
        self._fresh = False
        self.begin = begin  # offset of its tensors in the slot, in bytes
        self.number = number  # counts the worker's mappings, as `TrackedStorage.number` its storages
        self.away = False  # True from the end of its owner's turn until the next use
        if slot.nbytes <= AT_ONCE:
            slot.file.disk.prefetched += slot.nbytes
            self.visit_rows()

    def __del__(self) -> None:
        if self.slot.nbytes <= AT_ONCE:
            self.slot.file.disk.prefetched -= self.slot.nbytes
        _libc.munmap(_Address(self._begin), _Size(self.slot.paged))

    def come_back(self) -> None:
        """Prefetch a small mapping. The system pages large ones in on demand."""
        if self.away and self.slot.nbytes <= AT_ONCE:
            self.populate()
        self.away = self._fresh = False

    def visit_rows(self) -> None:
        """Turn off the system's own read-ahead, because rows are read in no regular order."""
        _libc.madvise(_Address(self._begin), _Size(self.slot.paged), _MADV_RANDOM)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor that shares the mapping's memory, so that writes to it reach the file."""
        memory: Any = (ctypes.c_char * self.slot.nbytes).from_address(self.address)
        memory.mapping = self  # keeps the mapping alive as long as the tensor
        return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=self.begin).view(tuple(shape))


@dataclass(eq=False)
class Published(SharedTensor):
    """A tensor in a slot that other workers read, from the slot's byte `begin` on."""

    slot: Slot
    begin: int = 0

    @classmethod
    def of(cls, slot: Slot, shape: Sequence[int], dtype: torch.dtype, begin: int = 0) -> "Published":
        """A tensor of the slot's bytes in a separate mapping, which is not prefetched as a whole."""
        mapping = Mapping(slot, begin)
        mapping.visit_rows()
        return cls(mapping.tensor(shape, dtype), slot, begin)

    def will_need(self, rows: Tensor | None = None) -> None:
        """Prefetch rows, or all of them if None: see [Note: reading ahead]."""
        if self.slot.file.disk.exceeds_cache and len(self.rows) and (rows is None or len(rows)):
            row = self.rows.nbytes // len(self.rows)
            first, end = (0, len(self.rows)) if rows is None else (int(i) for i in as_numpy(rows)[[0, -1]] + (0, 1))
            self.slot.will_need(self.begin + first * row, (end - first) * row)


def _read_past_cache(slot: Slot, memory: Memory) -> None:
    """Read the pages of a slot's data. The thread keeps the slot and the memory, even if nobody waits for it."""
    slot.file.transfer(os.preadv, memoryview(memory.shared)[: slot.paged], slot.begin, direct=True)


def can_leave(storage: torch.UntypedStorage) -> bool:
    """Whether pages of the file can take the place of a storage's memory."""
    elsewhere = storage.is_shared() or (torch.cuda.is_initialized() and storage.is_pinned())
    return storage.nbytes() > 0 and not elsewhere and has_its_own_pages(storage.data_ptr())


def forget_zeros(address: int, nbytes: int) -> bool:
    """Return pages of memory that is all zeros to the system, which provides zeros again; False for other contents."""
    first, last = ctypes.c_char.from_address(address), address + nbytes - 1
    if first.value != b"\0" or _libc.memcmp(_Address(address), _Address(address + 1), _Size(last - address)):
        return False
    begin, end = -(-address // PAGE) * PAGE, (last + 1) // PAGE * PAGE
    return bool(_libc.madvise(_Address(begin), _Size(end - begin), mmap.MADV_DONTNEED) == 0)


def has_its_own_pages(address: int) -> bool:
    """Whether a block of glibc has a separate mapping, by the two words in front of it (see glibc's malloc.c)."""
    before, size = (_Size * 2).from_address(address - 16)
    return bool(size & _IS_MMAPPED) and not (address - 16 - before) % PAGE and not (before + (size & ~7)) % PAGE
