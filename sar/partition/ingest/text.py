"""Tables as text, parsed by `pyarrow.csv`: any delimiter or blanks, a header or none, comments, gzip.

[Note: text in blocks] pyarrow takes neither comments nor runs of blanks between fields, and its errors name no line.
So a file is read in blocks of whole lines; a block is stripped of these and parsed. Only if that fails, the lines of
the block are gone through in Python, to name the one at fault. Memory is that of one block and its numbers.
"""

import csv
import gzip
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow
import pyarrow.compute as compute
import pyarrow.csv

from sar.data.arrays import unreadable
from sar.errors import ConfigError, PartitionError
from sar.partition.ingest.columns import END_NAMES, Batch, ColumnChoice, Kind, NotNumbersError
from sar.partition.ingest.files import MATRIX_MARKET, TextFormat

_BLOCK_BYTES = 4 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_COMMENT_MARKS = "#%"
_BLANKS_TO_SPACES = bytes.maketrans(b"\t\r", b"  ")
_INTEGER = re.compile(r"[+-]?[0-9]+|0[xX][0-9a-fA-F]+")
_LIKE_A_VALUE = re.compile(r"[+-]?\.?[0-9]|(?i:true|false)$")  # also hexadecimal numbers and dates
_MOST_DIGITS, _LONGEST_SHOWN = 40, 80
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


class _Block(NamedTuple):
    """Whole lines of a file, and the number of the first one, from 1."""

    text: bytes
    line: int


class _Row(NamedTuple):
    """A line that is no comment."""

    line: int
    text: str
    fields: list[str]


def is_number(text: str) -> bool:
    """Whether Python reads the text as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


_PARSED_AS = {"integers": pyarrow.int64(), "fractions": pyarrow.float64()}  # other kinds as strings
_EXPECTED: dict[Kind, tuple[Callable[[str], object], str]] = {
    "integers": (_INTEGER.fullmatch, "an integer"),
    "fractions": (is_number, "a number"),
    "booleans": (lambda field: field.lower() in ("true", "false"), "True or False"),
    "ids": (lambda field: True, ""),
}
"""By kind whether a field is such a value, and its description."""


class TextTable:
    """A text file with rows of as many fields as its first one has; it is unpacked on the way if it ends in `.gz`."""

    def __init__(self, path: Path, how: TextFormat) -> None:
        self.path, self._how = path, how
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
        self._first_fields = self._split(first) if first else []
        self.shown = f"{', '.join(self._first_fields)!r} in its first line"
        known = {name.casefold() for name in self._first_fields}
        has_known_names = any({*ends} <= known for ends in END_NAMES)
        numbers = [bool(_LIKE_A_VALUE.match(one)) or is_number(one) for one in self._first_fields]
        self.has_names = how.header if how.header is not None else has_known_names or not any(numbers)
        self._names_may_be_ids = how.header is None and self.has_names and not has_known_names
        self.names = self._first_fields if self.has_names else [*map(str, range(len(self._first_fields)))]
        if self.has_names and all(numbers) and first:
            how.note(f"{path}: the first line, {', '.join(self.names[:10])}, was taken for names of columns.")
        self._skipped = before + self.has_names
        # Names such as #cat may be IDs, if they stand in rows like the others.
        self._row_like_comments = [
            line for line in comments
            if how.comment is None and not line[1:2].isspace() and len(self._split(line)) == len(self.names)
        ]  # fmt: skip

    def batches(self, choice: ColumnChoice, kind: Kind) -> Iterator[Batch]:
        """The rows after the header.

        Raises `PartitionError` if the file is damaged, or a line has another number of fields or lacks an ID;
        `NotNumbersError` if a value is of another kind; both name the line. `ConfigError` if the first lines may be
        names, comments or rows.
        """
        if not self.names:
            return
        self._check_first_lines(choice, kind)
        columns = choice.numbers(self)
        for block in self._blocks():
            try:
                values = self._values(self._rows_only(block.text), columns, kind)
            except pyarrow.ArrowInvalid as error:
                raise self._bad_block(block, columns, kind, error) from error
            if kind == "ids":
                for number, column in zip(columns, values, strict=True):
                    if (row := compute.index(column, "").as_py()) >= 0:
                        raise self._bad_row(
                            self._row(block, row), f"column {self.names[number]} has no value; expected one"
                        )
                    if self._names_may_be_ids and not compute.all(compute.ascii_is_decimal(column)).as_py():
                        raise ConfigError(
                            f"{self.path} begins with {', '.join(self.names)!r}: names of columns, or IDs? Say which "
                            "(header=, --header, --no-header); of a table of nodes give the first line names, and name "
                            "the column: FILE#NAME."
                        )
            yield Batch(values, partial(lambda of, number: self._where(self._row(of, number)), block))

    def _check_first_lines(self, choice: ColumnChoice, kind: Kind) -> None:
        counted = len(self.names) > 1 and self._first_fields == [*map(str, range(len(self.names)))]
        if choice.of == "feature" and counted and self._how.header is None and not self._how.numbers_are_rows:
            raise ConfigError(
                f"{self.path} begins with {', '.join(self._first_fields)!r}: names of columns, as pandas writes them, "
                "or a row? Say which (header=, --header, --no-header)."
            )
        if kind == "ids" and self._row_like_comments:
            raise ConfigError(
                f"{self.path} begins with {self._row_like_comments[0]!r}: a comment, or a row? Say what begins "
                "comments (comment=, --comment): '#', or '' if there are none."
            )

    def _blocks(self) -> Iterator[_Block]:
        """The lines after the header."""
        line, self._passed_over = self._skipped + 1, self._comments
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
        if self._passed_over:
            self._how.note(f"{self.path}: lines passed over as comments: {self._passed_over}")

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

    def _values(self, text: bytes, columns: Sequence[int], kind: Kind) -> list[pyarrow.Array]:
        """The values of some columns as in a `Batch`; `pyarrow.ArrowInvalid` if a row or a value does not fit."""
        parsed_as = _PARSED_AS.get(kind, pyarrow.string())
        names = [str(number) for number in range(len(self.names))]
        chosen = [names[column] for column in columns]
        found = [pyarrow.array([], parsed_as) for _ in chosen]
        if text:
            table = pyarrow.csv.read_csv(
                pyarrow.BufferReader(text),
                pyarrow.csv.ReadOptions(use_threads=False, block_size=len(text), column_names=names),
                pyarrow.csv.ParseOptions(delimiter=" " if self._blanks else self._delimiter),
                pyarrow.csv.ConvertOptions(
                    include_columns=list(dict.fromkeys(chosen)),
                    column_types=dict.fromkeys(chosen, parsed_as),
                    null_values=[],
                ),
            )
            if b'"' in text and table.num_rows != sum(map(bool, text.replace(b"\r", b"").split(b"\n"))):
                raise pyarrow.ArrowInvalid("a quotation mark is not closed on its line")
            found = [table.column(name).combine_chunks() for name in chosen]
        if kind in _PARSED_AS:
            return [column.to_numpy() for column in found]
        found = [compute.utf8_trim_whitespace(column) for column in found]
        if kind == "ids":
            return found
        lower = [compute.utf8_lower(column) for column in found]
        if not all(compute.all(compute.is_in(one, pyarrow.array(["true", "false"]))).as_py() for one in lower):
            raise pyarrow.ArrowInvalid("values are not True and False")
        return [compute.equal(column, "true").to_numpy(zero_copy_only=False) for column in lower]

    def _rows(self, block: _Block) -> Iterator[_Row]:
        """The rows one by one, slowly: to find the one that is wrong."""
        for line, raw in enumerate(block.text.split(b"\n"), block.line):
            text = raw.decode(errors="replace").rstrip("\r")
            for row in [text] if self._blanks else text.split("\r"):  # which ends a row for pyarrow
                if row.strip(self._blank_line) and not self._is_comment(row):
                    yield _Row(line, row.strip(), self._split(row))

    def _row(self, block: _Block, number: int) -> _Row:
        return next(islice(self._rows(block), number, None), _Row(block.line + _count_lines(block.text), "", []))

    def _where(self, row: _Row) -> str:
        return f"{self.path}, line {row.line}, {_short(row.text)}"

    def _bad_row(self, row: _Row, problem: str) -> PartitionError:
        hint = ""
        if self._how.comment is None and row.text.startswith((*_COMMENT_MARKS,)):
            hint = f" If the line is a comment: --comment '{row.text[0]}' (comment=)."
        elif self._blanks and "\t" in row.text:
            hint = " If fields have blanks in them: --delimiter TAB (delimiter=)."
        return PartitionError(f"{self._where(row)}: {problem}. Correct the line, or name the right layout.{hint}")

    def _bad_block(self, block: _Block, columns: Sequence[int], kind: Kind, error: Exception) -> PartitionError:
        """The error for a block that pyarrow does not take: it names the first line at fault, if one is."""
        width = len(self.names)
        too_large: PartitionError | None = None
        separated = f"separated by {'blanks' if self._blanks else repr(self._delimiter)}"
        is_valid, expected = _EXPECTED[kind]
        for row in self._rows(block):
            if (found := len(row.fields)) != width:
                problem = f"{found} field{'s' * (found != 1)}; expected {width}, {separated}, as in the first line"
                return self._bad_row(row, problem)
            for column in columns:
                field = row.fields[column]
                problem = f"column {self.names[column]} has {_short(field)}; expected {expected}"
                if not is_valid(field):
                    return NotNumbersError(str(self._bad_row(row, problem)))
                if too_large is None and kind == "integers" and not _fits(field):
                    too_large = self._bad_row(row, f"{problem} of 64 bits")
        if too_large is not None:  # which fractions would round, so that other kinds are not to be tried
            return too_large
        last = block.line + _count_lines(block.text)
        return PartitionError(f"{self.path}, lines {block.line} to {last}: {error}. Correct the file.")

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


def _short(text: str) -> str:
    return repr(text if len(text) < _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}...")


def _fits(integer: str) -> bool:
    """Whether an integer fits into 64 bits; Python's int() takes no integers of any length."""
    is_hexadecimal = "x" in integer.lower()
    return len(integer) <= _MOST_DIGITS and -(2**63) <= int(integer, 16 if is_hexadecimal else 10) < 2**63


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
