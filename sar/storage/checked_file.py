"""Files that are compared with the checksums of their part while they are read.

[Note: sums while reading]
To get bytes out of memory costs more than to sum them up where they have just been read, in the processor's cache. So a
slice that is wanted whole is read to where it is wanted, and summed up there; any other is read into a buffer, which
serves the reads of what is around. Bytes that nobody reads are compared by `sar inspect --verify` alone.
"""

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sar.per_thread import PerThread
from sar.storage.durable import SLICE_BYTES, slice_sum
from sar.storage.part_sums import FileSums, read_sums, refused

_NO_SUMS: Mapping[Path, FileSums] = {}
_known = PerThread(_NO_SUMS)


@contextmanager
def comparing(folder: Path) -> Iterator[None]:
    """Compare with the checksums of a part, where it has any, what is read of its files inside.

    Raises:
        PartitionError: a file is missing, or has another size; so do reads inside where the bytes are others.
    """
    known = read_sums(folder)
    for sums in known.values():
        if (problem := sums.misfit()) is not None:
            raise refused(problem)
    with _known.set_to(known):
        yield


def sums_of(path: Path) -> FileSums | None:
    """The checksums that a file is to be compared with."""
    return _known.value.get(path)


class CheckedFile(io.RawIOBase):
    """A file that was opened without a buffer. Every read is whole, but at the end of the file."""

    def __init__(self, file: Any, sums: FileSums) -> None:
        self._file = file
        self._sums = sums
        self._at, self._size = 0, os.fstat(file.fileno()).st_size
        self._buffer = memoryview(bytearray(min(SLICE_BYTES, self._size)))
        self._held = -1  # the slice in the buffer

    def readinto(self, target: Any) -> int:
        """Read to a buffer.

        Raises:
            PartitionError: bytes around what is read are not what was written.
        """
        wanted, done = memoryview(target).cast("B"), 0
        while done < len(wanted) and self._at < self._size:
            number, begin = divmod(self._at, SLICE_BYTES)
            end = min(SLICE_BYTES, self._size - number * SLICE_BYTES)
            count = min(end - begin, len(wanted) - done)
            if count == end:
                self._read_slice(number, wanted[done : done + count])
            else:
                if self._held != number:
                    self._held = -1
                    self._read_slice(number, self._buffer[:end])
                    self._held = number
                wanted[done : done + count] = self._buffer[begin : begin + count]
            self._at, done = self._at + count, done + count
        return done

    def _read_slice(self, number: int, place: memoryview) -> None:
        self._file.seek(number * SLICE_BYTES)
        done = 0
        while done < len(place) and (count := self._file.readinto(place[done:])):
            done += count
        if done < len(place) or [slice_sum(place)] != self._sums.sums[number : number + 1]:
            raise refused(self._sums.differ(1, number))

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return int(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        super().close()
