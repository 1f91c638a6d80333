"""Which files an input consists of, their format, and the options of reading them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from glob import has_magic
from os import PathLike, fspath
from pathlib import Path

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
MATRIX_MARKET = (
    "is a MatrixMarket file, whose first row is a size and whose IDs begin at 1; expected a table of edges. "
    "Convert it: A = scipy.io.mmread(FILE), then numpy.save('edges.npy', numpy.stack([A.row, A.col], axis=1))."
)
_PACKED = (".bz2", ".xz", ".zst", ".zip", ".7z")


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


@dataclass(frozen=True)
class TextFormat:
    """The layout of text files."""

    delimiter: str | None = None  # the only one; None: found out from the first line, and blanks may come in runs
    header: bool | None = None  # whether the first line names the columns; None: if none of its fields is a number
    comment: str | None = None  # begins lines to pass over, "" none; None: # and %, but only before the first row
    numbers_are_rows: bool = False  # whether a first line of 0, 1, 2 is certainly no header
    notes: list[str] = field(default_factory=list, compare=False)  # collects remarks for the user

    def __post_init__(self) -> None:
        if self.delimiter is not None and (len(self.delimiter) != 1 or not self.delimiter.isascii()):
            raise ConfigError(f"the delimiter is {self.delimiter!r}; expected one ASCII character.")

    def note(self, remark: str) -> None:
        if remark not in self.notes:  # files are read several times
            self.notes.append(remark)


@dataclass(frozen=True)
class Reading:
    """The options of reading, and the folder for copies in binary."""

    scratch: Path
    text: TextFormat = field(default_factory=TextFormat)
    allow_nan: bool = False  # in features; never in labels and masks


@dataclass(frozen=True)
class InputFiles:
    """The files of one list of edges, of IDs or of one feature, one after the other."""

    files: Sequence[Path]
    format: str  # one of `FORMATS`
    columns: Wanted = None  # of a table; or the names of a tensor
    text: TextFormat = field(default_factory=TextFormat)
    dtype: str | None = None  # of raw files, `int32` or `int64`; `>i4` or `>i8` if the most significant byte is first

    @classmethod
    def of(
        cls,
        files: Files,
        text: TextFormat,
        *,
        format: str | None = None,
        columns: Wanted = None,
        dtype: str | None = None,
    ) -> "InputFiles":
        """Find the files. The format is found out if it is None; files whose columns are named have a header.

        Raises `PartitionError` if there are no such files, `ConfigError` if their format is not known.
        """
        if any(isinstance(one, str) and not re.fullmatch(r"[\d-]+|\*", one) for one in columns or ()):
            text = replace(text, header=True)
        return cls(*with_format(files, format), columns, text, dtype)

    @classmethod
    def named(cls, files: Files, text: TextFormat) -> "InputFiles":
        """As `of`; `#` after the files may precede the columns to take, separated by commas."""
        columns = None
        if isinstance(files, str | PathLike) and not Path(files).exists() and "#" in fspath(files):
            files, _, names = fspath(files).rpartition("#")
            columns = names.split(",")
        return cls.of(files, text, columns=columns)

    @property
    def shown(self) -> str:
        """For errors: the names of the files."""
        return f"{self.files[0]}{f' to {self.files[-1]}' if len(self.files) > 1 else ''}"
