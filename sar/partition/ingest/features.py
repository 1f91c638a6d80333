"""Features by name and file, for nodes and edges of any types."""

from collections.abc import Mapping
from pathlib import Path

from sar.errors import ConfigError
from sar.partition.graph_source import Column
from sar.partition.ingest.columns import ColumnFiles, open_column
from sar.partition.ingest.files import Files


def open_features(
    features: Mapping[str, Files], rows: Mapping[str, int | None], scratch: Path, *, allow_nan: bool
) -> dict[str, dict[str, Column]]:
    """Find the features that were named.

    Args:
        features: files by `type/name`, or by `name` where there is one type.
        rows: nodes or edges by type; None: as many as the first of its features has.
        scratch: directory for copies in binary.
        allow_nan: whether there may be NaN in other columns than labels and masks.

    Returns:
        Columns by type and name.

    Raises:
        ConfigError: there is no such type.
        PartitionError: files are missing or damaged, or have another number of rows.
    """
    found: dict[str, dict[str, Column]] = {kind: {} for kind in rows}
    known = dict(rows)
    for key, files in features.items():
        kind, slash, name = key.rpartition("/")
        if not slash and len(rows) == 1:
            (kind,) = rows
        if kind not in rows or not name:
            raise ConfigError(
                f"there is no type for the feature '{key}'; expected TYPE/NAME with a type among {', '.join(rows)}"
                f"{' (or NAME alone)' if len(rows) == 1 else ''}."
            )
        column = open_column(ColumnFiles.named(files), f"{kind}/{name}", known[kind], scratch, allow_nan=allow_nan)
        known[kind] = column.shape[0]
        found[kind][name] = column
    return found
