"""Checks of what is read, as it is read: IDs in range, no NaN; errors name file and row."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sar.errors import PartitionError
from sar.partition.graph_data import SPLIT, Array
from sar.partition.graph_source import CHUNK_ROWS, Column, EdgeSource
from sar.partition.ingest.tables import check_ids

NEVER_NAN = ("label", *SPLIT)


@dataclass(frozen=True)
class CheckedEdges:
    """Edges of a file, none of which ends outside the nodes; checked in every pass, in the chunk just read.

    edges: those of the file.
    where: the file, for errors.
    num_sources, num_destinations: IDs are below these.
    """

    edges: EdgeSource
    where: str
    num_sources: int
    num_destinations: int

    @property
    def num_edges(self) -> int:
        """E_r."""
        return self.edges.num_edges

    def chunks(self, rows: int = CHUNK_ROWS) -> Iterator[tuple[Array, Array]]:
        """As in `EdgeSource`.

        Raises:
            PartitionError: an ID is negative or too large.
        """
        row = 0
        for src, dst in self.edges.chunks(rows):
            check_ids(src, self.num_sources, self.where, row, "source")
            check_ids(dst, self.num_destinations, self.where, row, "destination")
            yield src, dst
            row += len(src)


@dataclass(frozen=True)
class CheckedColumn:
    """A column of floating-point numbers from a file, without NaN; checked in every slice that is read.

    column: that of the file.
    where: the file, for errors.
    """

    column: Column
    where: str

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, ...)."""
        return self.column.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the file."""
        return self.column.dtype

    def __getitem__(self, rows: Any, /) -> Array:
        """The rows of a slice without a step, or of an ascending array of row numbers.

        Raises:
            PartitionError: a number among them is NaN.
        """
        values = self.column[rows]
        with np.errstate(over="ignore", invalid="ignore"):
            suspicious = values.size and np.isnan(values.sum())  # also where inf - inf is; the sum costs least
        if suspicious and (found := np.isnan(values).reshape(len(values), -1).any(1)).any():
            at = int(np.argmax(found))
            row = rows.indices(self.shape[0])[0] + at if isinstance(rows, slice) else int(rows[at])
            raise PartitionError(
                f"{self.where}, row {row} (from 0), has NaN; expected numbers. Fill the missing values in, or allow "
                "NaN (allow_nan), which labels and masks may never have."
            )
        return values


def without_nan(column: Column, name: str, where: str, *, allow_nan: bool) -> Column:
    """The column, checked for NaN where it could have some and may not.

    Args:
        column: of a file.
        name: of the field.
        where: the file, for errors.
        allow_nan: whether fields other than labels and masks may have NaN.
    """
    if column.dtype.kind != "f" or (allow_nan and name not in NEVER_NAN):
        return column
    return CheckedColumn(column, where)
