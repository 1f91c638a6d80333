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
"""

import ctypes
import errno
import mmap
import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from sar.comm.transport import SharedTensor
from sar.errors import ConfigError, SpillError
from sar.tensors.views import as_numpy

PAGE: Final = mmap.ALLOCATIONGRANULARITY
AT_ONCE: Final = 2**22
"""Size in bytes up to which a mapping is read whole on first use. The system pages larger ones in on demand."""
READ_AHEAD: Final = 2**17
"""Bytes that Linux reads at least for one request. With some disks' settings it ignores the rest of a longer one."""
_IN_MEMORY: Final = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}
"""File systems that keep their files in memory, by type; from linux/magic.h."""
_WRITE_AND_WAIT = 7  # flags of sync_file_range, from linux/fs.h
_MAP_FIXED, _MADV_RANDOM, _MADV_POPULATE_READ = 0x10, 1, 22  # from linux/mman.h
_IS_MMAPPED = 2  # from glibc's malloc.c
_OWN_PAGES: Final = {2, 4, 6}
"""Values of bits 61 to 63 in Linux's pagemap for private pages: in memory and not of a file, or swapped out."""
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_Address, _Size, _Offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long


class Disk:
    """What the spill files of a process share: threads that read and write, and how much the page cache can hold.

    Args:
        room: bytes of the files above which they are read and written past the page cache, or dropped from it.
        limit: bytes that the process may take.
    """

    def __init__(self, room: float, limit: float = float("inf")) -> None:
        self.threads = ThreadPoolExecutor(2, "sar-disk")  # one for tensors that leave, one for letters
        self.size = 0  # bytes of all files
        self.prefetched = 0  # bytes of small mappings, which are read whole on first use
        self.latest: tuple[int, list[int]] = 0, []  # the latest turn, and the storages that it has read back
        self.room, self.limit = room, limit

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
        if self._free[room]:
            return Slot(self, self._free[room].pop(), nbytes, room)
        try:
            os.posix_fallocate(self.fd, self.size, room)
        except OSError as error:
            raise self.failed(error) from error
        self.size += room
        self.disk.size += room
        return Slot(self, self.size - room, nbytes, room)

    def failed(self, error: OSError) -> SpillError:
        """The error for the user when the file cannot grow, or be read or written."""
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return SpillError(f"The file of spilled tensors in {self.folder} cannot be read or written: {error}.")
        return SpillError(
            f"There is no room in {self.folder} for more spilled tensors ({error.strerror}); {self.size} bytes are "
            "there. Name a folder on a larger disk, or take more workers."
        )

    def forget(self) -> None:
        """Take the file's pages out of the page cache, but for those that are mapped and in use."""
        # Pages that are not written yet would stay. `fdatasync` would also flush the disk's own cache.
        _libc.sync_file_range(self.fd, _Offset(0), _Offset(0), _WRITE_AND_WAIT)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def free(self, begin: int, room: int) -> None:
        """Let a slot's range be used again."""
        if begin >= self._kept:
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
    _room: int
    shift: int = field(init=False, default=0)

    def __del__(self) -> None:
        self.file.free(self.begin, self._room)

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

    def map(self, how: int, address: int | None = None) -> int:
        """Map the slot's pages, over an existing mapping if an address is passed; return the address."""
        access, how = mmap.PROT_READ | mmap.PROT_WRITE, how if address is None else how | _MAP_FIXED
        result = _libc.mmap(_Address(address), _Size(self.paged), access, how, self.file.fd, _Offset(self.begin))
        if result in (None, _Address(-1).value):
            reason = os.strerror(ctypes.get_errno())
            raise SpillError(
                f"Cannot map {self.paged} bytes of spilled tensors in {self.file.folder} ({reason}); is "
                "vm.max_map_count too small?"
            )
        return int(result)


@dataclass(eq=False)
class Pages:
    """Memory of the process that is backed by a slot's pages: see [Note: memory of the file]."""

    slot: Slot
    address: int
    frozen: bool = field(init=False, default=False)  # whether others may read the slot, so that writes go elsewhere
    _fresh: bool = field(init=False, default=True)  # True until the page table has entries for the pages
    _filled: bool = field(init=False, default=False)  # whether the slot has contents

    def fill(self, slot: Slot) -> "Pages":
        """Write the present contents to another slot, which nobody else reads, and map that one in place."""
        slot.write(self.address, pages=True)
        slot.map(mmap.MAP_SHARED, self._begin)
        self.slot, self.frozen = slot, False  # frees the old slot, which is no longer mapped
        self._fresh = self._filled = True
        return self

    def freeze(self) -> None:
        """Let others read the slot from now on; this process's writes no longer reach it."""
        self.renew()
        if not self.frozen:
            self.slot.map(mmap.MAP_PRIVATE, self._begin)
            self.frozen = self._fresh = True

    def renew(self) -> None:
        """Move to a new slot if this process has written to a frozen one."""
        if not self._filled:  # an error came first
            self.fill(self.slot)
        if not self.frozen:
            return
        try:  # pages that the process has written to are private to it
            with open("/proc/self/pagemap", "rb", 0) as file:
                entries = os.pread(file.fileno(), 8 * self.slot.paged // PAGE, 8 * (self._begin // PAGE))
        except OSError:
            entries = b""  # the system does not say
        kinds = {byte >> 5 for byte in set(entries[7::8])}
        if len(entries) // 8 * PAGE < self.slot.paged or not kinds.isdisjoint(_OWN_PAGES):
            self.fill(self.slot.file.slot(self.slot.nbytes))

    def populate(self) -> None:
        """Read all pages into memory, as far as there is room."""
        self.slot.will_need(0, self.slot.nbytes)
        if self._fresh or self.slot.file.disk.exceeds_cache:
            # Linux before 5.14 refuses, and reads page by page as they are used.
            _libc.madvise(_Address(self._begin), _Size(self.slot.paged), _MADV_POPULATE_READ)
            self._fresh = False

    def drop(self) -> None:
        """Take the pages out of memory and of the page cache. They are read again when they are used."""
        if not self._fresh:
            self.slot.map(mmap.MAP_PRIVATE if self.frozen else mmap.MAP_SHARED, self._begin)
            self._fresh = True
        os.posix_fadvise(self.slot.file.fd, self.slot.begin, self.slot.paged, os.POSIX_FADV_DONTNEED)

    @property
    def _begin(self) -> int:
        return self.address - self.address % PAGE


class Mapping(Pages):
    """A mapping of a slot at an address of its own. Tensors in it keep it alive."""

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


def has_its_own_pages(address: int) -> bool:
    """Whether a block of glibc's has a mapping of its own, by the two words in front of it (see glibc's malloc.c)."""
    before, size = (_Size * 2).from_address(address - 16)
    return bool(size & _IS_MMAPPED) and not (address - 16 - before) % PAGE and not (before + (size & ~7)) % PAGE
