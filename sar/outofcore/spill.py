"""The spill file of one worker, which holds its tensors while other workers have their turns.

[Note: spill file]
The file has no name, so it goes with the process, however that ends. A slot is a range of the file. It is freed with
its last reference and then used again. Slots are written once: a change of a tensor takes a new slot, so that other
workers can go on reading the published one. Space is reserved when the file grows, so that a full disk raises an error
there, instead of a signal when mapped memory is written.

[Note: memory of the file]
A tensor that leaves memory keeps its address: its bytes go to a slot, and the slot's pages are mapped in place of the
allocator's pages (`Pages`). This needs two things. A slot has the same offset to a page boundary as the memory that is
written to it (`Slot.shift`). And the block has pages of its own, which go back to the system when it is freed. glibc's
large blocks have such pages with [Note: allocator]; the words in front of a block tell (`has_its_own_pages`).

Other workers may read the slot of a published tensor. From then on the owner's writes go to private pages of the
process (`Pages.freeze`). The system reports which pages are private, so no write goes unnoticed (`Pages.renew`). A
process that forks freezes all slots, and uses none of them again, so that neither process sees the other's writes.

Once the files exceed the page cache, all mappings are private, and what comes back is read past the cache into `Memory`
that the process uses again and again, which takes the place of the slot's pages. With pages of the cache, the system
took a third of the processor time, to find, clear, map and free them.
"""

import ctypes
import errno
import mmap
import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from sar.comm.transport import SharedTensor
from sar.config import Config
from sar.errors import ConfigError, SpillError
from sar.tensors.views import as_numpy

PAGE: Final = mmap.ALLOCATIONGRANULARITY
AT_ONCE: Final = 2**22
"""Size in bytes up to which a mapping is read whole on first use. The system pages larger ones in on demand."""
CACHED = 3
"""Multiple of the bytes at hand up to which the page cache holds the spill files; else they go past it."""
IN_MEMORY = 1
"""Multiple of the bytes at hand that tensors are read into past the page cache."""
GIVEN_BACK = 2**24
"""Bytes of a slot from which its space is free for others while it is not used."""
READ_PAST_CACHE = 2**20
"""Bytes of a tensor from which it comes back past the page cache."""
READ_AHEAD: Final = 2**17
"""Bytes that Linux reads at least for one request. With some disks' settings it ignores the rest of a longer one."""
_IN_MEMORY: Final = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}
"""File systems that keep their files in memory, by type; from linux/magic.h."""
_PUNCH_HOLE = 3  # flags of fallocate, from linux/falloc.h, that keep the file's size
_WRITE_AND_WAIT = 7  # flags of sync_file_range, from linux/fs.h
_MAP_FIXED, _MADV_RANDOM, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 0x10, 1, 22, 23  # from linux/mman.h
_IS_MMAPPED = 2  # from glibc's malloc.c
_OWN_PAGES: Final = {2, 4, 6}
"""Values of bits 61 to 63 in Linux's pagemap for private pages: in memory and not of a file, or swapped out."""
_SEES_WRITES: Final = os.access("/proc/self/pagemap", os.R_OK)
"""Whether the system tells which pages are private. Without that, all that comes back would be written again."""
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_Address, _Size, _Offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long


class Disk:
    """What the spill files of a process share: threads that read and write, and how much the page cache can hold.

    Args:
        at_hand: bytes that rows read by all partitions may take.
        limit: bytes that the process may take.
    """

    def __init__(self, at_hand: float, limit: float = float("inf")) -> None:
        self.threads = ThreadPoolExecutor(2, "sar-disk")  # one for tensors that leave, one for letters
        self.memory = MemoryPool(IN_MEMORY * at_hand)
        self.size = 0  # bytes of all files
        self.prefetched = 0  # bytes of small mappings, which are read whole on first use
        self.latest: tuple[int, list[int]] = 0, []  # the latest turn, and the storages that it has read back
        self.room, self.limit = CACHED * at_hand, limit

    @property
    def exceeds_cache(self) -> bool:
        """Whether the page cache cannot hold the files."""
        return self.size > self.room


class SpillFile:
    """An unnamed file in a folder, divided into slots: see [Note: spill file]."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self.folder, self.disk = folder, disk
        self.written = self.read = 0  # bytes so far; `read` includes those that the page cache still had
        self.size = self._kept = 0  # bytes of the file, and of its first part that is never used again
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        status = (ctypes.c_long * 64)()  # struct statfs, which begins with the type
        if _libc.statfs(os.fsencode(folder), status) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise ConfigError(
                f"Cannot use {folder} as the folder for spilled tensors: {reason}. Choose an existing folder."
            )
        if (kind := _IN_MEMORY.get(status[0])) is not None:
            raise ConfigError(
                f"The folder {folder} for spilled tensors is on a {kind}, which is memory itself: nothing would be "
                "saved. Choose a folder on a disk."
            )
        try:
            self.fd, name = tempfile.mkstemp(prefix="sar-spill-", dir=folder)
        except OSError as error:
            raise ConfigError(f"Cannot write to {folder}, the folder for spilled tensors: {error.strerror}.") from error
        os.unlink(name)
        try:  # without the page cache, if the file system can
            self.direct: int | None = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_DIRECT)
        except OSError:
            self.direct = None

    def slot(self, nbytes: int) -> "Slot":
        """A slot of at least `nbytes` bytes, contents undefined. Raises a SpillError if the disk is full."""
        # Round up to one of eight sizes between powers of two, in whole pages, so that slots can be used again. One
        # page more leaves room for the shift.
        step = max(PAGE, 1 << max(nbytes.bit_length() - 4, 0))
        room = -(-max(nbytes, 1) // step) * step + PAGE
        free = self._free[room]
        begin = free.pop() if free else self.size  # other threads free slots, too
        if begin == self.size or room >= GIVEN_BACK:
            try:
                os.posix_fallocate(self.fd, begin, room)
            except OSError as error:
                if begin < self.size:
                    free.append(begin)
                raise self.failed(error) from error
        if begin == self.size:
            self.size += room
            self.disk.size += room
        return Slot(self, begin, nbytes, room)

    def failed(self, error: OSError) -> SpillError:
        """The error for the user when the file cannot grow, or be read or written."""
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return SpillError(f"The file of spilled tensors in {self.folder} cannot be read or written: {error}.")
        return SpillError(
            f"There is no room in {self.folder} for more spilled tensors ({error.strerror}); {self.size} bytes are "
            "there. Name a folder on a larger disk, or take more workers."
        )

    def finish(self, transfer: "Future[None]") -> None:
        """Wait for a transfer. Raises a SpillError if it has failed."""
        try:
            transfer.result(Config.timeout)
        except OSError as error:
            raise self.failed(error) from error

    def forget(self) -> None:
        """Take the file's pages out of the page cache, but for those that are mapped and in use."""
        # Pages that are not written yet would stay. `fdatasync` would also flush the disk's own cache.
        _libc.sync_file_range(self.fd, _Offset(0), _Offset(0), _WRITE_AND_WAIT)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def free(self, begin: int, room: int) -> None:
        """Let a slot's range be used again. A large one gives its space back to the disk, for slots of other sizes."""
        if begin >= self._kept:
            if room >= GIVEN_BACK and self.fd >= 0:  # before another thread can take the slot and write to it
                _libc.fallocate(self.fd, _PUNCH_HOLE, _Offset(begin), _Offset(room))
            self._free[room].append(begin)

    def keep(self) -> None:
        """Never use the present slots again, because a forked process may read them."""
        self._kept = self.size
        self._free.clear()

    def close(self) -> None:
        for fd in (self.fd, self.direct):
            if fd is not None:
                os.close(fd)
        self.fd, self.direct = -1, None


@dataclass(eq=False)
class Slot:
    """A range of the file with `nbytes` bytes of data from `shift` on. Its space is freed with its last reference."""

    file: SpillFile
    begin: int
    nbytes: int
    room: int  # of the range
    shift: int = field(init=False, default=0)

    def __del__(self) -> None:
        self.file.free(self.begin, self.room)

    @property
    def paged(self) -> int:
        """Size in bytes of the pages that the data lies on."""
        return -(-(self.shift + self.nbytes) // PAGE) * PAGE

    def write(self, address: int, *, pages: bool = False) -> None:
        """Write the memory at an address to the file; with `pages`, the whole pages that it lies on."""
        self.shift = address % PAGE
        before, nbytes = (self.shift, self.paged) if pages else (0, self.nbytes)
        memory, done = memoryview((ctypes.c_char * nbytes).from_address(address - before)), 0
        direct = self.file.direct if pages and self.file.disk.exceeds_cache else None
        fd = self.file.fd if direct is None else direct
        while done < nbytes:
            done += os.pwrite(fd, memory[done:], self.begin + self.shift - before + done)
        self.file.written += self.nbytes

    def will_need(self, begin: int, nbytes: int) -> None:
        """Ask the system to read a part of the slot in the background, unless its cache should have it."""
        if not self.file.disk.exceeds_cache:
            return
        begin += self.begin + self.shift
        end = begin + nbytes
        for piece in range(begin, end, READ_AHEAD):
            os.posix_fadvise(self.file.fd, piece, min(READ_AHEAD, end - piece), os.POSIX_FADV_WILLNEED)

    def read(self, memory: "Memory") -> None:
        """Read the pages that the data lies on, past the page cache."""
        fd, pages, done = self.file.direct or self.file.fd, memoryview(memory.shared)[: self.paged], 0
        while done < self.paged:
            count = os.preadv(fd, [pages[done:]], self.begin + done)
            if not count:
                raise OSError("the file of spilled tensors ends too early")
            done += count

    def map(self, how: int, address: int | None = None, memory: "Memory | None" = None) -> int:
        """Map the slot's pages, or `memory`, over an existing mapping if an address is passed; return the address."""
        access, how = mmap.PROT_READ | mmap.PROT_WRITE, how if address is None else how | _MAP_FIXED
        fd, begin = (self.file.fd, self.begin) if memory is None else (memory.pool.fd, memory.begin)
        result = _libc.mmap(_Address(address), _Size(self.paged), access, how, fd, _Offset(begin))
        if result in (None, _Address(-1).value):
            reason = os.strerror(ctypes.get_errno())
            raise SpillError(
                f"Cannot map {self.paged} bytes of spilled tensors in {self.file.folder} ({reason}); is "
                "vm.max_map_count too small?"
            )
        return int(result)


class MemoryPool:
    """Memory that tensors are read into, in a file of the system's that has no disk, so that it can be mapped anywhere.

    Args:
        limit: bytes at most.
    """

    def __init__(self, limit: float) -> None:
        self.fd = os.memfd_create("sar")
        self.size = 0  # bytes that take memory
        self._limit, self._end = limit, 0  # bytes; end of the file
        self._free: defaultdict[int, list[tuple[int, mmap.mmap]]] = defaultdict(list)  # by size

    def take(self, room: int) -> "Memory | None":
        """Memory of `room` bytes, contents undefined; None if there is none left."""
        if self._free[room]:
            return Memory(self, *self._free[room].pop())
        if self.size + room > self._limit:
            self.free()
        if self.size + room > self._limit:
            return None
        os.truncate(self.fd, self._end + room)
        shared = mmap.mmap(self.fd, room, offset=self._end)
        self.size, self._end = self.size + room, self._end + room
        return Memory(self, self._end - room, shared)

    def give(self, memory: "Memory") -> None:
        """Let memory be taken again."""
        self._free[len(memory.shared)].append((memory.begin, memory.shared))

    def free(self) -> None:
        """Return to the system what is not taken."""
        for size, places in self._free.items():
            for _, shared in places:
                shared.madvise(mmap.MADV_REMOVE)
                self.size -= size
            places.clear()

    def __del__(self) -> None:
        os.close(self.fd)


@dataclass(eq=False)
class Memory:
    """Memory from the pool, at the offset `begin` of its file. It is taken again after its last reference."""

    pool: MemoryPool
    begin: int
    shared: mmap.mmap

    def __del__(self) -> None:
        self.pool.give(self)


@dataclass(eq=False)
class Pages:
    """Memory of the process that is backed by a slot's pages: see [Note: memory of the file]."""

    slot: Slot
    address: int
    frozen: bool = field(init=False, default=False)  # whether others may read the slot, so that writes go elsewhere
    _fresh: bool = field(init=False, default=True)  # True until the page table has entries for the pages
    _filled: bool = field(init=False, default=False)  # whether the slot has contents
    _private: bool = field(init=False, default=False)  # whether writes are noticed, and do not reach the slot
    memory: Memory | None = field(init=False, default=None)  # is mapped in place of the slot
    _ahead: "tuple[Memory, Future[None]] | None" = field(init=False, default=None)  # memory that is read into

    def fill(self, slot: Slot) -> "Pages":
        """Write the present contents to another slot, which nobody else reads, and map that one in place."""
        slot.write(self.address, pages=True)
        self._map(slot, private=self._past_cache)
        self.slot, self.frozen, self._filled = slot, False, True  # frees the old slot, which is no longer mapped
        return self

    def freeze(self) -> None:
        """Let others read the slot from now on; this process's writes no longer reach it."""
        self.renew()
        if not self._private:
            self._map(self.slot, private=True)
        self.frozen = True

    def renew(self) -> None:
        """Write the contents to the slot if they differ from it: to a new one if others may read the present one."""
        if not self._filled:  # an error came first
            self.fill(self.slot)
        elif self._changed():
            self.fill(self.slot.file.slot(self.slot.nbytes) if self.frozen else self.slot)

    def read_ahead(self) -> bool:
        """Begin to read past the page cache, in the background; False if there is no memory left to read into."""
        if not (self._private and self._past_cache) or self.memory is not None or self._ahead is not None:
            return True
        memory = self.slot.file.disk.memory.take(self.slot.room)
        if memory is not None:
            self._ahead = memory, self.slot.file.disk.threads.submit(self.slot.read, memory)
        return memory is not None

    def forget(self) -> None:
        """Give up what was read ahead."""
        self._ahead = None

    def populate(self) -> None:
        """Read all pages into memory, as far as there is room."""
        self.read_ahead()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self.slot.file.finish(ahead[1])
            if not self._changed():
                self._map(self.slot, private=True, memory=ahead[0])
        if self.memory is None:
            self.slot.will_need(0, self.slot.nbytes)
        if self._fresh or (self.memory is None and self.slot.file.disk.exceeds_cache):
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


class Mapping(Pages):
    """A mapping of a slot at an address of its own. Tensors in it keep it alive. It is read through the page cache."""

    _past_cache = False

    def __init__(self, slot: Slot, begin: int = 0) -> None:
        super().__init__(slot, slot.map(mmap.MAP_SHARED) + slot.shift)
        self._filled, self._fresh = True, False
        self.begin = begin  # offset of its tensors in the slot, in bytes
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
        """A tensor of the slot's bytes in a mapping of its own, which is not prefetched whole."""
        mapping = Mapping(slot, begin)
        mapping.visit_rows()
        return cls(mapping.tensor(shape, dtype), slot, begin)

    def will_need(self, rows: Tensor | None = None) -> None:
        """Prefetch rows, or all of them if None: see [Note: reading ahead]."""
        if self.slot.file.disk.exceeds_cache and len(self.rows) and (rows is None or len(rows)):
            row = self.rows.nbytes // len(self.rows)
            first, end = (0, len(self.rows)) if rows is None else (int(i) for i in as_numpy(rows)[[0, -1]] + (0, 1))
            self.slot.will_need(self.begin + first * row, (end - first) * row)


def forget_zeros(address: int, nbytes: int) -> bool:
    """Return the pages of memory that is all zeros to the system, which gives zeros again; False if it is not."""
    first, last = ctypes.c_char.from_address(address), address + nbytes - 1
    if first.value != b"\0" or _libc.memcmp(_Address(address), _Address(address + 1), _Size(last - address)):
        return False
    begin, end = -(-address // PAGE) * PAGE, (last + 1) // PAGE * PAGE
    return bool(_libc.madvise(_Address(begin), _Size(end - begin), mmap.MADV_DONTNEED) == 0)


def populate_zeros(address: int, nbytes: int) -> None:
    """Take memory for zeros that will be changed; a read first would cost a copy of each page."""
    begin = address // PAGE * PAGE
    _libc.madvise(_Address(begin), _Size(address + nbytes - begin), _MADV_POPULATE_WRITE)


def has_its_own_pages(address: int) -> bool:
    """Whether a block of glibc's has a mapping of its own, by the two words in front of it (see glibc's malloc.c)."""
    before, size = (_Size * 2).from_address(address - 16)
    return bool(size & _IS_MMAPPED) and not (address - 16 - before) % PAGE and not (before + (size & ~7)) % PAGE
