"""The spill file of one worker, which holds its tensors while other workers have their turns.

[Note: spill file]
The file has no name, so it disappears with the process, however it ends. A slot is a range of the file. It is freed
with its last reference and then reused. Slots are written once: a changed tensor takes a new slot, and other workers
can still read the published one. Space is reserved when the file grows, so a full disk raises an error at this point,
instead of a signal when mapped memory is written.

Small transfers and mappings use the page cache. Once the files exceed it, large transfers bypass it.
"""

import ctypes
import errno
import mmap
import os
import tempfile
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

from sar.config import Config
from sar.errors import ConfigError, SpillError

PAGE: Final = mmap.ALLOCATIONGRANULARITY
CACHED = 3
"""Size of the spill files, in multiples of `at_hand`, up to which they use the page cache."""
POOLED = 1
"""Size of the pool for tensors that are read past the page cache, in multiples of `at_hand`."""
SPARE = 0.25
"""Space of free slots to keep on disk, relative to the maximum in use, because reserving space again takes time."""
READ_AHEAD: Final = 2**17
"""Bytes that Linux reads at least for one request. With some disks' settings it ignores the rest of a longer one."""
_KEPT_IN_MEMORY: Final = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}
"""File systems without a disk, by type; from linux/magic.h."""
_PUNCH_HOLE = 3  # flags of fallocate, from linux/falloc.h, that keep the file's size
_WRITE_AND_WAIT = 7  # flags of sync_file_range, from linux/fs.h
_MAP_FIXED = 0x10  # from linux/mman.h
_Address, _Size, _Offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _Address


class Disk:
    """Shared state of a process's spill files: threads that read and write, and the capacity of the page cache.

    Args:
        at_hand: limit in bytes for rows that all partitions read.
        limit: limit in bytes for the process.
    """

    def __init__(self, at_hand: float, limit: float = float("inf")) -> None:
        self.memory = MemoryPool(POOLED * at_hand)
        self.size = 0  # bytes of all files
        self.prefetched = 0  # bytes of small mappings, which are read whole on first use
        self.latest: tuple[int, list[int], set[int]] = 0, [], set()  # a turn; storages and mappings that it has used
        self.room, self.limit = CACHED * at_hand, limit
        self.threads = ThreadPoolExecutor(2, "sar-disk")  # one for tensors that leave, one for letters
        self.started: WeakSet[Future[None]] = WeakSet()  # transfers, for `close`
        self.lock = threading.RLock()  # of taking slots
        self.unused: OrderedDict[tuple[SpillFile, int], int] = OrderedDict()  # space of free slots, the oldest first
        self.space = self.most = 0  # bytes that all files have on the disk, and that slots have used at most

    @property
    def exceeds_cache(self) -> bool:
        """Whether the page cache cannot hold the files."""
        return self.size > self.room

    def allocate(self, file: "SpillFile", begin: int, nbytes: int) -> None:
        """Reserve disk space for a range of a file. Space of free slots above `SPARE` is returned."""
        self.most = max(self.most, self.space - sum(self.unused.values()) + nbytes)
        self._give_back(self.space + nbytes - (1 + SPARE) * self.most)
        try:
            os.posix_fallocate(file.fd, begin, nbytes)
        except OSError:
            if not self.unused:
                raise
            self._give_back(float("inf"))
            os.posix_fallocate(file.fd, begin, nbytes)
        self.space += nbytes

    def _give_back(self, nbytes: float) -> None:
        """Return the space of free slots to the disk, the longest free first."""
        while self.unused and nbytes > 0:
            (file, begin), room = self.unused.popitem(last=False)
            _libc.fallocate(file.fd, _PUNCH_HOLE, _Offset(begin), _Offset(room))
            self.space -= room
            nbytes -= room

    def close(self) -> bool:
        """End the threads. Returns False if a transfer still runs after `Config.timeout`."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        return not wait([each for each in self.started if not each.cancelled()], Config.timeout).not_done


@dataclass
class Transfer:
    """Reads and writes of a file in one of the disk's threads."""

    file: "SpillFile"
    future: "Future[None]"

    def wait(self) -> None:
        """Wait for the end. Raises a SpillError if the transfer has failed, or takes more than `Config.timeout`."""
        if not wait([self.future], Config.timeout).done:
            raise self.file.failed(OSError(errno.ETIMEDOUT, f"no answer within {Config.timeout:g} s"))
        self.future.result()


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
        if (kind := _KEPT_IN_MEMORY.get(status[0])) is not None:
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

    def slot(self, nbytes: int, shift: int = 0) -> "Slot":
        """A slot of at least `nbytes` bytes, contents undefined. Raises a SpillError if the disk is full."""
        # Round up to one of eight sizes between powers of two, in whole pages, so that slots can be used again. One
        # page more leaves room for the shift.
        step = max(PAGE, 1 << max(nbytes.bit_length() - 4, 0))
        room = -(-max(nbytes, 1) // step) * step + PAGE
        with self.disk.lock:
            free = self._free[room]
            begin = free.pop() if free else self.size
            if self.disk.unused.pop((self, begin), None) is None:
                try:
                    self.disk.allocate(self, begin, room)
                except OSError as error:
                    if begin < self.size:
                        free.append(begin)
                    raise self.failed(error, room) from error
            if begin == self.size:
                self.size += room
                self.disk.size += room
        return Slot(self, begin, room, nbytes, shift)

    def failed(self, error: OSError, more: int = 0) -> SpillError:
        """The error for the user when the file cannot grow by `more` bytes, or be read or written."""
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return SpillError(f"The file of spilled tensors in {self.folder} cannot be read or written: {error}.")
        return SpillError(
            f"There is no space in {self.folder} for {more / 1e6:,.1f} MB of spilled tensors in addition to the "
            f"present {self.disk.space / 1e6:,.1f} MB ({error.strerror}). Choose a folder on a larger disk."
        )

    def start(self, work: Callable[..., None], *args: Any) -> Transfer:
        """Call a function that reads or writes in one of the disk's threads."""
        future = self.disk.threads.submit(work, *args)
        self.disk.started.add(future)
        return Transfer(self, future)

    def transfer(self, move: Callable[..., int], memory: memoryview, begin: int, *, direct: bool = False) -> None:
        """Move memory to the file by `os.pwritev`, or from it by `os.preadv`, at an offset of the file.

        If `direct`, bypass the page cache if the file system supports it; memory, sizes and offset are whole pages.
        Raises a SpillError if the disk fails.
        """
        fd, done = self.fd if self.direct is None or not direct else self.direct, 0
        try:
            while done < len(memory):
                count = move(fd, [memory[done:]], begin + done)
                if not count:
                    raise OSError("it ends too early")
                done += count
        except OSError as error:
            raise self.failed(error) from error

    def forget(self) -> None:
        """Remove the file's pages from the page cache, except mapped pages in use."""
        # Pages that are not written yet would stay. `fdatasync` would also flush the disk's own cache.
        _libc.sync_file_range(self.fd, _Offset(0), _Offset(0), _WRITE_AND_WAIT)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def free(self, begin: int, room: int) -> None:
        """Let a slot's range be used again. It keeps its space on the disk, until slots of other sizes need it."""
        if begin >= self._kept and self.fd >= 0:  # without the lock, as freeing anything may come here
            self.disk.unused[self, begin] = room
            self._free[room].append(begin)

    def keep(self) -> None:
        """Never use the present slots again, because a forked process may read them."""
        with self.disk.lock:
            self._kept = self.size
            for begin in chain.from_iterable(self._free.values()):
                self.disk.unused.pop((self, begin), None)
            self._free.clear()

    def close(self) -> None:
        self.keep()
        for fd in (self.fd, self.direct):
            if fd is not None:
                os.close(fd)
        self.fd, self.direct = -1, None


@dataclass(eq=False)
class Slot:
    """A range of the file with `nbytes` bytes of data from `shift` on. Its space is freed with its last reference."""

    file: SpillFile
    begin: int
    room: int  # of the range
    nbytes: int
    shift: int  # below a page

    def __del__(self) -> None:
        self.file.free(self.begin, self.room)

    @property
    def paged(self) -> int:
        """Size in bytes of the pages that the data lies on."""
        return -(-(self.shift + self.nbytes) // PAGE) * PAGE

    def will_need(self, begin: int, nbytes: int) -> None:
        """Ask the system to read a part of the slot in the background."""
        begin += self.begin + self.shift
        end = begin + nbytes
        for piece in range(begin, end, READ_AHEAD):
            os.posix_fadvise(self.file.fd, piece, min(READ_AHEAD, end - piece), os.POSIX_FADV_WILLNEED)

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
    """Memory for reading tensors, in an anonymous file, so that it can be mapped anywhere.

    Args:
        limit: bytes at most.
    """

    def __init__(self, limit: float) -> None:
        self.fd = -1  # opened when memory is first taken
        self.size = 0  # bytes that take memory
        self._limit, self._end = limit, 0  # bytes; end of the file
        self.unused: defaultdict[int, list[tuple[int, mmap.mmap]]] = defaultdict(list)  # to be taken again, by size

    def take(self, room: int) -> "Memory | None":
        """Memory of `room` bytes, contents undefined; None if there is none left."""
        if self.unused[room]:
            return Memory(self, *self.unused[room].pop())
        if self.size + room > self._limit:
            self.free()
        if self.size + room > self._limit:
            return None
        if self.fd < 0:
            self.fd = os.memfd_create("sar")
        os.truncate(self.fd, self._end + room)
        shared = mmap.mmap(self.fd, room, offset=self._end)
        self.size, self._end = self.size + room, self._end + room
        return Memory(self, self._end - room, shared)

    def free(self) -> None:
        """Return free memory to the system."""
        for size, places in self.unused.items():
            for _, shared in places:
                shared.madvise(mmap.MADV_REMOVE)
                self.size -= size
            places.clear()

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


@dataclass(eq=False)
class Memory:
    """Memory from the pool, at the offset `begin` of its file. It is taken again after its last reference."""

    pool: MemoryPool
    begin: int
    shared: mmap.mmap

    def __del__(self) -> None:
        self.pool.unused[len(self.shared)].append((self.begin, self.shared))


def memory_at(address: int, nbytes: int) -> memoryview:
    """Memory of the process, which the caller keeps alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address))
