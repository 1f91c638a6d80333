"""Finds the files of an input and their format, and holds the options of reading."""

import gzip
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from glob import has_magic
from os import PathLike, fspath
from pathlib import Path

from sar.common_tuples import StrPath
from sar.data.arrays import unreadable
from sar.data.graph_files import GRAPH_FILE_MARK
from sar.errors import ConfigError, PartitionError
from sar.partition.graph_source import Progress

Files = StrPath | Sequence[StrPath]
"""A file, a directory, a glob pattern, files separated by commas, or a list of files in order."""
Selected = Sequence[str | int] | None
"""The columns of a table, by name or number from 0; None: detected."""

_SUFFIXES = {
    "text": (".csv", ".tsv", ".txt", ".edges", ".edgelist", ".el"),
    "parquet": (".parquet", ".pq"),
    "npy": (".npy",),
    "dgl": (".dgl",),
    "chunked": (".json",),
}
FORMATS = tuple(_SUFFIXES)
COLUMN_FORMATS = "text", "parquet", "npy"
"""Formats of features and lists of nodes."""
_STARTS = {b"PAR1": "parquet", b"\x93NUMPY": "npy", GRAPH_FILE_MARK.to_bytes(8, "little"): "dgl"}
"""First bytes of formats, for files whose names do not identify the format."""
_SNIFFED_BYTES = 4096
METADATA = "metadata.json"
"""The file that describes a directory in DGL's chunked format."""
ALL_COLUMNS = "*"
ADVICE = " IDs that are strings, or have gaps, are numbered with --ids map."
MATRIX_MARKET = (
    "is a MatrixMarket file, whose first row is a size and whose IDs begin at 1; expected a table of edges. "
    "Convert it: A = scipy.io.mmread(FILE), then numpy.save('edges.npy', numpy.stack([A.row, A.col], axis=1))."
)
_PACKED = "is packed; expected a file that is not, or one packed by gzip (.gz). Unpack it."
_REFUSED = {
    ".mtx": MATRIX_MARKET,
    ".npz": "is an .npz file, which is not read. Save its arrays as .npy files, or give the graph to "
    "sar.partition_graph, as a DGLGraph or a Data of PyTorch Geometric.",
    **dict.fromkeys((".bz2", ".xz", ".zst", ".zip", ".7z"), _PACKED),
}
_SHOWN = 3  # entries of a folder


@dataclass(frozen=True)
class TextFormat:
    """The layout of text files."""

    delimiter: str | None = None  # None: detected in the first row of each file
    header: bool | None = None  # whether the first line has column names; None: if none of its fields is a number
    notes: list[str] = field(default_factory=list, compare=False)  # collects remarks for the user
    progress: Progress = field(default=lambda doing, share: None, compare=False)  # called with the fraction of a file

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
    allow_nan: bool = False  # and infinity, in features; never in labels and masks


@dataclass(frozen=True)
class InputFiles:
    """The files of one edge list, ID list or feature, in order."""

    files: Sequence[Path]
    format: str  # one of `FORMATS`
    columns: Selected = None  # of a table
    text: TextFormat = field(default_factory=TextFormat)

    @classmethod
    def find(
        cls,
        files: Files,
        text: TextFormat,
        *,
        format: str | None = None,
        columns: Selected = None,
        among: Sequence[str] = FORMATS,
    ) -> "InputFiles":
        """Find the files. A format of None is detected; files whose columns are selected by name have a header.

        Raises `PartitionError` for missing files, `ConfigError` for unknown formats.
        """
        if any(isinstance(one, str) and not re.fullmatch(r"[\d-]+|\*", one) for one in columns or ()):
            text = replace(text, header=True)
        found = find_files(files, text.note)
        return cls(found, format_of(found, format, among), columns, text)

    def check_order(self, other: "InputFiles") -> None:
        """Raise `ConfigError` unless the files are in the order of the other files, whose rows they belong to.

        Orders are compared by file names or the numbers in them. A single file is accepted for all other files.
        """
        stems, other_stems = ([one.name.partition(".")[0] for one in source.files] for source in (self, other))
        numbers, other_numbers = ([re.findall(r"\d+", stem) for stem in of] for of in (stems, other_stems))
        are_numbered = all(numbers) and numbers == other_numbers
        if 1 not in (len(stems), len(other_stems)) and stems != other_stems and not are_numbered:
            raise ConfigError(
                f"rows of the files {', '.join(one.name for one in self.files[:_SHOWN])} belong to those of "
                f"{', '.join(one.name for one in other.files[:_SHOWN])}; expected the same names, or names with the "
                "same numbers, in the same order. Name the files of both in order, FILE,FILE,FILE, or join them."
            )

    @property
    def shown(self) -> str:
        """The names of the files, for errors."""
        return f"{self.files[0]}{f' to {self.files[-1]}' if len(self.files) > 1 else ''}"


def find_files(files: Files, note: Callable[[str], None] = lambda remark: None) -> list[Path]:
    """Find files in the given order; those of a directory or pattern are sorted by name, with numbers by value.

    `note` is called with a remark on skipped entries of a directory or pattern: hidden files, folders, and names such
    as `_SUCCESS`, which tools write next to data files. `PartitionError` for missing files.
    """
    names = ""
    if not isinstance(files, str | PathLike):
        found = [Path(file) for file in files]
    elif not fspath(files):
        raise PartitionError("the name of a file is empty; expected one.")
    elif ((path := Path(files)) / METADATA).is_file():
        found = [path / METADATA]
    elif path.is_dir() or (has_magic(str(path)) and not path.exists()):
        named = path.iterdir() if path.is_dir() else Path(path.anchor).glob(str(path.relative_to(path.anchor)))
        entries = sorted(named, key=_by_number)
        found = [one for one in entries if one.is_file() and not one.name.startswith((".", "_"))]
        others = sorted({*entries} - {*found}, key=lambda one: (one.name.startswith((".", "_SUCCESS")), one.name))
        names = ", ".join(f"{one.name}{'/' * one.is_dir()}" for one in others[:_SHOWN])
        names += ", ..." * (len(others) > _SHOWN)
        if others and found:
            note(f"{files}: files read: {len(found)}; entries left out: {len(others)} ({names})")
    else:
        found = [Path(one) for one in fspath(files).split(",")] if "," in str(path) and not path.exists() else [path]
    if not found:
        raise PartitionError(f"'{files}' names no files{f', only {names}' * bool(names)}; expected at least one.")
    for file in found:
        if not file.is_file():
            raise PartitionError(f"there is no file '{file}'; check its name, and the directory it is relative to.")
    return found


def format_of(files: Sequence[Path], format: str | None, among: Sequence[str] = FORMATS) -> str:
    """The format of files: the given format, or detected from their names or first bytes.

    `ConfigError` if it is not an expected format, or the files have several formats.
    """
    formats = {format} if format else {_format_of(file, among) for file in files}
    if len(formats) > 1:
        raise ConfigError(
            f"'{files[0]}' and the other files have different formats ({', '.join(sorted(formats))}); expected "
            "one format for all. Name the files by a pattern, for instance 'edges/*.csv'."
        )
    return formats.pop()


def _format_of(file: Path, among: Sequence[str]) -> str:
    suffixes = [suffix for suffix in file.suffixes if suffix != ".gz"]
    suffix = suffixes[-1].lower() if suffixes else ""
    if suffix in _REFUSED:
        raise ConfigError(f"'{file}' {_REFUSED[suffix]}")
    for name in among:
        if suffix in _SUFFIXES[name]:
            return name
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
            start = opened.read(_SNIFFED_BYTES)
    except (OSError, EOFError) as error:
        raise unreadable(file, OSError(str(error))) from error
    found = next((name for mark, name in _STARTS.items() if start.startswith(mark) and name in among), None)
    if found is None and b"\0" in start:
        endings = ", ".join(ending for name in among for ending in _SUFFIXES[name])
        hint = " Name the format: --format." if among is FORMATS else ""
        raise ConfigError(
            f"cannot tell the format of '{file}' by its name or its first bytes; expected one of {', '.join(among)}, "
            f"with an ending among {endings}.{hint}"
        )
    return found or "text"


def _by_number(file: Path) -> list[tuple[int, str]]:
    """Sorts part-2 before part-10."""
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", str(file))]
