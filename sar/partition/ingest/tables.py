"""Columns of a table, as text or Parquet, by name or number; and IDs in range, wherever they come from."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sar.errors import ConfigError, PartitionError
from sar.partition.graph_data import Array

ALL_COLUMNS = "*"
_END_NAMES = (("src", "dst"), ("source", "destination"), ("source", "target"), ("src_id", "dst_id"))


def find_column(path: Path, names: Sequence[str], wanted: str | int) -> int:
    """The number of a column, from its name, or from its number as an integer or in digits.

    Raises:
        ConfigError: there is no such column, or several have the name.
    """
    if isinstance(wanted, str) and names.count(wanted) == 1:
        return names.index(wanted)
    number = int(wanted) if isinstance(wanted, int) or wanted.isdecimal() else -1
    if 0 <= number < len(names) and wanted not in names:
        return number
    raise ConfigError(f"{path} has no column {wanted!r}; expected one of the columns {', '.join(names)}.")


def feature_columns(path: Path, names: Sequence[str], wanted: Sequence[str] | None) -> list[int]:
    """The numbers of the columns of a feature.

    Args:
        path: the file, for errors.
        names: of its columns.
        wanted: by name or number; `ALL_COLUMNS` alone: all; None: the only one.

    Raises:
        ConfigError: there are no such columns, or none were named where there are several.
    """
    if wanted is None and len(names) > 1:
        raise ConfigError(
            f"{path} has {len(names)} columns, {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}; say which "
            f"of them are the feature: '{path.name}#{names[0]}', with several names '#{names[0]},{names[1]}', or "
            f"all with '#{ALL_COLUMNS}'."
        )
    if wanted is None or list(wanted) == [ALL_COLUMNS]:
        return list(range(len(names)))
    return [find_column(path, names, column) for column in wanted]


def edge_columns(path: Path, names: Sequence[str], wanted: Sequence[str | int] | None, shown: str) -> tuple[int, int]:
    """The columns of sources and destinations.

    Args:
        path: the file, for errors.
        names: of its columns.
        wanted: by name or number from 0; None: `src` and `dst` or the like, else the only two.
        shown: the columns, for errors.

    Raises:
        ConfigError: there are no such columns, or none were named where there are more than two.
    """
    if wanted is None:
        wanted = next((ends for ends in _END_NAMES if {*ends} <= {*names}), (0, 1))
        if isinstance(wanted[0], int) and len(names) != 2:
            raise ConfigError(
                f"{path} has {len(names)} columns, {shown}; expected two, source and destination. Name these two "
                "(columns=, --columns), or the delimiter between them (delimiter=, --delimiter)."
            )
    source, destination = (find_column(path, names, column) for column in wanted)
    if source == destination:
        raise ConfigError(f"sources and destinations are both to come from column {names[source]!r} of {path}.")
    return source, destination


def check_edges(src: Array, dst: Array, limits: tuple[int, int], where: str, first_row: int) -> None:
    """Refuse edges that end at no node.

    Args:
        src, dst: int64, (n,) each.
        limits: numbers of nodes of the source and the destination type.
        where: the file.
        first_row: row in the file of the first edge.

    Raises:
        PartitionError: there is one.
    """
    for end, ids, limit in zip(("source", "destination"), (src, dst), limits, strict=True):
        if ids.size and int(ids.view(np.uint64).max()) >= limit:  # a negative number is a large one without its sign
            row = int(np.argmax(ids.view(np.uint64) >= limit))
            expected = f"0 to {limit - 1}" if limit < np.iinfo(np.int64).max else "0 or more"
            raise PartitionError(
                f"{where}, row {first_row + row} (from 0): the {end} is node {ids[row]}; expected {expected}. Correct "
                "the file, or the number of nodes."
            )
