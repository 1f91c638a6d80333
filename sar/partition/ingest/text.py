"""Tables as text, parsed by `pyarrow.csv`: one delimiter, a header or none, comments before the first row, gzip.

A file is read in blocks of whole lines: memory is that of a block and its numbers, and errors can name the line.
"""

import csv
import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
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
from sar.partition.ingest.columns import END_NAMES, Batch, Kind, NotNumbersError
from sar.partition.ingest.files import MATRIX_MARKET, TextFormat

_BLOCK_BYTES = 4 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_COMMENT_MARKS = ("#", "%")
_DELIMITERS = {"\t": "a tab", ";": "';'", ",": "','", "|": "'|'", " ": "a blank"}
_QUOTED_BETWEEN = ",;"  # elsewhere quotation marks are part of names, as in dumps of data bases
_LIKE_A_VALUE = re.compile(r"[+-]?\.?[0-9]|(?i:true|false)$")  # also hexadecimal numbers and dates
_INTEGER = re.compile(r"-?[0-9]+|0[xX][0-9a-fA-F]+")
_LONGEST_SHOWN = 80
_COMMENTS_SEEN = 20
_NO_TEXT = {  # first bytes of files that are no text, however they are called
    "packed by gzip; expected text, or a name that ends in .gz. Rename it": (b"\x1f\x8b",),
    "packed; expected text, or text packed by gzip. Unpack it": (
        b"BZh",
        b"\xfd7zXZ",
        b"\x28\xb5\x2f\xfd",
        b"PK\x03\x04",
    ),
    "of another format; expected text. Rename it, or name its format (--format)": (b"PAR1", b"\x93NUMPY"),
    "text in UTF-16; expected UTF-8. Convert it": (b"\xff\xfe", b"\xfe\xff"),
}
_PARSED_AS: dict[Kind, tuple[pyarrow.DataType, str]] = {
    "integers": (pyarrow.int64(), "an integer"),
    "nodes": (pyarrow.int64(), "an integer"),
    "fractions": (pyarrow.float64(), "a number"),
    "booleans": (pyarrow.bool_(), "True or False"),
    "ids": (pyarrow.string(), "text in UTF-8"),
}
_ERROR = re.compile(r"In CSV column #(\d+): Row #(\d+): |CSV parse error: Row #(\d+): .*got (\d+):")


class _Block(NamedTuple):
    """Whole lines of a file, and the number of the first one, from 1."""

    text: bytes
    line: int


def is_number(text: str) -> bool:
    """Whether Python reads the text as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


class TextTable:
    """A text file with rows of as many fields as its first one has; it is unpacked on the way if it ends in `.gz`."""

    def __init__(self, path: Path, layout: TextFormat) -> None:
        self.path, self._layout = path, layout
        before, first, comments = 0, "", list[str]()  # lines before the first row, that row, and some of the comments
        marks = _COMMENT_MARKS if layout.comment is None else (layout.comment,) * bool(layout.comment)
        with self._open() as file:
            while raw := file.readline(_BLOCK_BYTES):
                self._check_ends(raw)
                line = raw.decode(errors="replace").rstrip("\r\n")
                if line.startswith("%%MatrixMarket"):
                    raise ConfigError(f"{path} {MATRIX_MARKET}")
                if line.lstrip().startswith(marks):
                    comments += [line.strip()] if len(comments) < _COMMENTS_SEEN else []
                elif line.strip(" \t".replace(layout.delimiter or "", "")):
                    first = line
                    break
                before += 1
        self.is_empty = not first
        self._delimiter = layout.delimiter or _find_delimiter(path, first)
        self._has_quotes = self._delimiter in _QUOTED_BETWEEN
        fields = [field.strip('"') for field in self._split(first)] if first else []
        self.shown = f"{', '.join(fields)!r} in its first line"
        known = {name.casefold() for name in fields}
        has_known_names = any({*ends} <= known for ends in END_NAMES)
        numbers = [bool(_LIKE_A_VALUE.match(one)) or is_number(one) for one in fields]
        self.has_names = layout.header if layout.header is not None else has_known_names or not any(numbers)
        self._names_may_be_ids = layout.header is None and self.has_names and not has_known_names
        self.names = fields if self.has_names else [*map(str, range(len(fields)))]
        if first and self.has_names and all(numbers):
            layout.note(f"{path}: the first line, {', '.join(fields[:10])}, was taken for names of columns.")
        if not self.has_names and has_known_names:
            layout.note(f"{path}: the first line, {', '.join(fields[:10])}, was taken for a row (--no-header).")
        may_be_counted = layout.header is None and not layout.numbers_are_rows and len(fields) > 1
        self._is_counted = may_be_counted and fields == [*map(str, range(len(fields)))]
        self._skipped = before + self.has_names
        # Names such as #cat may be IDs, if they stand in rows like the others.
        self._row_like_comments = [
            line for line in comments
            if layout.comment is None and not line[1:2].isspace() and len(self._split(line)) == len(self.names)
        ]  # fmt: skip

    def batches(self, columns: Sequence[int], kind: Kind) -> Iterator[Batch]:
        """The rows after the header.

        Raises `PartitionError`, which names the line, if the file is damaged, or a line has another number of fields or
        lacks a value; `NotNumbersError` if a value is of another kind; `ConfigError` if the first lines may be names,
        comments or rows.
        """
        if kind not in ("ids", "nodes") and self._is_counted:
            raise ConfigError(
                f"{self.path} begins with {', '.join(self.names)!r}: names of columns, as pandas writes them, or a "
                "row? Say which (--header, --no-header)."
            )
        if kind == "ids" and self._row_like_comments:
            raise ConfigError(
                f"{self.path} begins with {self._row_like_comments[0]!r}: a comment, or a row? Say what begins "
                "comments (--comment): '#', or '' if there are none."
            )
        for block in self._blocks():
            try:
                values = self._values(block.text, columns, kind)
            except pyarrow.ArrowInvalid as error:
                raise self._bad_block(block, kind, error) from error
            if kind == "ids":
                for number, column in zip(columns, values, strict=True):
                    if (row := compute.index(column, "").as_py()) >= 0:
                        problem = f"column {self.names[number]} has no value; expected one"
                        raise self._bad_row(self._row(block, row), problem)
                    if self._names_may_be_ids and not compute.all(compute.ascii_is_decimal(column)).as_py():
                        raise ConfigError(
                            f"{self.path} begins with {', '.join(self.names)!r}: names of columns, or IDs? Say which "
                            "(--header, --no-header); of a table or list of nodes give the first line a name, and name "
                            "the column: FILE#NAME."
                        )
            yield Batch(values, partial(lambda of, number: self._where(*self._row(of, number)), block))

    def _blocks(self) -> Iterator[_Block]:
        """The lines after the header, without empty ones at the end."""
        line, follows_gap = self._skipped + 1, False
        blanks = b" \t\r\n".replace(self._delimiter.encode(), b"")
        with self._open() as file:
            for _ in range(self._skipped):
                file.readline(_BLOCK_BYTES)
            while text := file.read(_BLOCK_BYTES):
                text += b"" if text.endswith(b"\n") else file.readline(_BLOCK_BYTES)
                if not text.endswith(b"\n") and file.read(1):
                    raise PartitionError(
                        f"{self.path}, line {line + _count_lines(text)}, is longer than {_BLOCK_BYTES} bytes; "
                        "expected a text file."
                    )
                rows = text.rstrip(blanks)
                if rows and follows_gap and len(self.names) == 1:
                    raise self._bad_row((line - 1, ""), f"column {self.names[0]} has no value; expected one")
                if rows:
                    block = _Block(rows + b"\n", line)
                    self._check_ends(rows)
                    self._check_marks(block)
                    yield block
                line += _count_lines(text)
                follows_gap = text.count(b"\n", len(rows)) > bool(rows) or (follows_gap and not rows)

    def _check_ends(self, text: bytes) -> None:
        if b"\r" in text and text.count(b"\r") != text.count(b"\r\n"):
            raise PartitionError(f"{self.path} has lines that end in CR alone; expected LF or CR LF. Convert it.")

    def _check_marks(self, block: _Block) -> None:
        """Raise `PartitionError` if a quotation mark is within a field, or a tab where blanks were found to delimit."""
        text = np.frombuffer(b"\n" + block.text, np.uint8)
        bad, problem = np.empty(0, np.intp), "a tab within a field; expected blanks only, as in the first line"
        if self._delimiter == " " and self._layout.delimiter is None and b"\t" in block.text:
            bad = np.flatnonzero(text == ord("\t"))
        elif self._has_quotes and b'"' in block.text:
            problem = (
                "a quotation mark is within a field, or not closed; expected quotes around all of it, else doubled"
            )
            quotes, newlines = np.flatnonzero(text == ord('"')), np.flatnonzero(text == ord("\n"))
            ends = [*map(ord, (self._delimiter, "\n", '"'))]
            opening, closing = quotes[0::2], quotes[1::2]
            opens_within = opening[~np.isin(text[opening - 1], ends)]
            closes_within = closing[~np.isin(text[closing + 1], [*ends, ord("\r")])]
            within_quotes = newlines[np.searchsorted(quotes, newlines) % 2 == 1]
            bad = np.concatenate([opens_within, closes_within, within_quotes])
        if bad.size:
            index = block.text[: max(bad.min() - 1, 0)].count(b"\n")
            raise self._bad_row((block.line + index, _shown_line(block.text.split(b"\n")[index])), problem)

    def _values(self, text: bytes, columns: Sequence[int], kind: Kind) -> list[pyarrow.Array]:
        """The values of some columns as in a `Batch`; `pyarrow.ArrowInvalid` if a row or a value does not fit."""
        parsed_as, names = _PARSED_AS[kind][0], [*map(str, range(len(self.names)))]
        chosen = [names[column] for column in columns]
        parsing = pyarrow.csv.ParseOptions(
            delimiter=self._delimiter,
            quote_char='"' if self._has_quotes else False,
            ignore_empty_lines=len(self.names) > 1,
        )
        table = pyarrow.csv.read_csv(
            pyarrow.BufferReader(text),
            pyarrow.csv.ReadOptions(use_threads=False, block_size=len(text), column_names=names),
            parsing,
            pyarrow.csv.ConvertOptions(
                include_columns=list(dict.fromkeys(chosen)),
                column_types=dict.fromkeys(chosen, parsed_as),
                null_values=[],
                true_values=["true", "True", "TRUE"],
                false_values=["false", "False", "FALSE"],
            ),
        )
        found = [table.column(name).combine_chunks() for name in chosen]
        if kind == "ids":
            return [compute.utf8_trim_whitespace(column) for column in found]
        return [column.to_numpy(zero_copy_only=False) for column in found]

    def _row(self, block: _Block, number: int) -> tuple[int, str]:
        """The number and text of the line with a row."""
        lines = block.text.split(b"\n")
        rows = (i for i, line in enumerate(lines) if line.strip(b"\r") or len(self.names) == 1)
        index = next(islice(rows, number, None))
        return block.line + index, _shown_line(lines[index])

    def _where(self, line: int, text: str) -> str:
        return f"{self.path}, line {line}, {_short(text)}"

    def _bad_row(self, row: tuple[int, str], problem: str) -> PartitionError:
        text, hint = row[1], ""
        if text.startswith(self._layout.comment or _COMMENT_MARKS):
            hint = " Comments stand before the first row only; if the line is one, remove it."
        elif self._delimiter == " " and "\t" in text:
            hint = " If fields have blanks in them: --delimiter TAB."
        elif self._delimiter == " " and "  " in text:
            hint = f" If blanks come in runs, make them one: tr -s ' ' < {self.path.name}."
        return PartitionError(f"{self._where(*row)}: {problem}. Correct the line, or name the right layout.{hint}")

    def _bad_block(self, block: _Block, kind: Kind, error: Exception) -> PartitionError:
        """The error for a block that pyarrow does not take: it names the line and value that pyarrow names."""
        if (found := _ERROR.match(str(error))) is None:
            return PartitionError(f"{self.path}, line {block.line} and following: {error}. Correct the file.")
        column, row, line, count = (int(number or 0) for number in found.groups())
        row_found = self._row(block, (row or line) - 1)
        if line:
            problem = f"{count} field{'s' * (count != 1)}; expected {len(self.names)}, separated by {self._delimiter!r}"
            return self._bad_row(row_found, f"{problem}, as in the first line")
        value = self._split(row_found[1])[column]
        problem = f"column {self.names[column]} has {_short(value)}; expected {_PARSED_AS[kind][1]}"
        if _PARSED_AS[kind][0] == pyarrow.int64() and _INTEGER.fullmatch(value):
            return self._bad_row(row_found, f"{problem} of 64 bits")  # as fractions they would be rounded
        problem += ", with a decimal point" * bool(re.fullmatch(r"-?\d+,\d+", value))
        return NotNumbersError(str(self._bad_row(row_found, problem)))

    def _split(self, line: str) -> list[str]:
        fields = line.split(self._delimiter)
        if self._has_quotes and '"' in line:
            with suppress(csv.Error):  # of a field beyond the limit, which is no table's
                fields = next(csv.reader([line], delimiter=self._delimiter))
        return [one.strip() for one in fields]

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        try:
            with gzip.open(self.path) if self.path.suffix == ".gz" else self.path.open("rb") as file:
                start = file.read(8)
                for what, marks in _NO_TEXT.items():
                    if start.startswith(marks):
                        raise PartitionError(f"{self.path} is {what}.")
                file.seek(len(_BYTE_ORDER_MARK) if start.startswith(_BYTE_ORDER_MARK) else 0)
                yield file  # type: ignore[misc]  # a GzipFile reads like any other
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise PartitionError(f"{self.path} cannot be unpacked: {error}. Copy it again.") from error
        except OSError as error:
            raise unreadable(self.path, error) from error


def _find_delimiter(path: Path, first: str) -> str:
    """The delimiter of a table, if its first row tells one; else `ConfigError`.

    That is the only one of tab, `;`, `,`, `|` and blank that it has outside of quotes. A blank between letters may also
    be part of a name.
    """
    plain = re.sub(r'"[^"]*"', '""', first.strip(" "))
    if ".tsv" in path.suffixes and "\t" in plain:
        return "\t"
    found = [mark for mark in _DELIMITERS if mark != " " and mark in plain]
    fields = re.sub(r" *([\t;,|]) *", r"\1", plain)
    is_a_name = len(found) == 1 and not re.search(r"\d | \d|  ", fields)
    if " " in fields and not is_a_name:
        found.append(" ")
    if len(found) > 1 or (found == [" "] and ('"' in first or "  " in plain)):
        marks = " and ".join(_DELIMITERS[mark] for mark in found)
        raise ConfigError(
            f"{path} begins with {_short(first)}, which has {marks}; expected one of these, once between two fields, "
            "and quotation marks only with commas or semicolons. Name it: --delimiter (such as TAB or ';'), or change "
            "the file (tr -s ' ')."
        )
    return found[0] if found else ","  # without any, a single column


def _shown_line(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r")


def _short(text: str) -> str:
    return repr(text if len(text) < _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}...")


def _count_lines(text: bytes) -> int:
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == ord("\n")))  # ten times as fast as bytes.count
