"""Tables: text is read by `pyarrow.csv`, Parquet by `pyarrow.parquet`, in batches with the types that are asked for.

Text has one delimiter, a header or none, and comments before the first row only. It is given to pyarrow in blocks of
whole lines: memory is that of a block and its numbers, and errors name the line. Layouts that pyarrow would read in
another way than their author meant, such as a quotation mark within a field, are refused.
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
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import pyarrow
import pyarrow.compute as compute
import pyarrow.csv
import pyarrow.parquet
import pyarrow.types as kinds

from sar.data.arrays import Array, open_npy, unreadable
from sar.errors import ConfigError, PartitionError
from sar.partition.ingest.sources import ALL_COLUMNS, MATRIX_MARKET, Files, InputFiles, TextFormat
from sar.tensors.ids import pieces

_BATCH_ROWS = 1 << 17  # of Parquet
_BLOCK_BYTES = 4 << 20  # of text
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NO_TEXT = b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"PAR1", b"\x93NUMPY", b"\xff\xfe"
"""First bytes of packed files, of other formats and of UTF-16, however the files are called."""
_COMMENT_MARKS = ("#", "%")
_COMMENTS_SEEN = 20
_DELIMITERS = {"\t": "a tab", ";": "';'", ",": "','", "|": "'|'", " ": "a blank"}
_QUOTED_BETWEEN = ",;"  # elsewhere quotation marks are part of names, as in dumps of data bases
_LIKE_A_VALUE = re.compile(r"[+-]?\.?[0-9]|(?i:true|false|[+-]?nan|[+-]?inf(inity)?)$")  # also dates, 0x1f
_INTEGER = re.compile(r"invalid value '\s*(-?[0-9]+|0[xX][0-9a-fA-F]+)\s*'")
_LONGEST_SHOWN = 80

Kind = Literal["integers", "fractions", "booleans", "nodes", "ids"]
"""The values of a table that are asked for: a feature's, numbers of nodes, or IDs as they stand there."""
Purpose = Literal["edges", "ids", "feature"]
"""What a table is read for: two columns of edges, one of IDs, or any number for a feature."""
_PARSED_AS: dict[Kind, pyarrow.DataType] = {
    "integers": pyarrow.int64(),
    "nodes": pyarrow.int64(),
    "fractions": pyarrow.float64(),
    "booleans": pyarrow.bool_(),
    "ids": pyarrow.string(),
}


class NotNumbersError(PartitionError):
    """A feature has values that are no numbers of the type asked for."""


class Batch(NamedTuple):
    """Some rows of a table."""

    columns: list[Any]  # numbers as numpy arrays, (n,) or (n, F); IDs as pyarrow arrays of strings or integers, (n,)
    where: Callable[[int], str]  # describes a row, by its number among these, for errors


# -- text


class TextTable:
    """A text file with rows of as many fields as its first one has; it is unpacked on the way if it ends in `.gz`."""

    share = 0.0  # of the file that has been read

    def __init__(self, path: Path, layout: TextFormat) -> None:
        self.path, self._layout = path, layout
        before, first, comments = 0, "", list[str]()  # lines before the first row, that row, and some of the comments
        with self._open() as file:
            while raw := file.readline(_BLOCK_BYTES):
                self._check_ends(raw)
                line = raw.decode(errors="replace").rstrip("\r\n")
                if line.startswith("%%MatrixMarket"):
                    raise ConfigError(f"{path} {MATRIX_MARKET}")
                if line.lstrip().startswith(_COMMENT_MARKS):
                    comments += [line.strip()] if len(comments) < _COMMENTS_SEEN else []
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
        has_ends, like_values = _named_ends(fields) is not None, [bool(_LIKE_A_VALUE.match(one)) for one in fields]
        self.has_names = layout.header if layout.header is not None else has_ends or not any(like_values)
        self.names = fields if self.has_names else numbers
        self._skipped = before + self.has_names
        if first and self.has_names and all(like_values):
            layout.note(f"{path}: the first line, {', '.join(fields[:10])}, was taken for names of columns.")
        # First lines that may be names, as pandas writes them, IDs, or comments such as #cat, which may be an ID, too.
        is_unclear = layout.header is None and fields == numbers and len(fields) > 1 and not layout.numbers_are_rows
        self._no_feature_if = first if is_unclear else None
        commented = (line for line in comments if not line[1:2].isspace() and len(self._split(line)) == len(fields))
        is_unclear = layout.header is None and self.has_names and not has_ends
        self._no_ids_if = next(commented, first if is_unclear else None)

    def batches(self, columns: Sequence[int], kind: Kind) -> Iterator[Batch]:
        """The rows after the header.

        Raises `PartitionError`, which names the line, if the file is damaged, or a line has another number of fields or
        lacks a value; `NotNumbersError` if a value is of another kind; `ConfigError` if the first lines may be names,
        comments or rows.
        """
        unclear = self._no_ids_if if kind == "ids" else None if kind == "nodes" else self._no_feature_if
        if unclear is not None:
            raise ConfigError(
                f"{self.path} begins with {_short(unclear)}: a row, names of columns, or a comment? Say it (--header, "
                "--no-header), name a column (FILE#NAME), or put a blank after the mark of a comment."
            )
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
        """The lines after the header, without empty ones at the end; with the number of the first line, from 1."""
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
                    mark = b"\t" if self._delimiter == " " else b'"'  # without it, the search is spared
                    if self._suspicious and mark in rows and (found := self._suspicious.search(rows)):
                        row = self._where(rows, line, rows.count(b"\n", 0, found.start()), count_all=True)
                        raise PartitionError(
                            f"{row}: a tab or a quotation mark is within a field, or not closed. Correct the line, or "
                            "name the right layout: --delimiter (such as TAB)."
                        )
                    yield rows, line
                    # Ten times as fast as bytes.count.
                    line += int(np.count_nonzero(np.frombuffer(rows, np.uint8) == ord("\n")))

    def _check_ends(self, text: bytes) -> None:
        if b"\r" in text and text.count(b"\r") != text.count(b"\r\n"):
            raise PartitionError(f"{self.path} has lines that end in CR alone; expected LF or CR LF. Convert it.")

    def _misread_lines(self) -> re.Pattern[bytes] | None:
        """Lines that pyarrow reads in another way than they look: quotes that do not enclose a field, or a tab where
        blanks were found to delimit."""
        if self._delimiter in _QUOTED_BETWEEN:
            delimiter = re.escape(self._delimiter.encode())
            one = rb'(?:"(?:[^"\n]|"")*"|[^"\n%b]*)' % delimiter
            return re.compile(rb'(?m)^(?!%b(?:%b%b)*\r?$).*"' % (one, delimiter, one))
        return re.compile(rb"(?m)^.*\t") if self._delimiter == " " and self._layout.delimiter is None else None

    def _parsed(self, text: bytes, columns: Sequence[int], kind: Kind) -> list[Any]:
        """The values of some columns as in a `Batch`; `pyarrow.ArrowInvalid` if a row or a value does not fit."""
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
        """The error for a block that pyarrow does not take: what it says, with the line for its number of the row."""
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
        """The file, and the line of a row in a block; rows are the lines that are not empty, or all."""
        lines = text.split(b"\n")
        count_all = count_all or len(self.names) == 1
        index = next(islice((i for i, one in enumerate(lines) if count_all or one.strip(b"\r")), row, None))
        return f"{self.path}, line {line + index}, {_short(lines[index].decode(errors='replace').rstrip())}"

    def _split(self, line: str) -> list[str]:
        fields = line.split(self._delimiter)
        if self._delimiter in _QUOTED_BETWEEN and '"' in line:
            with suppress(csv.Error):  # of a field beyond the limit, which is no table's
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


def _short(text: str) -> str:
    return repr(text if len(text) < _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}...")


# -- Parquet


class ParquetTable:
    """A Parquet file. Features are read as they are stored, whatever kind of numbers is asked for."""

    has_names, is_empty, share = True, False, 0.0

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except (OSError, pyarrow.ArrowException) as error:
            raise PartitionError(
                f"{path} cannot be read as a Parquet file: {error}. Copy or write it again."
            ) from error
        self.names = self._file.schema_arrow.names
        self.shown = ", ".join(self.names)

    def batches(self, columns: Sequence[int], kind: Kind) -> Iterator[Batch]:
        """The rows; a batch without rows if there are none, for the types of a feature."""
        names, row = [self.names[column] for column in columns], 0
        for name in names:
            if self.names.count(name) > 1:
                raise ConfigError(f"{self.path} has {self.names.count(name)} columns called {name!r}; expected one.")
        try:
            for batch in self._file.iter_batches(_BATCH_ROWS, columns=names, use_threads=False):
                self.share = (row + batch.num_rows) / self._file.metadata.num_rows
                if batch.num_rows:
                    yield self._batch([batch.column(name) for name in names], names, kind, row)
                row += batch.num_rows
            if not row and kind not in ("nodes", "ids"):
                types = [self._file.schema_arrow.field(name).type for name in names]
                yield self._batch([pyarrow.array([], one) for one in types], names, kind, 0)
        except (OSError, pyarrow.ArrowException) as error:
            raise PartitionError(f"{self.path} is damaged: {error}. Copy or write it again.") from error

    def _batch(self, columns: Sequence[pyarrow.Array], names: Sequence[str], kind: Kind, first: int) -> Batch:
        where, values = lambda row: f"{self.path}, row {first + row} (from 0)", []
        for name, column in zip(names, columns, strict=True):
            if column.null_count:
                missing = int(np.argmax(np.asarray(column.is_null())))
                raise PartitionError(f"{where(missing)}: column {name!r} has no value there; expected one.")
            is_ids = kind in ("nodes", "ids")
            values.append(_node_ids(column, name, kind, where) if is_ids else _numbers(column, name, where))
        if len(values) > 1 and any(isinstance(value, np.ndarray) and value.ndim > 1 for value in values):
            raise PartitionError(
                f"{self.path} has lists in one of {', '.join(names)}; name one column of lists, or scalars."
            )
        return Batch(values, where)


def _numbers(column: pyarrow.Array, name: str, where: Callable[[int], str]) -> Any:
    """A column of a feature in Parquet: (n,), or (n, F) if rows are lists."""
    count, stored = len(column), column.type
    row_shape: tuple[int, ...] = ()
    if kinds.is_fixed_size_list(stored):
        column, row_shape = column.flatten(), (stored.list_size,)
    elif kinds.is_list(stored) or kinds.is_large_list(stored):
        lengths = np.asarray(column.value_lengths())
        if (lengths != lengths[:1]).any():
            row = int(np.argmax(lengths != lengths[0]))
            raise PartitionError(
                f"{where(row)}: column {name!r} has a list of {lengths[row]}; expected {lengths[0]} numbers, as in "
                "the rows before."
            )
        column, row_shape = column.flatten(), (int(lengths[0]) if count else 0,)
    is_numbers = kinds.is_integer(column.type) or kinds.is_floating(column.type) or kinds.is_boolean(column.type)
    if column.null_count or not is_numbers:
        missing = " with missing values in it" if column.null_count else ""
        raise NotNumbersError(f"{where(0)}: column {name!r} is of type {stored}{missing}; expected numbers.")
    return column.to_numpy(zero_copy_only=False).reshape(count, *row_shape)


def _node_ids(column: pyarrow.Array, name: str, kind: Kind, where: Callable[[int], str]) -> Any:
    """A column of IDs in Parquet: (n,) integers, or if any IDs are asked for also strings."""
    if kind == "ids" and kinds.is_dictionary(column.type):
        column = column.dictionary_decode()
    if kind == "ids" and any(form in str(column.type) for form in ("string", "binary")):
        column = column.cast(pyarrow.string())  # checks that bytes are UTF-8
    if not (kinds.is_integer(column.type) or (kind == "ids" and kinds.is_string(column.type))):
        expected = "integers or strings, IDs" if kind == "ids" else "integers, node IDs"
        raise NotNumbersError(f"{where(0)}: column {name!r} is of type {column.type}; expected {expected}.")
    return column if kind == "ids" else column.to_numpy()


# -- any of them

Table = TextTable | ParquetTable


def read_table(source: InputFiles, purpose: Purpose, kind: Kind) -> Iterator[tuple[int, Batch]]:
    """The rows of a table, each batch with the number of its file; errors are those of `TextTable.batches`."""
    for number, (table, columns) in enumerate(open_table(source, purpose)):
        for batch in () if table.is_empty else table.batches(columns, kind):
            source.text.progress(f"reading {table.path.name}", table.share)
            yield number, batch


def read_ids(source: InputFiles) -> Iterator[tuple[int, pyarrow.Array]]:
    """The IDs in the one column that is meant, integers or strings, in chunks, each with the number of its file."""
    if source.format != "npy":
        yield from ((number, batch.columns[0]) for number, batch in read_table(source, "ids", "ids"))
        return
    for number, file in enumerate(source.files):
        array, _ = open_npy(file)
        if source.columns is not None or array.shape[1:] not in ((), (1,)) or array.dtype.kind not in "iu":
            raise PartitionError(f"{file} holds {array.dtype} {array.shape}; expected integers (N,), IDs of nodes.")
        yield from ((number, pyarrow.array(array[rows].reshape(-1))) for rows in pieces(array.shape[0]))


def read_node_list(files: Files, header: bool | None = None) -> Array:
    """The IDs in a list of nodes, (S,): integers, or strings in UTF-8, as which text files give all IDs."""
    columns = [column for _, column in read_ids(InputFiles.select(files, TextFormat(header=header)))]
    ids = pyarrow.concat_arrays(columns or [pyarrow.array([], pyarrow.int64())])
    return ids.to_numpy() if kinds.is_integer(ids.type) else as_bytes(ids)


def as_bytes(texts: pyarrow.Array) -> Array:
    """Strings in UTF-8, (n,), of the width of the longest one."""
    return np.array([b"", *texts.cast(pyarrow.binary()).to_pylist()])[1:]


def open_table(source: InputFiles, purpose: Purpose) -> list[tuple[Table, list[int]]]:
    """The files of a table, each with the numbers of the columns to read: the same ones, by their names if they have.

    Columns that are wanted are names, or numbers from 0, also in digits; of a feature also ranges such as `0-1432`, and
    `ALL_COLUMNS` alone. By default edges take the two whose names tell, or the only two, others the only one.
    `ConfigError` if the columns are not there, if it is unclear which are meant, or if they differ between files.
    """
    opened: list[tuple[Table, list[int]]] = []
    for path in source.files:
        table: Table = ParquetTable(path) if source.format == "parquet" else TextTable(path, source.text)
        first, columns = next((one for one in opened if not one[0].is_empty), (table, []))
        if first is table and not table.is_empty:
            of_edges = purpose == "edges"
            columns = _end_columns(table, source.columns) if of_edges else _columns(table, source.columns, purpose)
        names, expected = table.names, first.names
        # Pieces of one file have names in the first one only.
        is_same = names == expected or (not table.has_names and len(names) == len(expected))
        if not is_same and not table.is_empty:
            raise ConfigError(
                f"{path} has the columns {_listed(names)}; expected {_listed(expected)}, as in {first.path}. Write all "
                "files with the same columns."
            )
        opened.append((table, columns))
    return opened


def _columns(table: Table, wanted: Sequence[str | int] | None, purpose: Purpose) -> list[int]:
    """The columns of a list of IDs, or of a feature."""
    path, names = table.path, table.names
    if wanted is None and len(names) > 1:
        several = f", with several names '#{names[0]},{names[1]}', or all with '#{ALL_COLUMNS}'"
        raise ConfigError(
            f"{path} has {len(names)} columns, {_listed(names)}; say which of them "
            f"{'has the IDs' if purpose == 'ids' else 'are the feature'}: '{path.name}#{names[0]}'"
            f"{several if purpose == 'feature' else ''}."
        )
    found: list[int] = []
    for column in range(len(names)) if wanted is None or [*wanted] == [ALL_COLUMNS] else wanted:
        ends = None if column in names else re.fullmatch(r"(\d{1,9})-(\d{1,9})", str(column))
        first, last = (_find_column(table, end) for end in ((column, column) if ends is None else ends.groups()))
        if first > last:
            raise ConfigError(f"{path}: {column!r} has no column; expected a range from left to right.")
        found += range(first, last + 1)
    if purpose == "ids" and len(found) != 1:
        raise ConfigError(f"{path}: {len(found)} columns were named for the IDs of nodes; expected one.")
    return found


_END_WORDS = (
    "src source from subject subj sender origin citing follower caller u",
    "dst destination to target tgt object obj receiver recipient cited followee callee v",
)
"""What sources and destinations are called in names of columns."""


def _named_ends(names: Sequence[str]) -> list[int] | None:
    """The columns of sources and destinations, if names tell one of each, such as `FromNodeId` or `dst_id`."""
    words = [re.sub(r"[^a-z]|node|id", "", name.casefold()) for name in names]
    ends = [[i for i, word in enumerate(words) if word in of_end.split()] for of_end in _END_WORDS]
    return [found[0] for found in ends] if all(len(found) == 1 for found in ends) else None


def _end_columns(table: Table, wanted: Sequence[str | int] | None) -> list[int]:
    """The columns of sources and destinations."""
    path, names = table.path, table.names
    if wanted is not None:
        src, dst = (_find_column(table, column) for column in wanted)
        if src == dst:
            raise ConfigError(f"sources and destinations are both to come from column {names[src]!r} of {path}.")
        return [src, dst]
    if table.has_names and (ends := _named_ends(names)) is not None:
        return ends
    if table.has_names and len(names) > 1:  # also for `0` and `1`, which pandas writes for no names
        raise ConfigError(
            f"{path} has the columns {_listed(names)}, which do not tell sources from destinations. Name the two in "
            f"this order: --columns '{names[0]}' '{names[1]}', for instance; or say that they are a row: --no-header."
        )
    if len(names) != 2:
        raise ConfigError(
            f"{path} has {len(names)} columns, {table.shown}; expected two, source and destination. Name these two "
            "(--columns), or the delimiter between them (--delimiter)."
        )
    return [0, 1]


def _find_column(table: Table, wanted: str | int) -> int:
    """The number of a column, from its name or number, also in digits; `ConfigError` if there is not one such."""
    names = table.names
    if isinstance(wanted, str) and names.count(wanted) == 1:
        return names.index(wanted)
    number = int(wanted) if isinstance(wanted, int) or wanted.isdecimal() else -1
    if 0 <= number < len(names) and wanted not in names:
        return number
    if wanted in names:
        raise ConfigError(f"{table.path} has {names.count(str(wanted))} columns called {wanted!r}; expected one.")
    expected = f"one of the columns {_listed(names)}" if names else f"none, as it has {table.shown}"
    raise ConfigError(f"{table.path} has no column {wanted!r}; expected {expected}.")


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:10])}{', ...' * (len(names) > 10)}"
