"""Checksums of the files of a partition, in `sums.json` next to them, which DGL ignores.

Each partition has a separate file, so it can be copied by itself. Checksums detect damaged data, pages that are zero
after a crash of the machine, and incomplete copies. They must be removed after intended changes.
"""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sar.errors import PartitionError

SUMS: Final = "sums.json"
SUM_KIND: Final = "CRC-32"
_BUFFER_BYTES = 1 << 18  # fits in the processor's cache


def file_sum(path: Path) -> int:
    """The CRC-32 of a file."""
    crc, buffer = 0, memoryview(bytearray(_BUFFER_BYTES))
    with path.open("rb") as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
    return crc


def write_sums(folder: Path) -> None:
    """Write the checksums of the complete files of a partition."""
    files = {file.name: [file.stat().st_size, file_sum(file)] for file in sorted(folder.glob("*.dgl"))}
    (folder / SUMS).write_text(json.dumps({"kind": SUM_KIND, "files": files}))


def check_sums(folder: Path) -> None:
    """Raise `PartitionError` if a file of a partition does not match its checksum; without checksums, do nothing."""
    if problem := next(find_damage(folder), None):
        raise PartitionError(problem)


def find_damage(folder: Path) -> Iterator[str]:
    """Describe the files of a partition that do not match their checksums."""
    path = folder / SUMS
    if not path.is_file():
        return
    try:
        content = json.loads(path.read_text())
        if content["kind"] != SUM_KIND:
            raise ValueError(f"expected the {SUM_KIND}")
        files = {folder / Path(key).name: (size, crc) for key, (size, crc) in content["files"].items()}
    except OSError as error:
        yield f"Cannot read {path} ({error.strerror}). Copy it again."
        return
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        yield (
            f"{path} holds no checksums that this version of sar knows ({error}). Copy it again, or remove it to skip "
            "this check."
        )
        return
    mend = f"Copy it again, or partition again; if it was changed on purpose, remove {SUMS} next to it."
    for file, (size, crc) in files.items():
        try:
            if not file.is_file():
                yield f"{file} is missing, but {path} has its checksum. {mend}"
            elif (found := file.stat().st_size) != size:
                yield f"{file} has {found} bytes, but {size} were written. {mend}"
            elif file_sum(file) != crc:
                yield f"{file} is not what was written: its checksum does not match. {mend}"
        except OSError as error:
            yield f"Cannot read {file} ({error.strerror}). Copy it again."
