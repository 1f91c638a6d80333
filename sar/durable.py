"""Files that outlast a crash of the machine, and sums by which damage to them is found."""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

SLICE_BYTES = 1 << 20
"""Of a file, under one sum."""


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(draft: Path, path: Path) -> None:
    """Give a finished file, or a directory of synced files, its name: after a crash the old one is there or the new.

    An earlier file, or an empty directory, of that name is replaced.
    """
    sync(draft)
    draft.replace(path)
    sync(path.parent)


def slice_sums(path: Path) -> Iterator[int]:
    """The CRC-32 of each `SLICE_BYTES` of a file, in order; the last slice may be shorter."""
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(SLICE_BYTES)
        view = memoryview(buffer)
        while count := file.readinto(view):
            while count < SLICE_BYTES and (more := file.readinto(view[count:])):
                count += more
            yield zlib.crc32(view[:count])
