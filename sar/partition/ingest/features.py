"""Features of nodes and edges, from files of any format: `.npy` and DGL's tensor files are read in place, others
are copied once.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow
import pyarrow.compute as compute

from sar.common_tuples import SPLIT
from sar.data.arrays import Array, ArrayFile, StoredArray, as_column, open_npy
from sar.data.tensor_files import open_tensors
from sar.errors import ConfigError, PartitionError
from sar.id_slices import pieces
from sar.partition.graph_source import CHUNK_ROWS, Column, GraphSource, JoinedColumn
from sar.partition.ingest.files import ALL_COLUMNS, ColumnChoice, Files, NotNumbersError, with_format
from sar.partition.ingest.parquet import parquet_ids, parquet_rows
from sar.partition.ingest.text import Kind, TextFormat, is_number, text_ids, text_rows

LABEL = "label"
_NEVER_NAN = (LABEL, *SPLIT)
_MOST_CLASSES, _LONGEST_CLASS = 1 << 16, 100


@dataclass(frozen=True)
class FeatureSource:
    """The files of a feature, one after the other."""

    files: Sequence[Path]
    format: str  # `npy`, `parquet`, `dgl` or `text`
    inside: Sequence[str] | None = None  # columns by name or number, `*` for all; or a tensor; None: the only one
    text: TextFormat = field(default_factory=TextFormat)

    @classmethod
    def named(cls, files: Files, text: TextFormat) -> "FeatureSource":
        """From a file, directory, pattern or list; `#` may precede the columns to take, separated by commas."""
        inside = None
        if isinstance(files, str | PathLike) and not Path(files).exists() and "#" in fspath(files):
            files, _, columns = fspath(files).rpartition("#")
            inside = columns.split(",")
        if ColumnChoice("feature", inside).by_name:
            text = replace(text, header=True)
        return cls(*with_format(files, None), inside, text)

    def ids(self) -> Iterator[tuple[int, pyarrow.Array]]:
        """The IDs in the one column that is meant, integers or strings, in chunks, each with the number of its file."""
        choice = ColumnChoice("ids", self.inside)
        for number, file in enumerate(self.files):
            if self.format in ("text", "parquet"):
                read = text_ids(file, self.text, choice) if self.format == "text" else parquet_ids(file, choice)
                yield from ((number, column) for (column,) in read)
                continue
            column, _ = open_npy(file)
            if len(column.shape) != 1 or column.dtype.kind not in "iu":
                raise PartitionError(f"{file} holds {column.dtype} {column.shape}; expected integers (N,), IDs.")
            yield from ((number, pyarrow.array(column[rows])) for rows in pieces(column.shape[0]))


@dataclass(frozen=True)
class CheckedColumn:
    """A column of floating-point numbers from a file, without NaN; checked in every slice that is read."""

    column: Column
    where: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.column.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.column.dtype

    def __getitem__(self, rows: slice, /) -> Array:
        """The rows of a slice without a step; `PartitionError` if a number among them is NaN."""
        values = self.column[rows]
        with np.errstate(over="ignore", invalid="ignore"):
            suspicious = values.size and np.isnan(values.sum())  # also for inf - inf; the sum costs least
        if suspicious and (found := np.isnan(values).reshape(len(values), -1).any(1)).any():
            row = rows.indices(self.shape[0])[0] + int(np.argmax(found))
            raise PartitionError(
                f"{self.where}, row {row} (from 0), has NaN; expected numbers. Fill the missing values in, as labels "
                "with -1, or allow NaN (allow_nan=True, --allow-nan), which labels and masks may never have."
            )
        return values


def without_nan(column: Column, name: str, where: str, *, allow_nan: bool) -> Column:
    """The column, checked for NaN if it could have some and may not, as labels and masks never may."""
    if column.dtype.kind != "f" or (allow_nan and name not in _NEVER_NAN):
        return column
    return CheckedColumn(column, where)


@dataclass(frozen=True)
class OneOfColumns:
    """A column of an array of several, (rows, k), as (rows,)."""

    columns: Column
    number: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.columns.shape[:1]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.columns.dtype

    def __getitem__(self, rows: slice, /) -> Array:
        return np.ascontiguousarray(self.columns[rows][:, self.number])


def check_splits(graph: GraphSource, mask_column: int | None = None) -> GraphSource:
    """The graph with masks of one column, after a pass over masks and labels of nodes, and over masks of edges.

    `mask_column` is the column to take of masks with several, (N, k). Raises `PartitionError` if a mask has other
    values than True and False, or 1 and 0, or a label of a node is NaN; `ConfigError` if masks have several columns
    and none is chosen, or not that one.
    """
    chosen = []

    def checked(kind: str, fields: Mapping[str, Column]) -> dict[str, Column]:
        fields = dict(fields)
        for name in (one for one in SPLIT if one in fields):
            column = fields[name]
            if len(column.shape) == 2 and column.shape[1] == 1:
                column = OneOfColumns(column, 0)
            elif len(column.shape) == 2:
                if mask_column is None or not 0 <= mask_column < column.shape[1]:
                    raise ConfigError(
                        f"'{kind}/{name}' has shape {column.shape}: {column.shape[1]} splits, of which column "
                        f"{mask_column} was asked for; expected 0 to {column.shape[1] - 1} (mask_column=, "
                        "--mask-column), or masks of one column."
                    )
                chosen.append(name)
                column = OneOfColumns(column, mask_column)
            if len(column.shape) != 1 or column.dtype.kind not in "biuf":
                raise PartitionError(f"'{kind}/{name}' holds {column.dtype} {column.shape}; expected a mask (N,).")
            for rows in pieces(column.shape[0], CHUNK_ROWS):
                values = column[rows] if column.dtype.kind != "b" else np.empty(0)
                if (wrong := (values != 0) & (values != 1)).any():
                    row, split = int(np.argmax(wrong)), name.removesuffix("_mask")
                    raise PartitionError(
                        f"'{kind}/{name}' has {values[row]} in row {rows.start + row} (from 0); expected a mask of "
                        "True and False, or 1 and 0. A list of the IDs of nodes is named with "
                        f"--{split}-nodes FILE ({split}_nodes=)."
                    )
            fields[name] = column
        return fields

    node_data = {ntype: checked(ntype, fields) for ntype, fields in graph.node_data.items()}
    edge_data = {etype: checked(":".join(etype), fields) for etype, fields in graph.edge_data.items()}
    if mask_column is not None and not chosen:
        raise ConfigError(f"column {mask_column} of masks was asked for; expected masks of several columns, (N, k).")
    for ntype, fields in node_data.items():
        if LABEL in fields and fields[LABEL].dtype.kind == "f":
            label = CheckedColumn(fields[LABEL], f"'{ntype}/{LABEL}'")
            for rows in pieces(label.shape[0], CHUNK_ROWS):
                label[rows]
    return replace(graph, node_data=node_data, edge_data=edge_data)


def open_features(
    features: Mapping[str, Files],
    rows: Mapping[str, int | None],
    scratch: Path,
    *,
    text: TextFormat | None = None,
    allow_nan: bool,
) -> dict[str, dict[str, Column]]:
    """The columns, by type and name, of features that were named by `type/name`, or by `name` if there is one type.

    `rows` are nodes or edges by type; None: as many as the first of its features has. `scratch` is for copies in
    binary. `ConfigError` if there is no such type, `PartitionError` if files are missing, damaged, or have
    another number of rows.
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
        source = FeatureSource.named(files, text or TextFormat())
        column = open_column(source, f"{kind}/{name}", known[kind], scratch, allow_nan=allow_nan)
        known[kind] = column.shape[0]
        found[kind][name] = column
    return found


def open_column(source: FeatureSource, key: str, rows: int | None, scratch: Path, *, allow_nan: bool) -> Column:
    """Find the feature with the key `type/name`; text and Parquet are parsed now, into raw files under `scratch`.

    `rows` is the number expected; None: any. `PartitionError` if a file is missing or damaged, the files do not fit
    together or have another number of rows; `ConfigError` if one has nothing of the name asked for.
    """
    name = key.rpartition("/")[2]
    copy = scratch / quote(key, safe="")
    parts: list[Column] = []
    if source.format in ("text", "parquet"):
        parts = [*_table_columns(source, name, copy)]
    elif source.format == "npy":
        for file in source.files:
            array, transposed = open_npy(file)
            parts.append(np.load(file, mmap_mode="r", allow_pickle=False) if transposed else array)
    elif source.format == "dgl":
        parts = [_open_tensor(file, source.inside, key) for file in source.files]
    else:
        raise ConfigError(f"'{key}' in the format {source.format!r} was asked for; expected npy, parquet, dgl or text.")
    parts = [
        without_nan(part, name, str(file), allow_nan=allow_nan) for file, part in zip(source.files, parts, strict=True)
    ]
    dtype = _common_dtype([part.dtype for part in parts])
    for file, part in zip(source.files, parts, strict=True):
        if part.shape[1:] != parts[0].shape[1:] or (dtype is None and part.dtype != parts[0].dtype):
            raise PartitionError(
                f"{file} has rows of shape {part.shape[1:]} and {part.dtype}; expected {parts[0].shape[1:]} and "
                f"{parts[0].dtype} as in {source.files[0]}, as both belong to '{key}'. Write them alike."
            )
    found = sum(part.shape[0] for part in parts)
    if rows is not None and found != rows:
        last = f" to {source.files[-1]}" if len(source.files) > 1 else ""
        hint = ""
        if name in SPLIT:
            hint = f" A list of the IDs of nodes is named with --{name.partition('_')[0]}-nodes FILE."
        elif source.format == "text" and abs(found - rows) == 1:
            hint = " Whether its first line is a row, or names columns, is told with --header or --no-header (header=)."
        raise PartitionError(
            f"{source.files[0]}{last} has {found} rows; expected {rows}, as many as there are nodes or edges of the "
            f"type that '{key}' belongs to. Correct the file, or the number of nodes.{hint}"
        )
    return parts[0] if len(parts) == 1 else JoinedColumn(parts)


def _common_dtype(dtypes: Sequence[np.dtype[Any]]) -> np.dtype[Any] | None:
    """A dtype that holds the values of all; None if there is none, as for int64 and uint64."""
    if len({*dtypes}) == 1:
        return dtypes[0]
    if any(dtype.kind not in "biuf" for dtype in dtypes):
        return None
    common = np.result_type(*dtypes)
    return None if common.kind == "f" and not any(dtype.kind == "f" for dtype in dtypes) else common


def _table_columns(source: FeatureSource, name: str, copy: Path) -> list[StoredArray]:
    """A column for each file of a table, all of the first of several types that holds the values of all files."""
    is_text, error = source.format == "text", None
    kinds: tuple[Kind, ...] = ("int64", "float32", "float64", "bool") if is_text else ("int64",)
    for kind in kinds:
        choice, columns = ColumnChoice("feature", source.inside), []
        try:
            for number, file in enumerate(source.files):
                rows = text_rows(file, source.text, choice, kind) if is_text else parquet_rows(file, choice)
                columns.append(_copied(rows, file, Path(f"{copy}.{number}")))
            return columns
        except NotNumbersError as found:
            error = found if error is None or kind == "float64" else error
    assert error is not None
    one_column = source.inside is None or (len(source.inside) == 1 and source.inside[0] != ALL_COLUMNS)
    if name == LABEL and (one_column or not is_text):
        with suppress(NotNumbersError):  # numbers among names: the line at fault is the one that is no number
            return _class_columns(source, name, copy)
    raise error


def _class_columns(source: FeatureSource, name: str, copy: Path) -> list[StoredArray]:
    """A column of integers for each file of class names, which are numbered in alphabetical order."""
    distinct: set[str] = set()
    for _, column in source.ids():
        distinct.update(map(str, column.unique().to_pylist()))
        if len(distinct) > _MOST_CLASSES or sum(map(len, distinct)) > _MOST_CLASSES * _LONGEST_CLASS:
            raise PartitionError(
                f"{source.files[0]} has more than {_MOST_CLASSES} class names, or of more than {_LONGEST_CLASS} "
                "characters; expected fewer and shorter ones. Number the classes."
            )
    for one in distinct:
        if is_number(one):
            raise NotNumbersError(f"{source.files[0]} has {one!r} among names of classes; expected names or numbers.")
    names = sorted(distinct)
    number_of = pyarrow.array(names, pyarrow.string())
    with ExitStack() as stack:
        out = [
            stack.enter_context(ArrayFile(Path(f"{copy}.{i}"), np.dtype(np.int64))) for i in range(len(source.files))
        ]
        for i, column in source.ids():
            out[i].append(compute.index_in(column, number_of).to_numpy())
        shown = ", ".join(f"{i} {one}" for i, one in enumerate(names[:20]))
        source.text.note(f"'{name}': {len(names)} class names were numbered: {shown}{', ...' * (len(names) > 20)}.")
        return [file.array() for file in out]


def _copied(rows: Iterator[Array], file: Path, copy: Path) -> StoredArray:
    """The rows of a file that is no array, in one that is."""
    first = next(rows, np.empty(0, np.float32))
    with ArrayFile(copy, first.dtype, first.shape[1:]) as kept:
        kept.append(first)
        for chunk in rows:
            if chunk.shape[1:] != first.shape[1:]:
                raise PartitionError(
                    f"{file} has rows of shape {chunk.shape[1:]} from row {kept.rows} (from 0) on; expected "
                    f"{first.shape[1:]}, as before. Write rows of one length."
                )
            kept.append(chunk)
        return kept.array()


def _open_tensor(file: Path, inside: Sequence[str] | None, key: str) -> Column:
    """A tensor of one of DGL's files: the one asked for, else that with the feature's name, else the only one."""
    tensors = open_tensors(file)
    wanted = [*inside] if inside is not None else [key, key.rpartition("/")[2]]
    found = next((tensors[name] for name in wanted if name in tensors), None)
    if found is None and inside is None and len(tensors) == 1:
        (found,) = tensors.values()
    if found is None:
        raise ConfigError(f"{file} has no tensor {wanted[-1]!r}; expected one of {', '.join(sorted(tensors))}.")
    return as_column(found)
