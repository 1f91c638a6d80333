"""The file of one worker, where its tensors are while it waits for its turn.

[Note: spill file]
The file has no name: it goes with the process, however that ends. A slot is a stretch of it, freed with its last
reference and given out again. Slots are written once: who changes a tensor takes a new one, so that other workers can
go on reading what was published. Space is reserved when the file grows, so that a full disk is an error there and not
a signal where mapped memory is written.

[Note: memory of the file]
A tensor that leaves memory stays where it is: its bytes go to a slot, and the slot's pages are mapped in place of those
that the allocator has given it (`Pages`). This asks for two things. A slot begins at the same distance from a page
boundary as the memory that it takes in (`Slot.shift`). And the block has pages of its own, which go back to the system
when it is freed, as glibc's large blocks have with [Note: allocator]; what stands in front of a block tells
(`has_its_own_pages`).

Others may read the slot of a tensor that has been published. From then on what its owner writes stays in pages of the
process's own (`Pages.freeze`), of which the system says that they are no longer the file's (`Pages.renew`): so no write
goes unnoticed. A process that forks freezes all, and gives none of its slots out again, so that neither of the two sees
what the other changes.
"""

import ctypes
import errno
import mmap
import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from sar.comm.transport import SharedTensor
from sar.errors import ConfigError, SpillError
from sar.tensor_views import as_numpy

PAGE: Final = mmap.ALLOCATIONGRANULARITY
AT_ONCE: Final = 2**22
"""Bytes up to which all of a mapping is read when it is used; else the system reads ahead, up to 8 MB, where it can."""
READ_AHEAD: Final = 2**17
"""Bytes that Linux reads when asked once, at least, with any disk's settings; it leaves out what is beyond."""
QUIET_TURNS: Final = 8
"""Turns in which nothing is read from a disk, after which it is not asked to read ahead, until something is."""
_IN_MEMORY: Final = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}
"""Types of file systems that are themselves in memory, from linux/magic.h."""
_MAP_FIXED, _MADV_RANDOM, _MADV_POPULATE_READ = 0x10, 1, 22  # from linux/mman.h
_IS_MMAPPED = 2  # from glibc's malloc.c
_OWN_PAGES: Final = {2, 4, 6}
"""In memory and not of a file, or swapped out: what Linux's pagemap says in bits 61 to 63."""
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_Address, _Size, _Offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long


class SpillFile:
    """A folder's file for slots, without a name: see [Note: spill file]."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written = self.read = 0  # bytes so far; read are those that came back, from wherever the system had them
        self.quiet = 0  # turns since the process last read from a disk
        self.size = self._kept = 0  # bytes of the file, and of its part that stays as it is
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        found = (ctypes.c_long * 64)()  # struct statfs, which begins with the type
        if _libc.statfs(os.fsencode(folder), found) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise ConfigError(
                f"Cannot use {folder} as the folder for spilled tensors: {reason}. Name one that there is."
            )
        if (kind := _IN_MEMORY.get(found[0])) is not None:
            raise ConfigError(
                f"The folder {folder} for spilled tensors is on a {kind}, which is memory itself: nothing would be "
                "saved. Name a folder on a disk."
            )
        try:
            self.fd, name = tempfile.mkstemp(prefix="sar-spill-", dir=folder)
        except OSError as error:
            raise ConfigError(f"Cannot write to {folder}, the folder for spilled tensors: {error.strerror}.") from error
        os.unlink(name)

    def slot(self, nbytes: int) -> "Slot":
        """A stretch of at least so many bytes, contents undefined; raises a SpillError where the disk is full."""
        # One of eight sizes between each power of two and the next, in whole pages; and one where its shift may be.
        step = max(PAGE, 1 << max(nbytes.bit_length() - 4, 0))
        room = -(-max(nbytes, 1) // step) * step + PAGE
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

    @property
    def is_read(self) -> bool:
        """Whether the process has read from a disk in the last turns."""
        return self.quiet < QUIET_TURNS

    def close(self) -> None:
        os.close(self.fd)
        self.fd = -1


class Slot:
    """So many bytes of the file, which begin at `shift`; room for others once nobody refers to it."""

    def __init__(self, file: SpillFile, begin: int, nbytes: int, room: int) -> None:
        self.file = file
        self.begin = begin
        self.nbytes = nbytes
        self.shift = 0
        self._room = room

    def __del__(self) -> None:
        self.file.free(self.begin, self._room)

    @property
    def paged(self) -> int:
        """Bytes of the pages that it lies on."""
        return -(-(self.shift + self.nbytes) // PAGE) * PAGE

    def write(self, address: int, *, pages: bool = False) -> None:
        """Take in the memory from an address on; with `pages`, all of the pages that it lies on."""
        self.shift = address % PAGE
        before, nbytes = (self.shift, self.paged) if pages else (0, self.nbytes)
        memory, done = memoryview((ctypes.c_char * nbytes).from_address(address - before)), 0
        while done < nbytes:
            done += os.pwrite(self.file.fd, memory[done:], self.begin + self.shift - before + done)
        self.file.written += self.nbytes

    def will_need(self, begin: int, nbytes: int) -> None:
        """Have the system read a part of it, while this process does something else."""
        if not self.file.is_read:
            return
        begin += self.begin + self.shift
        end = begin + nbytes
        for piece in range(begin, end, READ_AHEAD):
            os.posix_fadvise(self.file.fd, piece, min(READ_AHEAD, end - piece), os.POSIX_FADV_WILLNEED)

    def map(self, how: int, address: int | None = None) -> int:
        """Have its pages in memory, at an address in place of what is there, or wherever; return where."""
        access, how = mmap.PROT_READ | mmap.PROT_WRITE, how if address is None else how | _MAP_FIXED
        found = _libc.mmap(_Address(address), _Size(self.paged), access, how, self.file.fd, _Offset(self.begin))
        if found in (None, _Address(-1).value):
            reason = os.strerror(ctypes.get_errno())
            raise SpillError(
                f"Cannot map {self.paged} bytes of spilled tensors in {self.file.folder} ({reason}); is "
                "vm.max_map_count too small?"
            )
        return int(found)


class Pages:
    """Memory of the process, from `address` on, that is a slot's: see [Note: memory of the file]."""

    def __init__(self, slot: Slot, address: int) -> None:
        self.slot = slot
        self.address = address
        self.frozen = False  # whether others may read the slot, so that what is written here stays here
        self._fresh = True  # whether the system has yet to connect these pages with the slot's

    def fill(self, slot: Slot) -> "Pages":
        """Take in what is here now, and be another slot's that nobody else reads."""
        slot.write(self.address, pages=True)
        slot.map(mmap.MAP_SHARED, self._begin)
        self.slot, self.frozen, self._fresh = slot, False, True  # the old one goes when its pages have gone
        return self

    def freeze(self) -> None:
        """Let others read the slot from now on, which stays as it is."""
        self.renew()
        if not self.frozen:
            self.slot.map(mmap.MAP_PRIVATE, self._begin)
            self.frozen = self._fresh = True

    def renew(self) -> None:
        """Move where something has been written since others may read the slot."""
        if self.frozen and self._changed():
            self.fill(self.slot.file.slot(self.slot.nbytes))

    def populate(self) -> None:
        """Have all of it at hand, as far as there is memory."""
        self.slot.will_need(0, self.slot.nbytes)
        if self._fresh or self.slot.file.is_read:
            self._advise(_MADV_POPULATE_READ)  # Linux before 5.14 does it bit by bit
            self._fresh = False

    @property
    def _begin(self) -> int:
        return self.address - self.address % PAGE

    def _advise(self, advice: int) -> None:
        _libc.madvise(_Address(self._begin), _Size(self.slot.paged), advice)

    def _changed(self) -> bool:
        """Whether the process has pages of its own here; True where the system does not say."""
        try:
            with open("/proc/self/pagemap", "rb", 0) as file:
                found = os.pread(file.fileno(), 8 * self.slot.paged // PAGE, 8 * (self._begin // PAGE))
        except OSError:
            return True
        kinds = {byte >> 5 for byte in set(found[7::8])}
        return len(found) // 8 * PAGE < self.slot.paged or not kinds.isdisjoint(_OWN_PAGES)


class Mapping(Pages):
    """A slot in memory that is nobody else's, and not given out again as long as a tensor looks at it."""

    def __init__(self, slot: Slot, begin: int = 0) -> None:
        super().__init__(slot, slot.map(mmap.MAP_SHARED) + slot.shift)
        self.begin = begin  # the slot's byte with which tensors begin
        self.away = False  # whether its owner's turn has passed since it was used
        if slot.nbytes <= AT_ONCE:
            self.visit_rows()

    def __del__(self) -> None:
        _libc.munmap(_Address(self._begin), _Size(self.slot.paged))

    def come_back(self) -> None:
        """Be at hand, for whoever uses it now; the system reads what is large as it is used."""
        if self.away and self.slot.nbytes <= AT_ONCE:
            self.populate()
        self.away = False

    def visit_rows(self) -> None:
        """Have the system read no page beside those used and those asked for."""
        self._advise(_MADV_RANDOM)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor without memory of its own; what is written to it is written to the file."""
        memory: Any = (ctypes.c_char * self.slot.nbytes).from_address(self.address)
        memory.mapping = self  # which lives as long as the tensor
        return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=self.begin).view(tuple(shape))


class Published(SharedTensor):
    """Rows that share the pages of a slot, from its byte `begin` on."""

    def __init__(self, rows: Tensor, slot: Slot, begin: int = 0) -> None:
        super().__init__(rows)
        self.slot = slot
        self.begin = begin

    @classmethod
    def of(cls, slot: Slot, shape: Sequence[int], dtype: torch.dtype, begin: int = 0) -> "Published":
        """Bytes of a slot; of pages that are not asked for ahead, only those used are read."""
        mapping = Mapping(slot, begin)
        mapping.visit_rows()
        return cls(mapping.tensor(shape, dtype), slot, begin)

    def will_need(self, rows: Tensor | None = None) -> None:
        """See [Note: reading ahead]."""
        if self.slot.file.is_read and len(self.rows) and (rows is None or len(rows)):
            row = self.rows.nbytes // len(self.rows)
            first, end = (0, len(self.rows)) if rows is None else (int(i) for i in as_numpy(rows)[[0, -1]] + (0, 1))
            self.slot.will_need(self.begin + first * row, (end - first) * row)


def has_its_own_pages(address: int) -> bool:
    """Whether glibc has given a block a mapping of its own; its malloc.c says so in the two words before it."""
    before, size = (_Size * 2).from_address(address - 16)
    return bool(size & _IS_MMAPPED) and not (address - 16 - before) % PAGE and not (before + (size & ~7)) % PAGE
