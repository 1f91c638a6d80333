"""Tables as text, parsed by `pyarrow.csv`: any delimiter or blanks, a header or none, comments, gzip.

[Note: text in blocks] pyarrow takes neither comments nor runs of blanks between fields, and its errors name no line.
So a file is read in blocks of whole lines; a block is stripped of these and parsed. Only if that fails, the lines of
the block are gone through in Python, to name the one at fault. Memory is that of one block and its numbers.
"""

import csv
import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import numpy as np
import pyarrow
import pyarrow.compute as compute
import pyarrow.csv

from sar.data.arrays import Array, unreadable
from sar.errors import ConfigError, PartitionError
from sar.partition.graph_source import RowsRead, check_ends
from sar.partition.ingest.files import ADVICE, END_NAMES, MATRIX_MARKET, ColumnChoice, NotNumbersError

Kind = Literal["int64", "float32", "float64", "bool"]
"""The type of the numbers in a feature."""
_BLOCK_BYTES = 4 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_COMMENT_MARKS = "#%"
_BLANKS_TO_SPACES = bytes.maketrans(b"\t\r", b"  ")
_INTEGER = re.compile(r"[+-]?[0-9]+|0[xX][0-9a-fA-F]+")
_LIKE_A_VALUE = re.compile(r"[+-]?\.?[0-9]|(?i:true|false)$")  # also hexadecimal numbers and dates
_MOST_DIGITS = 40  # more do not fit into 64 bits, nor are they for int()
_EXACT_FLOAT32 = 2.0**24  # from here on float32 does not tell integers apart
_COMMENTS_SEEN = 20
_NO_TEXT = {  # first bytes of files that are no text, however they are called
    b"\x1f\x8b": "packed by gzip; expected text, or a name that ends in .gz. Rename it",
    b"BZh": "packed by bzip2; expected text. Unpack it",
    b"\xfd7zXZ": "packed by xz; expected text. Unpack it",
    b"\x28\xb5\x2f\xfd": "packed by zstd; expected text. Unpack it",
    b"PK\x03\x04": "a zip archive; expected text. Unpack it",
    b"PAR1": "a Parquet file; expected text. Name its format: --format parquet (format='parquet')",
    b"\x93NUMPY": "an .npy file; expected text. Name its format: --format npy (format='npy')",
    b"\xff\xfe": "text in UTF-16; expected UTF-8. Convert it",
    b"\xfe\xff": "text in UTF-16; expected UTF-8. Convert it",
}


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


class _Block(NamedTuple):
    """Whole lines of a file, and the number of the first one, from 1."""

    text: bytes
    line: int


class _Row(NamedTuple):
    """A line that is no comment."""

    line: int
    text: str
    fields: list[str]


def text_edges(
    path: Path, how: TextFormat, choice: ColumnChoice, limits: tuple[int, int], advice: str = ADVICE
) -> Iterator[tuple[Array, Array]]:
    """The edges of a file in chunks of int64; it is unpacked on the way if its name ends in `.gz`.

    Sources and destinations are below the limits. Raises `PartitionError` if the file is missing or damaged, or a line,
    which is named, is no edge; `advice` ends errors about IDs.
    """
    table = _TextTable(path, how, choice)
    if not table.names:
        return
    ends = table.chosen()
    for block in table.blocks():
        try:
            src, dst = (column.to_numpy() for column in table.columns(block, ends, pyarrow.int64()))
            check_ends(src, dst, limits, str(path), 0)
        except (pyarrow.ArrowInvalid, PartitionError) as error:
            raise _bad_edge(table, block, ends, limits, error, advice) from error
        yield src, dst


def text_rows(path: Path, how: TextFormat, choice: ColumnChoice, kind: Kind) -> Iterator[Array]:
    """A feature in chunks of rows of a kind: (n,) of one column, else (n, F).

    The file is unpacked on the way if its name ends in `.gz`. Raises `PartitionError` if it is missing or damaged, and
    `NotNumbersError`, which names the line, if a value is not of the kind or, as float32, would lose digits.
    """
    table = _TextTable(path, how, choice)
    if not table.names:
        return
    counted = len(table.names) > 1 and table.first_fields == [*map(str, range(len(table.names)))]
    if counted and how.header is None and not how.numbers_are_rows:
        raise ConfigError(
            f"{path} begins with {table.shown}: names of columns, as pandas writes them, or a row? Say which (header=, "
            "--header, --no-header)."
        )
    chosen = table.chosen()
    for block in table.blocks():
        try:
            if kind == "bool":
                texts = [compute.utf8_trim_whitespace(one) for one in table.columns(block, chosen, pyarrow.string())]
                lower = [compute.utf8_lower(one) for one in texts]
                if not all(compute.all(compute.is_in(one, pyarrow.array(["true", "false"]))).as_py() for one in lower):
                    raise NotNumbersError(f"{path} has other values than True and False.")
                values = [compute.equal(one, "true").to_numpy() for one in lower]
            else:
                numbers = pyarrow.int64() if kind == "int64" else pyarrow.float64()
                values = [column.to_numpy() for column in table.columns(block, chosen, numbers)]
        except pyarrow.ArrowInvalid as error:
            raise _bad_numbers(table, block, chosen, error, integers=kind == "int64") from error
        rows = values[0] if len(chosen) == 1 else np.stack(values, axis=1)
        if kind == "float32":
            if (np.isfinite(rows) & (np.abs(rows) >= _EXACT_FLOAT32)).any():
                raise NotNumbersError(f"{path} has numbers that float32 does not tell apart.")
            rows = rows.astype(np.float32)
        yield rows


def text_ids(path: Path, how: TextFormat, choice: ColumnChoice) -> Iterator[list[pyarrow.Array]]:
    """The IDs of nodes in chunks, as they stand there without the blanks around them: (n,) strings in each column.

    Raises `PartitionError` if the file is missing or damaged, or a line, which is named, lacks an ID; `ConfigError` if
    the first lines may be names, comments or IDs.
    """
    table = _TextTable(path, how, choice)
    if not table.names:
        return
    if table.row_like_comments:
        raise ConfigError(
            f"{path} begins with {table.row_like_comments[0]!r}: a comment, or a row? Say what begins comments "
            "(comment=, --comment): '#', or '' if there are none."
        )
    unclear = how.header is None and table.has_header and not table.has_known_names
    chosen = table.chosen()
    for block in table.blocks():
        try:
            found = table.columns(block, chosen, pyarrow.string())
        except pyarrow.ArrowInvalid as error:
            raise _bad_edge(table, block, (), (), error, ADVICE) from error
        texts = [compute.utf8_trim_whitespace(column.combine_chunks()) for column in found]
        if any(compute.any(compute.equal(column, "")).as_py() for column in texts):
            for row in table.rows(block):
                if not all(row.fields[column] for column in chosen if column < len(row.fields)):
                    raise table.bad_row(row, "has an empty ID; expected one in each column")
            raise table.bad_block(block, PartitionError("an ID is empty"))
        if unclear and not all(compute.all(compute.ascii_is_decimal(column)).as_py() for column in texts):
            raise ConfigError(
                f"{path} begins with {table.shown}: names of columns, or IDs? Say which (header=, --header, "
                "--no-header); of a table of nodes give the first line names, and name the column: FILE#NAME."
            )
        yield texts


class _TextTable:
    """A text file with rows of as many fields as its first one has."""

    def __init__(self, path: Path, how: TextFormat, choice: ColumnChoice) -> None:
        self.path, self._how, self._choice = path, how, choice
        before, first = 0, ""  # the lines before the first row, and that
        comments: list[str] = []  # of those the first few comments
        self._comments = 0
        with self._open() as file:
            while raw := file.readline(_BLOCK_BYTES):
                line = raw.decode(errors="replace").rstrip("\r\n")
                if line.startswith("%%MatrixMarket"):
                    raise ConfigError(f"{path} {MATRIX_MARKET}")
                if "\r" in line:
                    raise PartitionError(f"{path} has lines that end in CR alone; expected LF or CR LF. Convert it.")
                if self._is_comment(line, before_rows=True):
                    self._comments += 1
                    comments += [line.strip()] if len(comments) < _COMMENTS_SEEN else []
                elif line.strip(" \t" if how.delimiter is None else " \t".replace(how.delimiter, "")):
                    first = line
                    break
                before += 1
        self._find_delimiter(first)
        self.first_fields = self._split(first) if first else []
        self.shown = repr(", ".join(self.first_fields))
        known = {name.casefold() for name in self.first_fields}
        self.has_known_names = any({*ends} <= known for ends in END_NAMES) or choice.by_name
        numbers = [bool(_LIKE_A_VALUE.match(one)) or is_number(one) for one in self.first_fields]
        self.has_header = how.header if how.header is not None else self.has_known_names or not any(numbers)
        self.names = self.first_fields if self.has_header else [str(number) for number in range(len(self.first_fields))]
        if self.has_header and all(numbers) and first:
            how.note(f"{path}: the first line, {', '.join(self.first_fields[:10])}, was taken for names of columns.")
        self._skipped = before + self.has_header
        # Names such as #cat may be IDs, if they stand in rows like the others.
        self.row_like_comments = [
            line for line in comments
            if how.comment is None and not line[1:2].isspace() and len(self._split(line)) == len(self.names)
        ]  # fmt: skip

    @property
    def separated(self) -> str:
        """For errors: the delimiter."""
        return f"separated by {'blanks' if self._blanks else repr(self._delimiter)}"

    def chosen(self) -> list[int]:
        """The numbers of the columns to read."""
        return self._choice.numbers(self.path, self.names, f"{self.shown} in its first line", has_names=self.has_header)

    def blocks(self) -> Iterator[_Block]:
        """The lines after the header."""
        line, self._passed_over, read = self._skipped + 1, self._comments, RowsRead(self.path)
        with self._open() as file:
            for _ in range(self._skipped):
                file.readline(_BLOCK_BYTES)
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
                read.note(line - self._skipped - text.endswith(b"\n"))
        if self._passed_over:
            self._how.note(f"{self.path}: lines passed over as comments: {self._passed_over}")

    def columns(self, block: _Block, columns: Sequence[int], kind: pyarrow.DataType) -> list[pyarrow.ChunkedArray]:
        """The values of some columns, (n,) each; `pyarrow.ArrowInvalid` if a row or a value does not fit."""
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
            text = raw.decode(errors="replace").rstrip("\r")
            if text.strip(self._blank_line) and not self._is_comment(text):
                yield _Row(line, text.strip(), self._split(text))

    def bad_row(self, row: _Row, problem: str, hint: str = "") -> PartitionError:
        shown = row.text if len(row.text) < 80 else f"{row.text[:77]}..."
        if self._how.comment is None and row.text.startswith((*_COMMENT_MARKS,)):
            hint = f" If the line is a comment: --comment '{row.text[0]}' (comment=).{hint}"
        elif self._blanks and "\t" in row.text:
            hint = f" If fields have blanks in them: --delimiter TAB (delimiter=).{hint}"
        return PartitionError(
            f"{self.path}, line {row.line}: {shown!r} {problem}. Correct the line, or name the right layout.{hint}"
        )

    def bad_block(self, block: _Block, error: Exception) -> PartitionError:
        """The error if no single line is at fault."""
        last = block.line + _count_lines(block.text)
        return PartitionError(f"{self.path}, lines {block.line} to {last}: {error}. Correct the file.")

    def _rows_only(self, text: bytes) -> bytes:
        """The lines as pyarrow takes them; see [Note: text in blocks]."""
        if not text.endswith(b"\n"):
            text += b"\n"
        if self._how.comment and self._how.comment.encode() in text:
            pattern = rb"^[ \t]*" + re.escape(self._how.comment.encode()) + rb".*\n"
            text, count = re.subn(pattern, b"", text, flags=re.MULTILINE)
            self._passed_over += count
        if not self._blanks and (
            text[:1].isspace() or any(blank in text and b"\n" + blank in text for blank in (b" ", b"\t"))
        ):
            pattern = rb"^[" + re.escape(self._blank_line.encode()) + rb"]*\n"
            text = re.sub(pattern, b"", text, flags=re.MULTILINE)
        if self._blanks and not _has_single_blanks(text):
            text = text.translate(_BLANKS_TO_SPACES)
            while b"  " in text:
                text = text.replace(b"  ", b" ")
            text = text.replace(b" \n", b"\n").replace(b"\n ", b"\n").lstrip(b" ")
        return text

    def _find_delimiter(self, first: str) -> None:
        """Sets the delimiter, from the first row if none is given."""
        outside_quotes = re.sub(r'"[^"]*"', "", first)
        found = self._how.delimiter or next((mark for mark in ",;|" if mark in outside_quotes), None)
        fields = first.rstrip().split("\t")
        has_blanks_inside = len(fields) > 1 and [one.strip() for one in fields] != first.split()
        if found is None and (has_blanks_inside or ("\t" in first and ".tsv" in self.path.suffixes)):
            found = "\t"
        elif found is None and len(first.split()) == 1:
            found = ","  # a single column, in which names may have blanks
        self._blanks = found is None  # in runs, and at the ends of lines
        self._delimiter = found or " "
        self._blank_line = " \t\r" if found is None else " \t\r".replace(found, "")

    def _is_comment(self, line: str, *, before_rows: bool = False) -> bool:
        if self._how.comment is None:
            return before_rows and line.lstrip()[:1] in {*_COMMENT_MARKS}
        return bool(self._how.comment) and line.lstrip().startswith(self._how.comment)

    def _split(self, line: str) -> list[str]:
        if self._blanks:
            return [one.strip('"') for one in line.split()]
        fields = line.split(self._delimiter)
        if '"' in line:
            with suppress(csv.Error):  # of a field beyond the limit, which is no table's
                fields = next(csv.reader([line], delimiter=self._delimiter))
        return [one.strip() for one in fields]

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        try:
            with gzip.open(self.path) if self.path.suffix == ".gz" else self.path.open("rb") as file:
                start = file.read(8)
                for mark, what in _NO_TEXT.items():
                    if start.startswith(mark):
                        raise PartitionError(f"{self.path} is {what}.")
                file.seek(len(_BYTE_ORDER_MARK) if start.startswith(_BYTE_ORDER_MARK) else 0)
                yield file  # type: ignore[misc]  # a GzipFile reads like any other
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise PartitionError(f"{self.path} cannot be unpacked: {error}. Copy it again.") from error
        except OSError as error:
            raise unreadable(self.path, error) from error


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


def is_number(text: str) -> bool:
    """Whether Python reads the text as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _bad_numbers(
    table: _TextTable, block: _Block, columns: Sequence[int], error: Exception, *, integers: bool
) -> PartitionError:
    """The error for a block that is not all numbers, which names the first line that lacks one.

    It is a `NotNumbersError` unless the rows are of wrong length, or integers that do not fit into 64 bits.
    """
    width, all_integers = len(table.names), True
    expected = f"{width} numbers" if len(columns) == width else f"numbers in {[table.names[i] for i in columns]}"
    for row in table.rows(block):
        fields = [row.fields[i] for i in columns if i < len(row.fields)]
        all_integers = all_integers and all(map(_INTEGER.fullmatch, fields))
        if len(row.fields) != width or not all(map(is_number, fields)):
            bad = table.bad_row(row, f"does not have {expected}, {table.separated}, as the first line has")
            return bad if len(row.fields) != width else NotNumbersError(str(bad))
    bad = table.bad_block(block, error)
    return bad if integers and all_integers else NotNumbersError(str(bad))


def _bad_edge(
    table: _TextTable, block: _Block, ends: Sequence[int], limits: Sequence[int], error: Exception, advice: str
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
                    row, f"has something that is no integer; expected {expected}, {table.separated}", advice
                )
            if len(field) > _MOST_DIGITS or not 0 <= int(field, 16 if field[1:2] in "xX" else 10) < limit:
                return table.bad_row(row, f"has an ID out of range; expected {expected}", advice)
        if len(row.fields) != width:
            return table.bad_row(
                row,
                f"has another number of fields than {width}; expected {width}, {table.separated}, as in the first line",
            )
    return table.bad_block(block, error)
