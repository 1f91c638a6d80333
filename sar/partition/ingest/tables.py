"""Features as text: a line for each node or edge, with as many numbers in each."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from sar.errors import PartitionError
from sar.partition.graph_data import Array
from sar.partition.ingest.text import guess_delimiter, is_number, split_line
from sar.partition.stored import unreadable

_BLOCK_BYTES = 4 << 20


def table_rows(path: Path, delimiter: str | None) -> Iterator[Array]:
    """The numbers of a file in chunks of rows, (n,) where a line has one, else (n, F).

    A first line without any number names the columns; lines that begin with `#` are comments. Without decimal points
    or exponents numbers are int64, else float32.

    Raises:
        PartitionError: the file is missing, or a line has another number of fields or something that is no number.
    """
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            dtype = np.dtype(
                np.float32 if any(_has_reals(lines) for _, lines in _blocks(file, delimiter)) else np.int64
            )
            file.seek(0)
            width = None
            for numbers, lines in _blocks(file, delimiter):
                delimiter = delimiter or guess_delimiter(lines[0])
                width = width or len(split_line(lines[0], delimiter))
                rows = _parse(path, numbers, lines, delimiter, dtype, width)
                yield rows[:, 0] if width == 1 else rows
    except OSError as error:
        raise unreadable(path, error) from error


def _blocks(file: TextIO, delimiter: str | None) -> Iterator[tuple[list[int], list[str]]]:
    """The lines that have rows in them, with their numbers from 1."""
    number, seen = 0, False
    while block := file.readlines(_BLOCK_BYTES):
        numbered = [(number + i, line) for i, line in enumerate(block, 1) if line.strip() and line.lstrip()[0] != "#"]
        number += len(block)
        if numbered and not seen:
            seen = True
            first = numbered[0][1]
            if not any(is_number(name) for name in split_line(first, delimiter or guess_delimiter(first))):
                del numbered[0]
        if numbered:
            numbers, lines = zip(*numbered, strict=True)
            yield list(numbers), list(lines)


def _has_reals(lines: list[str]) -> bool:
    return any(not line.isascii() or any(c in line for c in ".eEnN") for line in lines)


def _parse(path: Path, numbers: list[int], lines: list[str], delimiter: str, dtype: np.dtype[Any], width: int) -> Array:
    """Rows, (n, F)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rows: Array = np.loadtxt(lines, dtype, delimiter=delimiter.strip() or None, ndmin=2)
        if rows.shape == (len(lines), width):
            return rows
    except (ValueError, Warning):
        pass  # what is wrong with which line is found below
    for number, line in zip(numbers, lines, strict=True):
        fields = split_line(line, delimiter)
        if len(fields) != width or not all(is_number(field) for field in fields):
            raise PartitionError(
                f"{path}, line {number}: {line.strip()[:80]!r} does not have {width} numbers, as the first line has. "
                "Mend the line, or name the delimiter."
            )
    raise PartitionError(f"{path}, lines {numbers[0]} to {numbers[-1]}, have numbers that do not fit into {dtype}.")
