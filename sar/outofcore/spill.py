"""The file of one virtual worker, where its tensors are while it waits for its turn.

[Note: spill file]
The file has no name: it goes with the process, however that ends. A slot is a stretch of it, freed with its last
reference and given out again. Slots are written once: who changes a tensor takes a new one, so that other workers can
go on reading what was published. Space is reserved when the file grows, so that a full disk is an error there and not
a signal where mapped memory is written. Writing goes to the page cache, and the system writes to the disk behind it; of
what is mapped the next piece is asked for ahead ([Note: reading ahead]).

[Note: memory of the file]
A tensor that leaves memory stays where it is: its bytes go to a slot, and the slot's pages are mapped in place of those
that the allocator has given it (`Pages`). So whoever has the address, in any thread, reads the same numbers before and
after, and what is written goes to the file. This asks for two things. A slot begins at the same distance from a page
boundary as the memory that it takes in (`Slot.shift`). And the allocator has given the block pages of its own, and
gives them back to the system when it is freed, as glibc's does with large blocks as set in [Note: allocator]; what it
says in front of a block tells (`has_its_own_pages`).

Others may read the slot of a tensor that has been published. From then on what its owner writes stays in pages of the
process's own (`Pages.freeze`), of which the system says that they are no longer the file's (`Pages.renew`): so no write
goes unnoticed, whoever made it. A process that forks freezes all, and gives none of its slots out again: the two may
then change what they have without the other one's notice, as with any memory.
"""

import ctypes
import errno
import mmap
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sar.errors import ConfigError, SpillError

PAGE: Final = mmap.ALLOCATIONGRANULARITY
IN_MEMORY: Final = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}
"""Types of file systems that are themselves in memory, from linux/magic.h."""
_PIECE: Final = 2**24
"""Bytes that `disk_bandwidth` writes at a time."""


_MAP_FIXED, _MADV_RANDOM, _MADV_POPULATE_READ = 0x10, 1, 22  # from linux/mman.h
_IS_MMAPPED = 2  # from glibc's malloc.c
_OWN_PAGES = (2, 4, 6)
"""In memory and not of a file, or swapped out: what Linux's pagemap says in bits 61 to 63."""
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_Address, _Size, _Offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long


class SpillFile:
    """Slots in a file without a name: see [Note: spill file].

    Args:
        folder: on a disk.

    Attributes:
        written, read: bytes so far; read are those of tensors that came back, whatever the page cache has of them.
        size: of the file.
        ahead: bytes that the system reads when asked once; it leaves out what is beyond.

    Raises:
        ConfigError: where there is no such folder, or it is in memory itself.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written = self.read = self.size = self._kept = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        kind = file_system_in_memory(folder)
        if kind is not None:
            raise ConfigError(
                f"The folder {folder} for spilled tensors is on a {kind}, which is memory itself: nothing would be "
                "saved. Name a folder on a disk."
            )
        try:
            self.fd, name = tempfile.mkstemp(prefix="sar-spill-", dir=folder)
        except OSError as error:
            raise ConfigError(f"Cannot write to {folder}, the folder for spilled tensors: {error.strerror}.") from error
        os.unlink(name)
        self.ahead = _read_at_once(os.fstat(self.fd).st_dev)

    def slot(self, nbytes: int) -> "Slot":
        """A stretch of at least so many bytes, contents undefined.

        Raises:
            SpillError: where the disk is full.
        """
        room = _size_class(nbytes) + PAGE  # where its shift may be
        if self._free[room]:
            return Slot(self, self._free[room].pop(), nbytes, room)
        try:
            os.posix_fallocate(self.fd, self.size, room)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise SpillError(
                f"There is no room in {self.folder} for {room} more bytes of spilled tensors ({error.strerror}); "
                f"{self.size} are there. Name a folder on a larger disk, or take more workers."
            ) from error
        self.size += room
        return Slot(self, self.size - room, nbytes, room)

    def free(self, begin: int, room: int) -> None:
        """Take a slot back."""
        if begin >= self._kept:
            self._free[room].append(begin)

    def keep(self) -> None:
        """Give no slot that there is now out again."""
        self._kept = self.size
        self._free.clear()

    def close(self) -> None:
        os.close(self.fd)
        self.fd = -1


class Slot:
    """So many bytes of the file; room for others once nobody refers to it.

    shift: where in the slot they begin.
    """

    def __init__(self, file: SpillFile, begin: int, nbytes: int, room: int) -> None:
        self.file = file
        self.begin = begin
        self.nbytes = nbytes
        self.shift = 0
        self._room = room

    def __del__(self) -> None:
        self.file.free(self.begin, self._room)

    def write(self, address: int, *, pages: bool = False) -> None:
        """Take in the memory from an address on; with `pages`, all of the pages that it lies on."""
        self.shift = address % PAGE
        before, nbytes = (self.shift, self.paged) if pages else (0, self.nbytes)
        memory, done = memoryview((ctypes.c_char * nbytes).from_address(address - before)), 0
        while done < nbytes:
            done += os.pwrite(self.file.fd, memory[done:], self.begin + self.shift - before + done)
        self.file.written += self.nbytes

    def read(self, address: int) -> None:
        """Fill the memory from an address on."""
        memory, done = memoryview((ctypes.c_char * self.nbytes).from_address(address)), 0
        while done < self.nbytes:
            done += os.preadv(self.file.fd, [memory[done:]], self.begin + self.shift + done)
        self.file.read += self.nbytes

    @property
    def paged(self) -> int:
        """Bytes of the pages that it lies on."""
        return -(-(self.shift + self.nbytes) // PAGE) * PAGE

    def will_need(self, begin: int, nbytes: int) -> None:
        """Have the system read a part of it, while this process does something else."""
        begin += self.begin + self.shift
        for piece in range(begin, begin + nbytes, self.file.ahead):
            length = min(self.file.ahead, begin + nbytes - piece)
            os.posix_fadvise(self.file.fd, piece, length, os.POSIX_FADV_WILLNEED)

    def mapped(self, shape: Sequence[int], dtype: torch.dtype, begin: int = 0) -> Tensor:
        """Bytes from `begin` on as a tensor without memory of its own; what is written to it is written to the file.

        For rows here and there: of a page that is not asked for ahead, only that page is read.
        """
        mapping = Mapping(self)
        mapping.visit_rows()
        return mapping.tensor(shape, dtype, begin)


class Pages:
    """Memory of the process that is a slot's: see [Note: memory of the file].

    address: where it begins.
    slot: where its bytes are.
    frozen: whether others may read the slot, so that what is written here stays here.
    """

    def __init__(self, address: int, slot: Slot) -> None:
        self.address = address
        self.slot = slot
        self.frozen = False

    def move(self) -> None:
        """Take in what is here now, and be a new slot's that nobody else reads."""
        slot = self.slot.file.slot(self.slot.nbytes)
        slot.write(self.address, pages=True)
        self._map(slot, mmap.MAP_SHARED)
        self.slot, self.frozen = slot, False  # the old one goes when its pages have gone

    def freeze(self) -> None:
        """Let others read the slot from now on, which stays as it is."""
        self.renew()
        if not self.frozen:
            self._map(self.slot, mmap.MAP_PRIVATE)
            self.frozen = True

    def renew(self) -> None:
        """Move where something has been written since others may read the slot."""
        if self.frozen and self.changed():
            self.move()

    def changed(self) -> bool:
        """Whether the process has pages of its own here; True where the system does not say."""
        try:
            with open("/proc/self/pagemap", "rb", 0) as file:
                found = os.pread(file.fileno(), 8 * self.slot.paged // PAGE, 8 * (self._begin // PAGE))
        except OSError:
            return True
        kinds = np.frombuffer(found, np.uint64) >> np.uint64(61)
        return len(kinds) * PAGE < self.slot.paged or bool(np.isin(kinds, _OWN_PAGES).any())

    def populate(self) -> None:
        """Have all of it at hand, as far as there is memory."""
        self.slot.will_need(0, self.slot.nbytes)
        # Linux before 5.14 does it bit by bit.
        _libc.madvise(_Address(self._begin), _Size(self.slot.paged), _MADV_POPULATE_READ)
        self.slot.file.read += self.slot.nbytes

    @property
    def _begin(self) -> int:
        return self.address - self.slot.shift

    def _map(self, slot: Slot, how: int) -> None:
        map_pages(slot.file, slot.begin, slot.paged, self.address - slot.shift, how)


class Mapping(Pages):
    """A slot in the memory of the process, and not given out again as long as a tensor looks at it."""

    def __init__(self, slot: Slot) -> None:
        super().__init__(map_pages(slot.file, slot.begin, slot.paged, None, mmap.MAP_SHARED) + slot.shift, slot)

    def __del__(self) -> None:
        _libc.munmap(_Address(self._begin), _Size(self.slot.paged))

    def visit_rows(self) -> None:
        """Have the system read no page beside those used and those asked for."""
        _libc.madvise(_Address(self._begin), _Size(self.slot.paged), _MADV_RANDOM)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, begin: int = 0) -> Tensor:
        """Bytes from `begin` on."""
        memory: Any = (ctypes.c_char * self.slot.nbytes).from_address(self.address)
        memory.mapping = self  # which lives as long as the tensor
        return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=begin).view(tuple(shape))


def has_its_own_pages(address: int) -> bool:
    """Whether glibc has given a block a mapping of its own; its malloc.c says so in the two words before it."""
    before, size = (_Size * 2).from_address(address - 16)
    return bool(size & _IS_MMAPPED) and not (address - 16 - before) % PAGE and not (before + (size & ~7)) % PAGE


def map_pages(file: SpillFile, begin: int, nbytes: int, address: int | None, how: int) -> int:
    """Have bytes of a file in memory, at an address in place of what is there, or wherever; return where."""
    access, how = mmap.PROT_READ | mmap.PROT_WRITE, how if address is None else how | _MAP_FIXED
    found = _libc.mmap(_Address(address), _Size(nbytes), access, how, file.fd, _Offset(begin))
    if found in (None, _Address(-1).value):
        reason = os.strerror(ctypes.get_errno())
        raise SpillError(
            f"Cannot map {nbytes} bytes of spilled tensors in {file.folder} ({reason}); is vm.max_map_count too small?"
        )
    return int(found)


class Published(NamedTuple):
    """Rows that other workers of the process may read, whoever has the turn.

    rows: shares the file's pages, or is a copy in memory where it is small or nothing is spilled.
    slot: where it is in the file, from its byte `begin` on.
    """

    rows: Tensor
    slot: Slot | None = None
    begin: int = 0

    def will_need(self, rows: Tensor | None = None) -> None:
        """These rows, ascending, are read soon; None for all. See [Note: reading ahead]."""
        if self.slot is not None and len(self.rows) and (rows is None or len(rows)):
            row = self.rows.nbytes // len(self.rows)
            first, end = (0, len(self.rows)) if rows is None else (int(rows[0]), int(rows[-1]) + 1)
            self.slot.will_need(self.begin + first * row, (end - first) * row)


def _size_class(nbytes: int) -> int:
    """Room for so many bytes: one of eight sizes between each power of two and the next, in whole pages."""
    step = max(PAGE, 1 << max(nbytes.bit_length() - 4, 0))
    return -(-max(nbytes, 1) // step) * step


def _read_at_once(device: int) -> int:
    """The larger of the two sizes that Linux goes by when it is asked to read ahead; its least default if unknown."""
    disk = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for queue in (disk / "queue", disk / ".." / "queue"):  # of a disk, or of that which this is a part of
        with suppress(OSError, ValueError):
            return 1024 * max(int((queue / name).read_text()) for name in ("read_ahead_kb", "max_sectors_kb"))
    return 2**17


def file_system_in_memory(folder: Path) -> str | None:
    """The type of the file system of a folder, where its files are in memory."""
    found = (ctypes.c_long * 64)()  # struct statfs, which begins with the type
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(folder), found) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise ConfigError(f"Cannot use {folder} as the folder for spilled tensors: {reason}. Name one that there is.")
    return IN_MEMORY.get(found[0])


class DiskBandwidth(NamedTuple):
    """Bytes per second to and from a disk."""

    write: float
    read: float


def disk_bandwidth(folder: Path, most: int = 2**28, seconds: float = 1.0) -> DiskBandwidth:
    """Measure the disk of a folder past the page cache: with a spill file that goes at once.

    Args:
        folder: on a disk.
        most: bytes to write, in pieces of 16 MB, of which there is one at least.
        seconds: to measure for, about; half of them for writing. Short bursts may be faster than a disk is for long.

    Raises:
        ConfigError: where there is no such folder, or it is in memory itself.
        SpillError: where the disk is full.
    """
    piece = torch.frombuffer(bytearray(os.urandom(_PIECE)), dtype=torch.uint8)  # some file systems compress
    file = SpillFile(folder)
    try:
        slots: list[Slot] = []
        began = now = time.perf_counter()
        while not slots or (now - began < seconds / 2 and file.written + _PIECE <= most):
            slots.append(file.slot(_PIECE))
            slots[-1].write(piece.data_ptr())
            os.fdatasync(file.fd)
            now = time.perf_counter()
        write = file.written / (now - began)
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        began = now = time.perf_counter()
        for slot in slots:
            slot.read(piece.data_ptr())
            now = time.perf_counter()
            if now - began >= seconds / 2:
                break
        return DiskBandwidth(write, file.read / (now - began))
    finally:
        file.close()
