"""Sums of the files of a part, in `sums.json` beside them, which DGL passes over.

[Note: sums of parts] Each part has its own, so that the process that writes a part needs nothing from others, and a
part can be copied alone. The files are read again once they are complete: fields are filled in slice by slice at many
places of a file, in an order that depends on the memory given, and a slice of the file has pieces of several of them.
Data that arrives damaged, pages that a crash of the machine has left zero, or half a copy are told from it; a change
on purpose needs new sums, or none.
"""

import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from sar.errors import PartitionError
from sar.storage.durable import SLICE_BYTES, SUM_KIND, slice_sums

SUMS = "sums.json"


class FileSums(NamedTuple):
    """What is known of a file; nothing of it is trusted.

    size: in bytes.
    sums: of its slices.
    """

    path: Path
    size: Any
    sums: list[Any]

    def misfit(self) -> str | None:
        """What is wrong with the file, as far as can be told without reading it."""
        if not self.path.is_file():
            return f"{self.path} is missing, of which {self.path.with_name(SUMS)} has the checksums"
        if (size := self.path.stat().st_size) != self.size:
            return f"{self.path} has {size} bytes, but {self.size} were written"
        return None

    def differ(self, count: int, first: int) -> str:
        """What to say where so many slices differ, of which this is the first."""
        slices = f"{count} slices of {SLICE_BYTES} bytes, the first at byte {first * SLICE_BYTES}"
        return f"{self.path} is not what was written: the checksum is another in {slices}"


def write_sums(folder: Path) -> None:
    """Sum up the complete files of a part."""
    files = {
        file.name: {"bytes": file.stat().st_size, "sums": list(slice_sums(file))}
        for file in sorted(folder.glob("*.dgl"))
    }
    (folder / SUMS).write_text(json.dumps({"kind": SUM_KIND, "files": files}))


def damage(folder: Path) -> Iterator[str]:
    """What is wrong with each file of a part that its sums do not fit; nothing where the part has no sums.

    Raises:
        PartitionError: the sums themselves, or a file, cannot be read.
    """
    for path, known in read_sums(folder).items():
        if (problem := known.misfit()) is not None:
            yield problem
            continue
        try:
            wrong = [i for i, (a, b) in enumerate(zip_longest(slice_sums(path), known.sums)) if a != b]
        except OSError as error:
            raise PartitionError(f"Cannot read {path} ({error.strerror}). Copy it again.") from error
        if wrong:
            yield known.differ(len(wrong), wrong[0])


def refused(problem: str) -> PartitionError:
    """The error for a file that is not what was written."""
    return PartitionError(f"{problem}. {MEND}")


MEND = f"Copy it again, or partition again; if it was changed on purpose, remove {SUMS} beside it."


def read_sums(folder: Path) -> dict[Path, FileSums]:
    """What is known of each file of a part; nothing where it has no sums.

    Raises:
        PartitionError: the sums cannot be read.
    """
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
