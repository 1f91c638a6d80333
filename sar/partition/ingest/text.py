"""Edge lists as text: CSV with any delimiter, or blanks; with a header or without; with comments; also gzipped.

A parser of its own, because it has to name the line of an error and keep all 64 bits of an ID, in bounded memory. As it
need not look for quotes, dates or missing values, it is also faster than those of general tables.
"""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sar.errors import ConfigError, PartitionError
from sar.kernels.cpu.intrinsics import inline, kernel
from sar.partition.graph_data import Array
from sar.partition.stored import unreadable

_BUFFER_BYTES = 4 << 20
_NEWLINE, _SPACE, _TAB, _RETURN, _MINUS, _ZERO, _HASH, _PERCENT = (ord(character) for character in "\n \t\r-0#%")
_BLANKS = 0  # as a delimiter: any run of spaces and tabs
_MAX_DIGITS = 18  # what surely fits into 64 bits
_FINE, _RAGGED, _NO_INTEGER, _OUTSIDE = range(4)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class TextFormat:
    """How edges are written in a text file.

    delimiter: one character; a space or a tab stands for any run of both; None: found out from the first line.
    header: whether the first line names the columns; None: it does if none of its fields is a number.
    columns: those of sources and destinations, by name or by number from 0; None: the file has two columns.
    """

    delimiter: str | None = None
    header: bool | None = None
    columns: tuple[str | int, str | int] | None = None

    def __post_init__(self) -> None:
        if self.delimiter is not None and (len(self.delimiter) != 1 or not self.delimiter.isascii()):
            raise ConfigError(f"the delimiter is {self.delimiter!r}; expected one ASCII character.")


class _Layout(NamedTuple):
    """Of one file: delimiter as a byte, fields in a line, which of them are the ends of an edge."""

    delimiter: int
    fields: int
    source: int
    destination: int


def parse_edges(path: Path, how: TextFormat, num_sources: int, num_destinations: int) -> Iterator[tuple[Array, Array]]:
    """Parse a file in chunks, which are good until the next one is asked for.

    Args:
        path: text; unpacked on the way where its name ends in `.gz`.
        how: its layout.
        num_sources: sources are 0 to this - 1.
        num_destinations: destinations likewise.

    Raises:
        PartitionError: the file is missing or damaged, a line has another number of fields than the first one, or an
            ID is no integer, negative or too large; the line is named.
        ConfigError: `how` does not fit the file.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            layout, line = _read_layout(path, file, how)
            if layout is not None:
                yield from _parse(path, file, layout, line, np.array([num_sources, num_destinations]))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise PartitionError(f"{path} cannot be unpacked: {error}. Copy it again.") from error
    except OSError as error:
        raise unreadable(path, error) from error


def _parse(path: Path, file: Any, layout: _Layout, line: int, limits: Array) -> Iterator[tuple[Array, Array]]:
    """The edges from the file's position on, which is after `line` lines."""
    buffer = np.empty(_BUFFER_BYTES, np.uint8)
    src, dst = np.empty((2, _BUFFER_BYTES // 4 + 1), np.int64)  # an edge takes at least four bytes
    outcome = np.zeros(3, np.int64)
    size, more = 0, True
    while more:
        got = file.readinto(buffer[size:-1].data)
        size += got
        more = got > 0
        if not more and size and buffer[size - 1] != _NEWLINE:
            buffer[size] = _NEWLINE
            size += 1
        rows = _parse_lines(buffer[:size], *layout, limits, src, dst, outcome)
        problem, lines, at = outcome.tolist()
        line += lines
        if problem != _FINE:
            text = bytes(buffer[at:size]).split(b"\n", 1)[0].decode(errors="replace").strip()
            raise _bad_line(path, line + 1, text, problem, layout, limits)
        if not at and size == len(buffer) - 1:
            raise PartitionError(
                f"{path}, line {line + 1}, is longer than {size} bytes; expected a text file of edges."
            )
        yield src[:rows], dst[:rows]
        size -= at
        buffer[:size] = buffer[at : at + size].copy()


@kernel
def _parse_lines(
    text: Array, delimiter: int, fields: int, source: int, destination: int, limits: Array, src: Array, dst: Array,
    outcome: Array,
) -> int:  # fmt: skip
    """Parse the lines that end in the text and return the number of edges in them.

    Outcome: the problem, the lines before it (or all), and where the line with the problem (or without an end) begins.
    """
    stop = len(text)
    while stop > 0 and text[stop - 1] != _NEWLINE:
        stop -= 1
    at, rows, lines, problem = 0, 0, 0, _FINE
    while at < stop:
        begin, field = at, 0
        at = _after_blanks(text, at)
        if text[at] == _HASH or text[at] == _PERCENT:
            while text[at] != _NEWLINE:
                at += 1
        is_edge = text[at] != _NEWLINE
        while problem == _FINE and text[at] != _NEWLINE:
            if field == source:
                src[rows], at, problem = _integer(text, at, limits[0])
            elif field == destination:
                dst[rows], at, problem = _integer(text, at, limits[1])
            else:
                at = _after_field(text, at, delimiter)
            field += 1
            end, at = at, _after_blanks(text, at)
            if problem == _FINE and text[at] != _NEWLINE:
                if text[at] == delimiter:
                    at = _after_blanks(text, at + 1)
                    if text[at] == _NEWLINE:  # the last field is empty
                        problem = _NO_INTEGER if field in (source, destination) else _FINE
                        field += 1
                elif delimiter != _BLANKS or at == end:
                    problem = _NO_INTEGER
        if problem == _FINE and is_edge and field != fields:
            problem = _RAGGED
        if problem != _FINE:
            at = begin
            break
        rows += is_edge
        lines += 1
        at += 1
    outcome[0], outcome[1], outcome[2] = problem, lines, at
    return rows


@inline
def _after_blanks(text: Array, at: int) -> int:
    while text[at] == _SPACE or text[at] == _TAB or text[at] == _RETURN:
        at += 1
    return at


@inline
def _after_field(text: Array, at: int, delimiter: int) -> int:
    """Behind whatever stands there up to the delimiter or the end of the line."""
    while text[at] != _NEWLINE and text[at] != delimiter:
        if delimiter == _BLANKS and (text[at] == _SPACE or text[at] == _TAB):
            break
        at += 1
    return at


@inline
def _integer(text: Array, at: int, limit: int) -> tuple[int, int, int]:
    """The number there, what comes behind it, and the problem with it."""
    first, value = at, 0
    while _ZERO <= text[at] <= _ZERO + 9:
        value = value * 10 + (text[at] - _ZERO)
        at += 1
    if at == first:
        negative = text[at] == _MINUS and _ZERO <= text[at + 1] <= _ZERO + 9
        return -1, at, _OUTSIDE if negative else _NO_INTEGER
    return value, at, _OUTSIDE if at - first > _MAX_DIGITS or value >= limit else _FINE


def _read_layout(path: Path, file: Any, how: TextFormat) -> tuple[_Layout | None, int]:
    """The layout, None for a file without lines; and the number of lines before the file's position, as of a header."""
    line, text = 0, ""
    while not text or text[0] in "#%":
        raw = file.readline(_BUFFER_BYTES)
        if not raw:
            return None, line
        line += 1
        text = raw.removeprefix(_BYTE_ORDER_MARK).decode(errors="replace").strip()
    delimiter = how.delimiter or guess_delimiter(text)
    names = [name.strip('"') for name in split_line(text, delimiter)]
    header = how.header
    if header is None:
        header = not any(is_number(name) for name in names)
    if not header:
        line = 0
        file.seek(0)
        if file.read(3) != _BYTE_ORDER_MARK:
            file.seek(0)
    source, destination = (_column(path, names, header, column) for column in how.columns or (0, 1))
    if how.columns is None and len(names) != 2:
        raise ConfigError(
            f"{path} has {len(names)} columns, {', '.join(names)!r} in its first line; expected two, source and "
            f"destination. Name these two, by columns=..., or the delimiter, which is taken to be {delimiter!r}."
        )
    if source == destination:
        raise ConfigError(f"sources and destinations are both to come from column {names[source]!r} of {path}.")
    return _Layout(_BLANKS if delimiter in " \t" else ord(delimiter), len(names), source, destination), line


def _column(path: Path, names: list[str], header: bool, column: str | int) -> int:
    if isinstance(column, str) and header and names.count(column) == 1:
        return names.index(column)
    if isinstance(column, int) and (0 <= column < len(names) or len(names) == 1):
        return column
    known = f"the columns {', '.join(names)}" if header else f"{len(names)} columns without names"
    raise ConfigError(f"{path} has no column {column!r}; expected one of {known}.")


def guess_delimiter(line: str) -> str:
    """What stands between the fields of a line; a space for any blanks."""
    return next((one for one in ",;|" if one in line), " ")


def split_line(line: str, delimiter: str) -> list[str]:
    """The fields of a line."""
    return line.split() if delimiter in " \t" else [field.strip() for field in line.split(delimiter)]


def is_number(text: str) -> bool:
    """Whether a field is a number, NaN included."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _bad_line(path: Path, line: int, text: str, problem: int, layout: _Layout, limits: Array) -> PartitionError:
    shown = text if len(text) < 80 else f"{text[:77]}..."
    ranges = " and ".join(
        f"{end} an integer from 0" + (f" to {limit - 1}" if limit < np.iinfo(np.int64).max else "")
        for end, limit in zip(("source", "destination"), limits.tolist(), strict=True)
    )
    delimiter = "blanks" if layout.delimiter == _BLANKS else repr(chr(layout.delimiter))
    what = {
        _RAGGED: f"another number of fields than {layout.fields}; expected {layout.fields}, separated by {delimiter}, "
        "as in the first line",
        _NO_INTEGER: f"something that is no integer; expected {ranges}, separated by {delimiter}",
        _OUTSIDE: f"an ID out of range; expected {ranges}",
    }[problem]
    return PartitionError(f"{path}, line {line}: {shown!r} has {what}. Mend the line, or name the right layout.")
