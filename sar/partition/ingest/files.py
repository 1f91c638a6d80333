"""Which files an input consists of, and their format."""

import re
from collections.abc import Sequence
from glob import has_magic
from os import PathLike
from pathlib import Path

from sar.errors import ConfigError, PartitionError

Files = str | PathLike[str] | Sequence[str | PathLike[str]]
"""A file, a directory, a glob pattern, or a list of files in order."""

_SUFFIXES = {
    "text": (".csv", ".tsv", ".txt", ".edges", ".edgelist", ".el"),
    "parquet": (".parquet", ".pq"),
    "npy": (".npy",),
    "npz": (".npz",),
    "raw": (".bin", ".raw", ".i32", ".i64"),
    "dgl": (".dgl",),
    "chunked": (".json",),
}
FORMATS = tuple(_SUFFIXES)
_DGL_GRAPHS, _DGL_TENSORS = bytes.fromhex("3fa1b446f04f2edd"), bytes.fromhex("3f44a23fbe9f5add")


def find_files(files: Files) -> list[Path]:
    """The files meant: of a directory or a pattern in the order of their names, numbers within names by value.

    Raises:
        PartitionError: there is no such file, or none at all.
    """
    if not isinstance(files, str | PathLike):
        found = [Path(file) for file in files]
    else:
        path = Path(files)
        if path.is_dir():
            found = sorted((file for file in path.iterdir() if _visible(file)), key=_by_number)
        elif has_magic(str(path)) and not path.exists():
            named = Path(path.anchor).glob(str(path.relative_to(path.anchor)))
            found = sorted((file for file in named if _visible(file)), key=_by_number)
        else:
            found = [path]
    if not found:
        raise PartitionError(f"'{files}' names no files; expected at least one.")
    for file in found:
        if not file.is_file():
            raise PartitionError(f"there is no file '{file}'; check its name, and the directory it is relative to.")
    return found


def detect_format(files: Sequence[Path]) -> str:
    """One of `FORMATS`, by the names of files, and where these may mean two things by their first bytes.

    Raises:
        ConfigError: the format is unknown, or not the same for all files.
    """
    found = {_format_of(file) for file in files}
    if len(found) > 1:
        raise ConfigError(
            f"'{files[0]}' and the files beside it are of different formats ({', '.join(sorted(found))}); expected one "
            "format for all. Name the files by a pattern, for instance 'edges/*.csv'."
        )
    return found.pop()


def _format_of(file: Path) -> str:
    suffixes = [suffix for suffix in file.suffixes if suffix != ".gz"]
    suffix = suffixes[-1].lower() if suffixes else ""
    found = next((name for name, endings in _SUFFIXES.items() if suffix in endings), None)
    if found in (None, "raw"):
        with file.open("rb") as opened:
            start = opened.read(8)
        if start in (_DGL_GRAPHS, _DGL_TENSORS):
            return "dgl"
    if found is None:
        endings = ", ".join(ending for endings in _SUFFIXES.values() for ending in endings)
        raise ConfigError(
            f"cannot tell the format of '{file}' by its name; expected an ending among {endings}. Name the format: one "
            f"of {', '.join(FORMATS)}."
        )
    return found


def _visible(file: Path) -> bool:
    """Not hidden, and not one of the marks (`_SUCCESS`) that writers of many files leave beside them."""
    return file.is_file() and not file.name.startswith((".", "_"))


def _by_number(file: Path) -> list[tuple[int, str]]:
    """Sorts part-2 before part-10."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", str(file))]
