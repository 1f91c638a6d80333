"""Checksums of the files of a part, in `sums.json` beside them, which DGL passes over; compared while files are read.

[Note: sums of parts] Each part has its own, so that the process that writes a part needs nothing from others, and a
part can be copied alone. The files are read again once they are complete, as fields are filled in at many places of a
file by turns. Sums tell damaged data, pages that a crash of the machine has left zero, and half a copy; a change on
purpose needs new sums, or none.

[Note: sums while reading]
To get bytes out of memory costs more than to sum them up where they have just been read, in the processor's cache. So a
slice that is wanted whole is read to where it is wanted, and summed up there; any other is read into a buffer, which
serves the reads of what is around. Bytes that nobody reads are compared by `sar inspect --verify` alone.
"""

import io
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from sar.errors import PartitionError
from sar.per_thread import PerThread

SUMS: Final = "sums.json"
SLICE_BYTES = 1 << 18
"""Of a file, under one sum."""
PAGE_BYTES: Final = 4096
SUM_KIND: Final = f"CRC-32, for each {SLICE_BYTES} bytes, of the sums of {PAGE_BYTES} bytes each"
MEND: Final = f"Copy it again, or partition again; if it was changed on purpose, remove {SUMS} beside it."


def slice_sum(data: memoryview) -> int:
    """32 bits that damage changes, in a tenth of the time of CRC-32.

    Eight bytes are a number. The numbers of each page are added up, modulo 2**64, and the CRC-32 is that of these sums
    and of the bytes behind the last whole page. Damage to one number changes its page's sum, and other damage all but
    surely; the same numbers in another order within a page do not.
    """
    pages = np.frombuffer(data, "<u8", len(data) // PAGE_BYTES * PAGE_BYTES // 8).reshape(-1, PAGE_BYTES // 8)
    return zlib.crc32(np.add.reduce(pages, axis=1), zlib.crc32(data[pages.nbytes :]))


def slice_sums(path: Path) -> Iterator[int]:
    """The sum of each `SLICE_BYTES` of a file, in order; the last slice may be shorter."""
    with path.open("rb") as file:
        view = memoryview(bytearray(SLICE_BYTES))
        while count := file.readinto(view):
            yield slice_sum(view[:count])


class FileSums(NamedTuple):
    """The size in bytes that a file should have, and the sums of its slices; neither is trusted."""

    path: Path
    size: Any
    sums: list[Any]

    def check_size(self) -> None:
        """Raise `PartitionError` where the file is missing, or has another size."""
        if not self.path.is_file():
            raise _damaged(f"{self.path} is missing, of which {self.path.with_name(SUMS)} has the checksums")
        if (size := self.path.stat().st_size) != self.size:
            raise _damaged(f"{self.path} has {size} bytes, but {self.size} were written")

    def problem(self) -> str:
        """Read the whole file; says how it is not what was written, if so."""
        try:
            self.check_size()
            wrong = [i for i, (a, b) in enumerate(zip_longest(slice_sums(self.path), self.sums)) if a != b]
        except OSError as error:
            return f"Cannot read {self.path} ({error.strerror}). Copy it again."
        except PartitionError as error:
            return str(error)
        return str(self.mismatch(len(wrong), wrong[0])) if wrong else ""

    def mismatch(self, count: int, first: int) -> PartitionError:
        """The error where so many slices differ, of which this is the first."""
        slices = f"{count} slices of {SLICE_BYTES} bytes, the first at byte {first * SLICE_BYTES}"
        return _damaged(f"{self.path} is not what was written: the checksum is another in {slices}")


def write_sums(folder: Path) -> None:
    """Sum up the complete files of a part."""
    paths = sorted(folder.glob("*.dgl"))
    files = {file.name: {"bytes": file.stat().st_size, "sums": list(slice_sums(file))} for file in paths}
    (folder / SUMS).write_text(json.dumps({"kind": SUM_KIND, "files": files}))


def read_sums(folder: Path) -> dict[Path, FileSums]:
    """What is known of each file of a part; nothing where it has no sums. `PartitionError` if they cannot be read."""
    path = folder / SUMS
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
        files = [FileSums(folder / Path(name).name, of["bytes"], of["sums"]) for name, of in content["files"].items()]
        if content["kind"] != SUM_KIND or not all(isinstance(known.sums, list) for known in files):
            raise ValueError(f"expected the {SUM_KIND}")
        return {known.path: known for known in files}
    except OSError as error:
        raise PartitionError(f"Cannot read {path} ({error.strerror}). Copy it again.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PartitionError(
            f"{path} holds no checksums that this version of sar knows ({error}). Copy it again, or remove it to go "
            "without."
        ) from error


def damage(folder: Path) -> list[str]:
    """What is wrong with the files of a part, by their checksums; also that it has none."""
    if not (folder / SUMS).exists():
        return [f"{folder} has no {SUMS}: there are no checksums to verify its files by, as sar writes them."]
    try:
        files = read_sums(folder).values()
    except PartitionError as error:
        return [str(error)]
    return [problem for file in files if (problem := file.problem())]


def _damaged(problem: str) -> PartitionError:
    return PartitionError(f"{problem}. {MEND}")


_known: PerThread[Mapping[Path, FileSums]] = PerThread({})


@contextmanager
def verifying(folder: Path) -> Iterator[None]:
    """Compare with the checksums of a part, where it has any, what is read of its files inside, or `PartitionError`."""
    known = read_sums(folder)
    for sums in known.values():
        sums.check_size()
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
        """Read to a buffer; `PartitionError` where bytes around what is read are not what was written."""
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
            raise self._sums.mismatch(1, number)

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
