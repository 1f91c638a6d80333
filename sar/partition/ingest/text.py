"""Text tables with one row per line, parsed by `pyarrow.csv`.

Text has one delimiter, an optional header, and comments only before the first row. pyarrow parses blocks of
whole lines: memory is that of a block and its values, and errors name the line. Layouts that pyarrow would
misread, such as a quotation mark within a field, are rejected.
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
from typing import Any, BinaryIO

import numpy as np
import pyarrow
import pyarrow.compute as compute
import pyarrow.csv

from sar.data.arrays import unreadable
from sar.errors import ConfigError, PartitionError
from sar.partition.ingest.parquet import Batch, Kind, NotNumbersError
from sar.partition.ingest.sources import MATRIX_MARKET, TextFormat

_BLOCK_BYTES = 4 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NO_TEXT = b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"PAR1", b"\x93NUMPY", b"\xff\xfe"
"""First bytes of compressed files, other formats and UTF-16, regardless of the file name."""
_DELIMITERS = {"\t": "a tab", ";": "';'", ",": "','", "|": "'|'", " ": "a blank"}
_QUOTED_BETWEEN = ",;"  # with other delimiters, quotes are part of names, as in database dumps
_LIKE_A_VALUE = re.compile(r"[+-]?\.?[0-9]|(?i:true|false|[+-]?nan|[+-]?inf(inity)?)$")  # also dates, 0x1f
_INTEGER = re.compile(r"invalid value '\s*(-?[0-9]+|0[xX][0-9a-fA-F]+)\s*'")
_LONGEST_SHOWN = 80
_PARSED_AS: dict[Kind, pyarrow.DataType] = {
    "integers": pyarrow.int64(),
    "nodes": pyarrow.int64(),
    "fractions": pyarrow.float64(),
    "booleans": pyarrow.bool_(),
    "ids": pyarrow.string(),
}


class TextTable:
    """A text file whose rows have the same number of fields; files that end in `.gz` are decompressed.

    The first row is a header if none of its fields is a number, unless the layout decides. `unclear_ids` and
    `unclear_feature` are a first line that may be a header or a row when reading IDs or a feature.
    """

    share = 0.0  # fraction of the file that has been read

    def __init__(self, path: Path, layout: TextFormat) -> None:
        self.path, self._layout = path, layout
        before, first, comment = 0, "", ""  # lines before the first row, that row, and a comment that may be an ID
        with self._open() as file:
            while raw := file.readline(_BLOCK_BYTES):
                self._check_ends(raw)
                line = raw.decode(errors="replace").rstrip("\r\n")
                if line.startswith("%%MatrixMarket"):
                    raise ConfigError(f"{path} {MATRIX_MARKET}")
                if line.lstrip().startswith(("#", "%")):
                    comment = comment or ("" if line[1:2].isspace() else line)
                elif line.strip(" \t".replace(layout.delimiter or "", "")):
                    first = line
                    break
                before += 1
        self.is_empty = not first
        self._delimiter = layout.delimiter or _find_delimiter(path, first)
        self._suspicious = self._misread_lines()
        fields = [field.strip('"') for field in self._split(first)] if first else []
        self.shown = f"{', '.join(fields)!r} in its first line"
        numbers = [*map(str, range(len(fields)))]
        like_values = [bool(_LIKE_A_VALUE.match(one)) for one in fields]
        self.has_names = not any(like_values) if layout.header is None else layout.header
        self.names = fields if self.has_names else numbers
        self._skipped = before + self.has_names
        if first and self.has_names and all(like_values):
            layout.note(f"{path}: the first line, {', '.join(fields[:10])}, was taken for names of columns.")
        is_named_by_pandas = layout.header is None and fields == numbers and len(fields) > 1
        self.unclear_feature = first if is_named_by_pandas else ""
        self.unclear_ids = first if layout.header is None and self.has_names else "" if self.has_names else comment

    def batches(self, columns: Sequence[int], kind: Kind) -> Iterator[Batch]:
        """Read the rows after the header.

        Raises `PartitionError`, which names the line, if the file is damaged, or a line has another number of fields or
        an empty value; `NotNumbersError` for values of another kind.
        """
        for text, line in self._blocks():
            where = partial(self._where, text, line)
            try:
                values = self._parsed(text, columns, kind)
            except pyarrow.ArrowInvalid as error:
                raise self._error_of(error, kind, where) from error
            for number, column in zip(columns, values, strict=True) if kind == "ids" else ():
                if (row := compute.index(column, "").as_py()) >= 0:
                    raise PartitionError(f"{where(row)}: column {self.names[number]} has no value; expected one.")
            yield Batch(values, where)

    def _blocks(self) -> Iterator[tuple[bytes, int]]:
        """Blocks of lines after the header, without trailing empty lines, and the number of the first line, from 1."""
        line, gap = self._skipped + 1, b""  # empty lines that are dropped unless a row follows
        blanks = b" \t\r\n".replace(self._delimiter.encode(), b"")
        with self._open() as file:
            for _ in range(self._skipped):
                file.readline(_BLOCK_BYTES)
            while text := file.read(_BLOCK_BYTES):
                text += b"" if text.endswith(b"\n") else file.readline(_BLOCK_BYTES)
                if not text.endswith(b"\n") and file.read(1):
                    raise PartitionError(
                        f"{self.path} has a line of more than {_BLOCK_BYTES} bytes; expected a text file."
                    )
                self.share = getattr(file, "fileobj", file).tell() / self.path.stat().st_size
                self._check_ends(text)
                text = gap + text
                rows = text.rstrip(blanks)
                _, newline, gap = text[len(rows) :].partition(b"\n") if rows else (b"", b"", text)
                if rows:
                    rows += newline
                    mark = b"\t" if self._delimiter == " " else b'"'  # if absent, skip the search
                    if self._suspicious and mark in rows and (found := self._suspicious.search(rows)):
                        row = self._where(rows, line, rows.count(b"\n", 0, found.start()), count_all=True)
                        raise PartitionError(
                            f"{row}: a tab or a quotation mark is within a field, or not closed. Correct the line, or "
                            "name the right layout: --delimiter (such as TAB)."
                        )
                    yield rows, line
                    # Ten times faster than bytes.count.
                    line += int(np.count_nonzero(np.frombuffer(rows, np.uint8) == ord("\n")))

    def _check_ends(self, text: bytes) -> None:
        if b"\r" in text and text.count(b"\r") != text.count(b"\r\n"):
            raise PartitionError(f"{self.path} has lines that end in just CR; expected LF or CR LF. Convert it.")

    def _misread_lines(self) -> re.Pattern[bytes] | None:
        """Lines that pyarrow would misread: quotes that do not enclose a field, or a tab if the detected delimiter is a
        space."""
        if self._delimiter in _QUOTED_BETWEEN:
            delimiter = re.escape(self._delimiter.encode())
            one = rb'(?:"(?:[^"\n]|"")*"|[^"\n%b]*)' % delimiter
            return re.compile(rb'(?m)^(?!%b(?:%b%b)*\r?$).*"' % (one, delimiter, one))
        return re.compile(rb"(?m)^.*\t") if self._delimiter == " " and self._layout.delimiter is None else None

    def _parsed(self, text: bytes, columns: Sequence[int], kind: Kind) -> list[Any]:
        """Parse some columns for a `Batch`; `pyarrow.ArrowInvalid` if a row or a value does not fit."""
        names = [*map(str, range(len(self.names)))]
        chosen = [names[column] for column in columns]
        table = pyarrow.csv.read_csv(
            pyarrow.BufferReader(text),
            pyarrow.csv.ReadOptions(use_threads=False, block_size=len(text), column_names=names),
            pyarrow.csv.ParseOptions(
                delimiter=self._delimiter,
                quote_char='"' if self._delimiter in _QUOTED_BETWEEN else False,
                ignore_empty_lines=len(names) > 1,
            ),
            pyarrow.csv.ConvertOptions(
                include_columns=list(dict.fromkeys(chosen)),
                column_types=dict.fromkeys(chosen, _PARSED_AS[kind]),
                null_values=[],
                true_values=["true", "True", "TRUE"],
                false_values=["false", "False", "FALSE"],
            ),
        )
        found = [table.column(name).combine_chunks() for name in chosen]
        if kind == "ids":
            return [compute.utf8_trim_whitespace(column) for column in found]
        return [column.to_numpy(zero_copy_only=False) for column in found]

    def _error_of(self, error: Exception, kind: Kind, where: Callable[[int], str]) -> PartitionError:
        """The error for a block that pyarrow rejects: its message, with the line instead of the row number."""
        found = re.match(r"(?:In CSV column #(\d+)|CSV parse error): Row #(\d+): (.*)", str(error), re.DOTALL)
        if found is None:
            return PartitionError(f"{where(0)} and following: {error}. Correct the file.")
        column, row, problem = found.groups()
        if column is None:
            problem = problem.partition(":")[0]
            return PartitionError(f"{where(int(row) - 1)}: {problem}. Correct the line, or name the right --delimiter.")
        said = f"{where(int(row) - 1)}: column {self.names[int(column)]}: {problem}. Correct the line."
        if _PARSED_AS[kind] == pyarrow.int64() and _INTEGER.search(problem):  # as fractions they would be rounded
            return PartitionError(f"{said} Integers have 64 bits.")
        return NotNumbersError(said)

    def _where(self, text: bytes, line: int, row: int, *, count_all: bool = False) -> str:
        """Describe the file and line of a row in a block; rows are all lines, or the non-empty ones."""
        lines = text.split(b"\n")
        count_all = count_all or len(self.names) == 1
        index = next(islice((i for i, one in enumerate(lines) if count_all or one.strip(b"\r")), row, None))
        return f"{self.path}, line {line + index}, {shortened(lines[index].decode(errors='replace').rstrip())}"

    def _split(self, line: str) -> list[str]:
        fields = line.split(self._delimiter)
        if self._delimiter in _QUOTED_BETWEEN and '"' in line:
            with suppress(csv.Error):  # a field beyond the size limit
                fields = next(csv.reader([line], delimiter=self._delimiter))
        return [one.strip() for one in fields]

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        try:
            with gzip.open(self.path) if self.path.suffix == ".gz" else self.path.open("rb") as file:
                start = file.read(8)
                if start.startswith(_NO_TEXT):
                    raise PartitionError(
                        f"{self.path} is packed, or of another format; expected text in UTF-8. Unpack it, let its name "
                        "end in .gz, or name its format (--format)."
                    )
                file.seek(len(_BYTE_ORDER_MARK) if start.startswith(_BYTE_ORDER_MARK) else 0)
                yield file  # type: ignore[misc]  # a GzipFile reads like any other
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise PartitionError(f"{self.path} cannot be unpacked: {error}. Copy it again.") from error
        except OSError as error:
            raise unreadable(self.path, error) from error


def _find_delimiter(path: Path, first: str) -> str:
    """Detect the delimiter of a table in its first row; `ConfigError` if it is ambiguous.

    The delimiter is the only one of tab, `;`, `,`, `|` and space outside quotes. A space between letters may also be
    part of a name.
    """
    plain = re.sub(r'"[^"]*"', '""', first.strip(" "))
    found = [mark for mark in _DELIMITERS if mark != " " and mark in plain]
    fields = re.sub(r" *([\t;,|]) *", r"\1", plain)
    is_a_name = len(found) == 1 and not re.search(r"\d | \d|  ", fields)
    if " " in fields and not is_a_name:
        found.append(" ")
    if len(found) > 1 or (found == [" "] and ('"' in first or "  " in plain)):
        marks = " and ".join(_DELIMITERS[mark] for mark in found)
        raise ConfigError(
            f"{path} begins with {shortened(first)}, which has {marks}; expected one of these, once between two "
            "fields, and quotation marks only with commas or semicolons. Name it: --delimiter (such as TAB or ';'), or "
            "change the file (tr -s ' ')."
        )
    return found[0] if found else ","  # without any, a single column


def shortened(text: str) -> str:
    """A line, shortened for error messages."""
    return repr(text if len(text) < _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}...")
