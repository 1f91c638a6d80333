"""Which columns of a table are read, and the batches of rows that readers of all formats make of them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from sar.errors import ConfigError, PartitionError
from sar.partition.ingest.files import ALL_COLUMNS, Wanted

END_NAMES = (("src", "dst"), ("source", "destination"), ("source", "target"), ("src_id", "dst_id"))


class NotNumbersError(PartitionError):
    """A feature has values that are no numbers of the type asked for."""


Kind = Literal["integers", "fractions", "booleans", "ids"]
"""The values of a table that are asked for: int64, float64, bool, or IDs as they stand there."""


class Batch(NamedTuple):
    """Some rows of a table."""

    columns: list[Any]  # numbers as numpy arrays, (n,) or (n, F); IDs as pyarrow arrays of strings or integers, (n,)
    where: Callable[[int], str]  # describes a row, by its number among these, for errors


class Table(Protocol):
    """A file of rows, whatever its format."""

    path: Path
    names: list[str]  # of the columns
    has_names: bool  # whether they are in the file, and not only numbers from 0 on
    shown: str  # describes the columns in errors


class ColumnChoice:
    """Finds the columns to read in each file of a table: the same ones, by their names if the files name them.

    Args:
        of: `edges`: two columns, source and destination; by default `src` and `dst` or the like, else the only two.
            `ids`: one column. `feature`: any number; by default the only one.
        wanted: names, or numbers from 0; of a feature also ranges such as `0-1432`, and `ALL_COLUMNS` alone.
    """

    def __init__(self, of: Literal["edges", "ids", "feature"], wanted: Wanted) -> None:
        self.of = of
        self._wanted = wanted if wanted is None else [*wanted]
        self._first: Table | None = None  # the first file that has rows or names
        self._chosen: list[int] = []  # in that file

    def numbers(self, table: Table) -> list[int]:
        """The numbers of the columns in one more file.

        Raises `ConfigError` if the columns are not there, if it is unclear which are meant, or if they differ between
        files.
        """
        path, names, first = table.path, table.names, self._first
        if first is None:
            self._first = table
            self._chosen = self._find_ends(table) if self.of == "edges" else self._find(table)
            return self._chosen
        if table.has_names and not first.has_names:
            raise ConfigError(
                f"{path} has names of columns, {table.shown}, and {first.path} has none; name them in both."
            )
        if list(names) == list(first.names) or (not table.has_names and len(names) == len(first.names)):
            return self._chosen
        expected = [first.names[i] for i in self._chosen]
        if not all(names.count(name) == 1 for name in expected) or (
            self._wanted == [ALL_COLUMNS] and len(names) != len(first.names)
        ):
            raise ConfigError(
                f"{path} has the columns {', '.join(names[:10])}; expected {', '.join(expected[:10])} among them, as "
                f"in {first.path}. Write all files with the same columns."
            )
        return [names.index(name) for name in expected]

    def _find(self, table: Table) -> list[int]:
        path, names, wanted = table.path, table.names, self._wanted
        if wanted is None and len(names) > 1:
            raise ConfigError(
                f"{path} has {len(names)} columns, {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}; say "
                f"which of them are the feature: '{path.name}#{names[0]}', with several names '#{names[0]},{names[1]}',"
                f" or all with '#{ALL_COLUMNS}'."
            )
        found: list[int] = []
        for column in range(len(names)) if wanted is None or wanted == [ALL_COLUMNS] else wanted:
            ends = None if column in names else re.fullmatch(r"(\d{1,9})-(\d{1,9})", str(column))
            first, last = (find_column(table, end) for end in ((column, column) if ends is None else ends.groups()))
            found += range(first, last + 1)
        if self.of == "ids" and len(found) != 1:
            raise ConfigError(f"{path}: {len(found)} columns were named for the IDs of nodes; expected one.")
        if not found:
            raise ConfigError(f"{path}: the columns {table.shown} have none that is wanted; expected at least one.")
        return found

    def _find_ends(self, table: Table) -> list[int]:
        path, names, wanted = table.path, table.names, self._wanted
        if wanted is None:
            lower = [name.casefold() for name in names]
            pairs = (*END_NAMES, ("from", "to"), ("u", "v")) if len(names) == 2 else END_NAMES
            ends = next((ends for ends in pairs if all(lower.count(end) == 1 for end in ends)), None)
            if ends is not None:
                return [lower.index(end) for end in ends]
            if len(names) != 2:
                raise ConfigError(
                    f"{path} has {len(names)} columns, {table.shown}; expected two, source and destination. Name these "
                    "two (columns=, --columns), or the delimiter between them (delimiter=, --delimiter)."
                )
            return [0, 1]
        source, destination = (find_column(table, column) for column in wanted)
        if source == destination:
            raise ConfigError(f"sources and destinations are both to come from column {names[source]!r} of {path}.")
        return [source, destination]


def find_column(table: Table, wanted: str | int) -> int:
    """The number of a column, from its name or number, also in digits; `ConfigError` if there is not one such."""
    names = table.names
    if isinstance(wanted, str) and names.count(wanted) == 1:
        return names.index(wanted)
    number = int(wanted) if isinstance(wanted, int) or wanted.isdecimal() else -1
    if 0 <= number < len(names) and wanted not in names:
        return number
    raise ConfigError(f"{table.path} has no column {wanted!r}; expected one of the columns {', '.join(names)}.")
