"""Which files an input consists of, their format, and which columns of a table are taken; checks of IDs in them."""

import re
from collections.abc import Sequence
from glob import has_magic
from os import PathLike
from pathlib import Path

import numpy as np

from sar.common_tuples import StrPath
from sar.errors import ConfigError, PartitionError
from sar.partition.graph_source import first_outside
from sar.storage.arrays import Array
from sar.storage.graph_files import GRAPH_FILE_MARK
from sar.storage.tensor_files import TENSOR_FILE_MARK

Files = StrPath | Sequence[StrPath]
"""A file, a directory, a glob pattern, or a list of files in order."""
Wanted = Sequence[str | int] | None
"""The columns of a table, by name or number from 0; None: found out."""

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
_DGL_STARTS = [mark.to_bytes(8, "little") for mark in (GRAPH_FILE_MARK, TENSOR_FILE_MARK)]
ALL_COLUMNS = "*"
ADVICE = " IDs that are strings, or have gaps, are numbered with --ids map (ids='map')."
END_NAMES = (("src", "dst"), ("source", "destination"), ("source", "target"), ("src_id", "dst_id"))


def find_files(files: Files) -> list[Path]:
    """The files meant, or `PartitionError`: of a directory or pattern by name, with numbers in names by value."""
    if not isinstance(files, str | PathLike):
        found = [Path(file) for file in files]
    else:
        path = Path(files)
        if path.is_dir():
            found = sorted(filter(_visible, path.iterdir()), key=_by_number)
        elif has_magic(str(path)) and not path.exists():
            named = Path(path.anchor).glob(str(path.relative_to(path.anchor)))
            found = sorted(filter(_visible, named), key=_by_number)
        else:
            found = [path]
    if not found:
        raise PartitionError(f"'{files}' names no files; expected at least one.")
    for file in found:
        if not file.is_file():
            raise PartitionError(f"there is no file '{file}'; check its name, and the directory it is relative to.")
    return found


def detect_format(files: Sequence[Path]) -> str:
    """One of `FORMATS`, by the names of files or their first bytes; `ConfigError` where it is unknown, or several."""
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
        if start in _DGL_STARTS:
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


def find_column(path: Path, names: Sequence[str], wanted: str | int) -> int:
    """The number of a column, from its name or number, also in digits; `ConfigError` where there is not one such."""
    if isinstance(wanted, str) and names.count(wanted) == 1:
        return names.index(wanted)
    number = int(wanted) if isinstance(wanted, int) or wanted.isdecimal() else -1
    if 0 <= number < len(names) and wanted not in names:
        return number
    raise ConfigError(f"{path} has no column {wanted!r}; expected one of the columns {', '.join(names)}.")


def feature_columns(path: Path, names: Sequence[str], wanted: Sequence[str] | None) -> list[int]:
    """The numbers of the columns of a feature.

    `wanted` has names or numbers; `ALL_COLUMNS` alone: all; None: the only one. `path` is for errors. `ConfigError`
    where there are no such columns, or none were named where there are several.
    """
    if wanted is None and len(names) > 1:
        raise ConfigError(
            f"{path} has {len(names)} columns, {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}; say which "
            f"of them are the feature: '{path.name}#{names[0]}', with several names '#{names[0]},{names[1]}', or "
            f"all with '#{ALL_COLUMNS}'."
        )
    if wanted is None or list(wanted) == [ALL_COLUMNS]:
        return list(range(len(names)))
    return [find_column(path, names, column) for column in wanted]


def edge_columns(path: Path, names: Sequence[str], wanted: Wanted, shown: str) -> tuple[int, int]:
    """The columns of sources and destinations.

    `wanted` has names or numbers from 0; None: `src` and `dst` or the like, else the only two. `path` and `shown`, the
    columns in words, are for errors: `ConfigError` where there are no such columns, or more than two and none named.
    """
    if wanted is None:
        wanted = next((ends for ends in END_NAMES if {*ends} <= {*names}), (0, 1))
        if isinstance(wanted[0], int) and len(names) != 2:
            raise ConfigError(
                f"{path} has {len(names)} columns, {shown}; expected two, source and destination. Name these two "
                "(columns=, --columns), or the delimiter between them (delimiter=, --delimiter)."
            )
    source, destination = (find_column(path, names, column) for column in wanted)
    if source == destination:
        raise ConfigError(f"sources and destinations are both to come from column {names[source]!r} of {path}.")
    return source, destination


def id_columns(path: Path, names: Sequence[str], wanted: Wanted, shown: str, of_edges: bool) -> list[int]:
    """The columns of IDs: of edges as in `edge_columns`, else the only one, or the one that is wanted."""
    if of_edges:
        return [*edge_columns(path, names, wanted, shown)]
    chosen = feature_columns(path, names, None if wanted is None else [*map(str, wanted)])
    if len(chosen) != 1:
        raise ConfigError(f"{path}: {len(chosen)} columns were named for the IDs of nodes; expected one.")
    return chosen


def check_edges(src: Array, dst: Array, limits: tuple[int, int], where: str, first_row: int) -> None:
    """Raise `PartitionError` where an edge, of (n,) int64 each, ends at no node.

    `limits` are the numbers of nodes of the source and the destination type; `where` and `first_row` the file, and the
    row in it of the first edge.
    """
    for end, ids, limit in zip(("source", "destination"), (src, dst), limits, strict=True):
        row = first_outside(ids, limit)
        if row is not None:
            expected = f"0 to {limit - 1}" if limit < np.iinfo(np.int64).max else "0 or more"
            raise PartitionError(
                f"{where}, row {first_row + row} (from 0): the {end} is node {ids[row]}; expected {expected}. Correct "
                f"the file, or the number of nodes.{ADVICE}"
            )
