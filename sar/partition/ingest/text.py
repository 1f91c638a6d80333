"""Tables as text, parsed by `pyarrow.csv`: any delimiter or blanks, a header or none, comments, gzip.

[Note: text in blocks] pyarrow takes neither comments nor runs of blanks between fields, and its errors name no line.
So a file is read in blocks of whole lines; a block is stripped of these and parsed. Only where that fails, the lines of
the block are gone through in Python, to name the one at fault. Memory is that of one block and its numbers.
"""

import csv
import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow
import pyarrow.compute as compute
import pyarrow.csv

from sar.errors import ConfigError, PartitionError
from sar.partition.ingest.files import ADVICE, END_NAMES, Wanted, check_edges, edge_columns, feature_columns, id_columns
from sar.storage.arrays import Array, unreadable

_BLOCK_BYTES = 4 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_COMMENT_MARKS = "#%"
_NO_ROW = re.compile(rb"^[ \t\r]*(?:[#%].*)?\n", re.MULTILINE)  # a comment, or a line of blanks
_BLANKS_TO_SPACES = bytes.maketrans(b"\t\r", b"  ")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_MOST_DIGITS = 40  # more do not fit into 64 bits, nor are they for int()


@dataclass(frozen=True)
class TextFormat:
    """How a text file is laid out."""

    delimiter: str | None = None  # a space or a tab stands for any run of both; None: found out from the first line
    header: bool | None = None  # whether the first line names the columns; None: if none of its fields is a number

    def __post_init__(self) -> None:
        if self.delimiter is not None and (len(self.delimiter) != 1 or not self.delimiter.isascii()):
            raise ConfigError(f"the delimiter is {self.delimiter!r}; expected one ASCII character.")


class _Block(NamedTuple):
    """Whole lines of a file, and the number of the first one, from 1."""

    text: bytes
    line: int


class _Row(NamedTuple):
    """A line that is no comment."""

    line: int
    text: str
    fields: list[str]


def text_edges(path: Path, how: TextFormat, columns: Wanted, limits: tuple[int, int]) -> Iterator[tuple[Array, Array]]:
    """The edges of a file in chunks of int64; it is unpacked on the way where its name ends in `.gz`.

    Columns are as in `edge_columns`; sources and destinations are below the limits. `PartitionError` where the file is
    missing or damaged, or a line, which is named, is no edge.
    """
    table = _TextTable(path, how)
    if not table.names:
        return
    ends = edge_columns(path, table.names, columns, f"{table.first_fields!r} in its first line")
    for block in table.blocks():
        try:
            src, dst = table.parse(block, ends, pyarrow.int64())
            check_edges(src, dst, limits, str(path), 0)
        except (pyarrow.ArrowInvalid, PartitionError) as error:
            raise _bad_edge(table, block, ends, limits, error) from error
        yield src, dst


def text_rows(path: Path, delimiter: str | None, columns: Sequence[str] | None = None) -> Iterator[Array]:
    """A feature in chunks of rows: (n,) of one column, else (n, F).

    Where all numbers are integers they are int64, else float32. The file is unpacked on the way where its name ends in
    `.gz`. Columns are as in `feature_columns`. `PartitionError` where the file is missing or damaged, or a line, which
    is named, lacks a number.
    """
    table = _TextTable(path, TextFormat(delimiter))
    if not table.names:
        return
    chosen = feature_columns(path, table.names, columns)
    kind = _type_of_numbers(table, chosen)
    for block in table.blocks():
        try:
            values = table.parse(block, chosen, kind)
        except pyarrow.ArrowInvalid as error:
            raise _bad_numbers(table, block, chosen, error) from error
        rows = values[0] if len(chosen) == 1 else np.stack(values, axis=1)
        yield rows if kind == pyarrow.int64() else rows.astype(np.float32)


def text_ids(path: Path, columns: Wanted, of_edges: bool, how: TextFormat) -> Iterator[list[pyarrow.Array]]:
    """The IDs of nodes in chunks, as they stand there without the blanks around them: (n,) strings in each column.

    Columns are as in `id_columns`. `PartitionError` where the file is missing or damaged, or a line, which is named,
    lacks an ID; `ConfigError` where the first line may be names, or IDs.
    """
    table = _TextTable(path, how)
    if not table.names:
        return
    named = any({*map(str, some)} <= {*table.names} for some in (END_NAMES if columns is None else [columns]))
    unclear = how.header is None and table.has_header and not named
    chosen = id_columns(path, table.names, columns, f"{table.first_fields!r} in its first line", of_edges)
    for block in table.blocks():
        try:
            found = table.columns(block, chosen, pyarrow.string())
        except pyarrow.ArrowInvalid as error:
            raise _bad_edge(table, block, (), (), error) from error
        texts = [compute.utf8_trim_whitespace(column.combine_chunks()) for column in found]
        if any(compute.any(compute.equal(column, "")).as_py() for column in texts):
            empty = (row for row in table.rows(block) if not all(row.fields[column] for column in chosen))
            raise table.bad_row(next(empty), "has an empty ID; expected one in each column")
        if unclear and not all(compute.all(compute.ascii_is_decimal(column)).as_py() for column in texts):
            raise ConfigError(
                f"{path} begins with {table.first_fields!r}: names of columns, or IDs? Say which (header=, --header, "
                "--no-header); of a table of nodes give the first line names, and name the column: FILE#NAME."
            )
        yield texts


class _TextTable:
    """A text file with rows of as many fields as its first one has."""

    def __init__(self, path: Path, how: TextFormat) -> None:
        self.path = path
        with self._open() as file:
            lines, first = _first_row(file)
        self._delimiter = how.delimiter or next((mark for mark in ",;|" if mark in first), " ")
        self._blanks = self._delimiter in " \t"
        fields = self._split(first)
        header = not any(map(_is_number, fields)) if how.header is None else how.header
        self.names = fields if header else [str(number) for number in range(len(fields))]  # none without rows
        self.first_fields = ", ".join(fields)
        self.has_header = header
        self._header_lines = lines if header else 0

    @property
    def separated(self) -> str:
        """For errors: what divides fields."""
        return f"separated by {'blanks' if self._blanks else repr(self._delimiter)}"

    def blocks(self) -> Iterator[_Block]:
        """The lines after the header."""
        line = self._header_lines + 1
        with self._open() as file:
            for _ in range(self._header_lines):
                file.readline()
            while text := file.read(_BLOCK_BYTES):
                if not text.endswith(b"\n"):
                    rest = file.readline(_BLOCK_BYTES)
                    text += rest
                    if len(rest) == _BLOCK_BYTES and not rest.endswith(b"\n"):
                        raise PartitionError(
                            f"{self.path}, line {line + _count_lines(text)}, is longer than {_BLOCK_BYTES} bytes; "
                            "expected a text file."
                        )
                yield _Block(text, line)
                line += _count_lines(text)

    def parse(self, block: _Block, columns: Sequence[int], kind: pyarrow.DataType) -> list[Array]:
        """The numbers in some columns, (n,) each; `pyarrow.ArrowInvalid` where a row or a number does not fit."""
        return [column.to_numpy() for column in self.columns(block, columns, kind)]

    def columns(self, block: _Block, columns: Sequence[int], kind: pyarrow.DataType) -> list[pyarrow.ChunkedArray]:
        """As `parse`, in Arrow's arrays."""
        text = self._rows_only(block.text)
        names = [str(number) for number in range(len(self.names))]
        chosen = [names[column] for column in columns]
        if not text:
            return [pyarrow.chunked_array([], kind) for _ in chosen]
        table = pyarrow.csv.read_csv(
            pyarrow.BufferReader(text),
            pyarrow.csv.ReadOptions(use_threads=False, block_size=len(text), column_names=names),
            pyarrow.csv.ParseOptions(delimiter=" " if self._blanks else self._delimiter),
            pyarrow.csv.ConvertOptions(
                include_columns=list(dict.fromkeys(chosen)), column_types=dict.fromkeys(chosen, kind), null_values=[]
            ),
        )
        if b'"' in text and table.num_rows != sum(map(bool, text.replace(b"\r", b"").split(b"\n"))):
            raise pyarrow.ArrowInvalid("a quotation mark is not closed on its line")
        return [table.column(name) for name in chosen]

    def rows(self, block: _Block) -> Iterator[_Row]:
        """The lines one by one, slowly: to find the one that is wrong."""
        for line, raw in enumerate(block.text.split(b"\n"), block.line):
            text = raw.decode(errors="replace").strip()
            if text and text[0] not in _COMMENT_MARKS:
                yield _Row(line, text, self._split(text))

    def bad_row(self, row: _Row, problem: str, hint: str = "") -> PartitionError:
        shown = row.text if len(row.text) < 80 else f"{row.text[:77]}..."
        return PartitionError(
            f"{self.path}, line {row.line}: {shown!r} {problem}. Correct the line, or name the right layout.{hint}"
        )

    def bad_block(self, block: _Block, error: Exception) -> PartitionError:
        """The error where no single line is at fault."""
        last = block.line + _count_lines(block.text)
        return PartitionError(f"{self.path}, lines {block.line} to {last}: {error}. Correct the file.")

    def _rows_only(self, text: bytes) -> bytes:
        """The lines as pyarrow takes them; see [Note: text in blocks]."""
        if not text.endswith(b"\n"):
            text += b"\n"
        has_blank_lines = not self._blanks and (
            text[:1].isspace() or any(blank in text and b"\n" + blank in text for blank in (b" ", b"\t"))
        )
        if has_blank_lines or b"#" in text or b"%" in text:
            text = _NO_ROW.sub(b"", text)
        if self._blanks and not _has_single_blanks(text):
            text = text.translate(_BLANKS_TO_SPACES)
            while b"  " in text:
                text = text.replace(b"  ", b" ")
            text = text.replace(b" \n", b"\n").replace(b"\n ", b"\n").lstrip(b" ")
        return text

    def _split(self, line: str) -> list[str]:
        if self._blanks:
            return [field.strip('"') for field in line.split()]
        fields = line.split(self._delimiter)
        if '"' in line:
            with suppress(csv.Error):  # of a field beyond the limit, which is no table's
                fields = next(csv.reader([line], delimiter=self._delimiter))
        return [field.strip() for field in fields]

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        try:
            with gzip.open(self.path) if self.path.suffix == ".gz" else self.path.open("rb") as file:
                if file.read(len(_BYTE_ORDER_MARK)) != _BYTE_ORDER_MARK:
                    file.seek(0)
                yield file  # type: ignore[misc]  # a GzipFile reads like any other
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise PartitionError(f"{self.path} cannot be unpacked: {error}. Copy it again.") from error
        except OSError as error:
            raise unreadable(self.path, error) from error


def _first_row(file: BinaryIO) -> tuple[int, str]:
    """The number of the first line that is no comment, and that line; an empty one where there is none."""
    line = 0
    while raw := file.readline(_BLOCK_BYTES):
        line += 1
        text = raw.decode(errors="replace").strip()
        if text and text[0] not in _COMMENT_MARKS:
            return line, text
    return line, ""


def _count_lines(text: bytes) -> int:
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == ord("\n")))  # ten times as fast as bytes.count


def _has_single_blanks(text: bytes) -> bool:
    """Whether the only blanks are single spaces between other characters; in numpy, which is faster than `in`."""
    if b"\t" in text or b"\r" in text or text[:1] == b" ":
        return False
    characters = np.frombuffer(text, np.uint8)
    space, newline = characters == ord(" "), characters == ord("\n")
    doubled = space[1:] & space[:-1]
    at_an_end = (space[1:] & newline[:-1]) | (space[:-1] & newline[1:])
    return not (doubled | at_an_end).any()


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _type_of_numbers(table: _TextTable, columns: Sequence[int]) -> pyarrow.DataType:
    """int64 where all numbers are integers, else float64; a pass over the file, or over as much of it as tells."""
    for block in table.blocks():
        try:
            table.parse(block, columns, pyarrow.int64())
        except pyarrow.ArrowInvalid as error:
            found = (row.fields[i] for row in table.rows(block) for i in columns if i < len(row.fields))
            if all(_INTEGER.fullmatch(field) for field in found):
                raise _bad_numbers(table, block, columns, error) from error
            return pyarrow.float64()
    return pyarrow.int64()


def _bad_numbers(table: _TextTable, block: _Block, columns: Sequence[int], error: Exception) -> PartitionError:
    """Names the first line of a block that lacks a number."""
    width = len(table.names)
    expected = f"{width} numbers" if len(columns) == width else f"numbers in {[table.names[i] for i in columns]}"
    for row in table.rows(block):
        if len(row.fields) != width or not all(_is_number(row.fields[column]) for column in columns):
            return table.bad_row(row, f"does not have {expected}, {table.separated}, as the first line has")
    return table.bad_block(block, error)


def _bad_edge(
    table: _TextTable, block: _Block, ends: Sequence[int], limits: Sequence[int], error: Exception
) -> PartitionError:
    """Names the first line of a block that is no edge."""
    width = len(table.names)
    expected = " and ".join(
        f"{end} an integer from 0" + (f" to {limit - 1}" if limit < np.iinfo(np.int64).max else "")
        for end, limit in zip(("source", "destination"), limits, strict=False)
    )
    for row in table.rows(block):
        for column, limit in zip(ends, limits, strict=True):
            field = row.fields[column] if column < len(row.fields) else "0"
            if not _INTEGER.fullmatch(field):
                return table.bad_row(
                    row, f"has something that is no integer; expected {expected}, {table.separated}", ADVICE
                )
            if len(field) > _MOST_DIGITS or not 0 <= int(field) < limit:
                return table.bad_row(row, f"has an ID out of range; expected {expected}", ADVICE)
        if len(row.fields) != width:
            return table.bad_row(
                row,
                f"has another number of fields than {width}; expected {width}, {table.separated}, as in the first line",
            )
    return table.bad_block(block, error)
