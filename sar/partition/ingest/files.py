"""Which files an input consists of, their format, and which columns of a table are taken; checks of IDs in them."""

import re
from collections.abc import Sequence
from glob import has_magic
from os import PathLike
from pathlib import Path
from typing import Literal

from sar.common_tuples import StrPath
from sar.data.graph_files import GRAPH_FILE_MARK
from sar.data.tensor_files import TENSOR_FILE_MARK
from sar.errors import ConfigError, PartitionError

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
MATRIX_MARKET = (
    "is a MatrixMarket file, whose first row is a size and whose IDs begin at 1; expected a table of edges. "
    "Convert it: A = scipy.io.mmread(FILE), then numpy.save('edges.npy', numpy.stack([A.row, A.col], axis=1))."
)
_PACKED = (".bz2", ".xz", ".zst", ".zip", ".7z")


class NotNumbersError(PartitionError):
    """A feature has values that are no numbers of the type asked for."""


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


def with_format(files: Files, format: str | None) -> tuple[list[Path], str]:
    """The files meant and their format: one of `FORMATS`, by their names or first bytes if none is given.

    Raises `PartitionError` if there are no such files, `ConfigError` if the format is unknown, or they have several.
    """
    found = find_files(files)
    formats = {format} if format else {_format_of(file) for file in found}
    if len(formats) > 1:
        raise ConfigError(
            f"'{found[0]}' and the files beside it are of different formats ({', '.join(sorted(formats))}); expected "
            "one format for all. Name the files by a pattern, for instance 'edges/*.csv'."
        )
    return found, formats.pop()


def _format_of(file: Path) -> str:
    suffixes = [suffix for suffix in file.suffixes if suffix != ".gz"]
    suffix = suffixes[-1].lower() if suffixes else ""
    found = next((name for name, endings in _SUFFIXES.items() if suffix in endings), None)
    if found in (None, "raw"):
        with file.open("rb") as opened:
            start = opened.read(8)
        if start in _DGL_STARTS:
            return "dgl"
    if suffix in _PACKED:
        raise ConfigError(f"'{file}' is packed; expected a file that is not, or one packed by gzip (.gz). Unpack it.")
    if suffix == ".mtx":
        raise ConfigError(f"'{file}' {MATRIX_MARKET}")
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
    """The number of a column, from its name or number, also in digits; `ConfigError` if there is not one such."""
    if isinstance(wanted, str) and names.count(wanted) == 1:
        return names.index(wanted)
    number = int(wanted) if isinstance(wanted, int) or wanted.isdecimal() else -1
    if 0 <= number < len(names) and wanted not in names:
        return number
    raise ConfigError(f"{path} has no column {wanted!r}; expected one of the columns {', '.join(names)}.")


class ColumnChoice:
    """Finds the columns to read in each file of a table: the same ones, by their names if the files name them.

    Args:
        of: `edges`: two columns, source and destination; by default `src` and `dst` or the like, else the only two.
            `ids`: one column. `feature`: any number; by default the only one.
        wanted: names, or numbers from 0; of a feature also ranges such as `0-1432`, and `ALL_COLUMNS` alone.
    """

    def __init__(self, of: Literal["edges", "ids", "feature"], wanted: Wanted) -> None:
        self._of, self._wanted = of, None if wanted is None else [*wanted]
        self._first: Path | None = None  # the first file that has rows or names
        self._all: Sequence[str] = ()  # its columns
        self._chosen: list[int] = []  # in the first file
        self._has_names = False

    @property
    def by_name(self) -> bool:
        """Whether a column is wanted by a name that is no number, so that the files must name their columns."""
        return any(isinstance(one, str) and not re.fullmatch(r"[\d-]+|\*", one) for one in self._wanted or ())

    def numbers(self, path: Path, names: Sequence[str], shown: str, *, has_names: bool = True) -> list[int]:
        """The numbers of the columns in one more file, whose columns are called `names`.

        `has_names` is False if these are only numbers, and `shown` describes the columns in errors. Raises
        `ConfigError` if the columns are not there, if it is unclear which are meant, or if they differ between files.
        """
        if self._first is None:
            self._first, self._all, self._has_names = path, names, has_names
            self._chosen = self._find(path, names, shown)
            return self._chosen
        if has_names and not self._has_names:
            raise ConfigError(f"{path} has names of columns, {shown}, and {self._first} has none; name them in both.")
        if list(names) == list(self._all) or (not has_names and len(names) == len(self._all)):
            return self._chosen
        expected = [self._all[i] for i in self._chosen]
        if not all(names.count(name) == 1 for name in expected) or (
            self._wanted == [ALL_COLUMNS] and len(names) != len(self._all)
        ):
            raise ConfigError(
                f"{path} has the columns {', '.join(names[:10])}; expected {', '.join(expected[:10])} among them, as "
                f"in {self._first}. Write all files with the same columns."
            )
        return [names.index(name) for name in expected]

    def _find(self, path: Path, names: Sequence[str], shown: str) -> list[int]:
        wanted = self._wanted
        if self._of == "edges":
            return self._find_ends(path, names, shown)
        if wanted is None and len(names) > 1:
            raise ConfigError(
                f"{path} has {len(names)} columns, {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}; say "
                f"which of them are the feature: '{path.name}#{names[0]}', with several names '#{names[0]},{names[1]}',"
                f" or all with '#{ALL_COLUMNS}'."
            )
        found: list[int] = []
        for column in [] if wanted is None or wanted == [ALL_COLUMNS] else wanted:
            ends = None if column in names else re.fullmatch(r"(\d{1,9})-(\d{1,9})", str(column))
            if ends is None:
                found.append(find_column(path, names, column))
            else:
                first, last = (find_column(path, names, end) for end in ends.groups())
                found += range(first, last + 1)
        if wanted is None or wanted == [ALL_COLUMNS]:
            found = list(range(len(names)))
        if self._of == "ids" and len(found) != 1:
            raise ConfigError(f"{path}: {len(found)} columns were named for the IDs of nodes; expected one.")
        if not found:
            raise ConfigError(f"{path}: the columns {shown} have none that is wanted; expected at least one.")
        return found

    def _find_ends(self, path: Path, names: Sequence[str], shown: str) -> list[int]:
        wanted = self._wanted
        if wanted is None:
            lower = [name.casefold() for name in names]
            pairs = (*END_NAMES, ("from", "to"), ("u", "v")) if len(names) == 2 else END_NAMES
            ends = next((ends for ends in pairs if all(lower.count(end) == 1 for end in ends)), None)
            if ends is not None:
                return [lower.index(end) for end in ends]
            if len(names) != 2:
                raise ConfigError(
                    f"{path} has {len(names)} columns, {shown}; expected two, source and destination. Name these two "
                    "(columns=, --columns), or the delimiter between them (delimiter=, --delimiter)."
                )
            wanted = [0, 1]
        source, destination = (find_column(path, names, column) for column in wanted)
        if source == destination:
            raise ConfigError(f"sources and destinations are both to come from column {names[source]!r} of {path}.")
        return [source, destination]
