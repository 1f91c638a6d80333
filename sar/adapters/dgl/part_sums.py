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
from typing import Any

from sar.durable import SLICE_BYTES, slice_sums
from sar.errors import PartitionError

SUMS = "sums.json"
_KIND = f"CRC-32 of each {SLICE_BYTES} bytes"


def write_sums(folder: Path) -> None:
    """Sum up the complete files of a part."""
    files = {
        file.name: {"bytes": file.stat().st_size, "sums": list(slice_sums(file))}
        for file in sorted(folder.glob("*.dgl"))
    }
    (folder / SUMS).write_text(json.dumps({"kind": _KIND, "files": files}))


def damage(folder: Path) -> Iterator[str]:
    """What is wrong with each file of a part that its sums do not fit; nothing where the part has no sums.

    Raises:
        PartitionError: the sums themselves, or a file, cannot be read.
    """
    for file, known in _read(folder / SUMS).items():
        if not file.is_file():
            yield f"{file} is missing, of which {folder / SUMS} has the checksums"
            continue
        try:
            size = file.stat().st_size
            if size != known.get("bytes"):
                yield f"{file} has {size} bytes, but {known.get('bytes')} were written"
            elif wrong := [i for i, (a, b) in enumerate(zip_longest(slice_sums(file), known["sums"])) if a != b]:
                slices = f"{len(wrong)} slices of {SLICE_BYTES} bytes, the first at byte {wrong[0] * SLICE_BYTES}"
                yield f"{file} is not what was written: the checksum is another in {slices}"
        except OSError as error:
            raise PartitionError(f"Cannot read {file} ({error.strerror}). Copy it again.") from error


def check_sums(folder: Path) -> None:
    """Refuse a part with files that are not what was written.

    Raises:
        PartitionError: there is one, or it cannot be read.
    """
    for problem in damage(folder):
        raise PartitionError(f"{problem}. {MEND}")


MEND = f"Copy it again, or partition again; if it was changed on purpose, remove {SUMS} beside it."


def _read(path: Path) -> dict[Path, dict[str, Any]]:
    """What is known of each file; nothing of it is trusted."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
        files = {path.parent / Path(name).name: known for name, known in content["files"].items()}
        if content["kind"] != _KIND or not all(isinstance(known["sums"], list) for known in files.values()):
            raise ValueError(f"expected the {_KIND}")
        return files
    except OSError as error:
        raise PartitionError(f"Cannot read {path} ({error.strerror}). Copy it again.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PartitionError(
            f"{path} holds no checksums that this version of sar knows ({error}). Copy it again, or remove it to go "
            "without."
        ) from error
