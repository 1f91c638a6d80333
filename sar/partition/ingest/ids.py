"""Numbers for nodes that are named by strings, or by integers with gaps: `ids="map"` of `open_graph`.

[Note: numbering by hash] An ID goes to one of 256 files, by a hash, so that each file fits into memory, where
its IDs are sorted; numbers go on from file to file, and depend on nothing but which IDs there are. A chunk sends each
of its IDs once, in the order of the files, and keeps for every row the place of its ID among those sent. So the numbers
come back with each file read once more, from front to back.
"""

import itertools
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
import pyarrow
import pyarrow.compute as compute

from sar.common_tuples import CanonicalEtype
from sar.data.arrays import Array, ArrayFile, StoredArray, open_npy
from sar.errors import PartitionError
from sar.id_slices import pieces
from sar.partition.graph_source import CHUNK_ROWS, ArrayEdges, Column, EdgeSource, index_dtype
from sar.partition.ingest.edges import EdgeFormat, open_npy_edges, open_raw_edges
from sar.partition.ingest.features import FeatureSource
from sar.partition.ingest.files import ColumnChoice, Files, with_format
from sar.partition.ingest.parquet import parquet_ids
from sar.partition.ingest.text import text_ids
from sar.splitmix import STEP

_BITS = 8  # of a hash that decide about the file
_LONGEST = 255
_INTEGERS = pyarrow.int64()
_TABLE = ""


class MappedIds(NamedTuple):
    """Nodes by their numbers."""

    num_nodes: dict[str, int]
    edges: dict[CanonicalEtype, EdgeSource]
    ids: dict[str, Column]  # by node type, as `GIVEN_ID`


class _NotIntegersError(Exception):
    """Some IDs of a node type, its argument, are no integers of 64 bits in their usual form."""


def map_ids(
    edges: Mapping[CanonicalEtype, Files], how: EdgeFormat, tables: Mapping[str, FeatureSource], scratch: Path
) -> MappedIds:
    """Number the nodes that edges name, by integers if all IDs of a node type are such, else by strings.

    `tables` have, by node type, the IDs of its nodes, which are numbered in this order; other types' nodes get numbers
    as in [Note: numbering by hash]. `scratch` is for the results, which have to stay as long as these are used.
    `PartitionError` if files are missing or damaged, an ID is empty, too long, twice in a table, or not in it.
    """
    types = dict.fromkeys(itertools.chain(*(etype[::2] for etype in edges)), _INTEGERS)
    while True:
        try:
            with tempfile.TemporaryDirectory(prefix="ids-", dir=scratch) as folder:
                return _mapped(edges, how, tables, types, scratch, Path(folder))
        except _NotIntegersError as found:
            types[found.args[0]] = pyarrow.string()


def _mapped(
    edges: Mapping[CanonicalEtype, Files],
    how: EdgeFormat,
    tables: Mapping[str, FeatureSource],
    types: Mapping[str, pyarrow.DataType],
    scratch: Path,
    folder: Path,
) -> MappedIds:
    by_type = {
        ntype: _Numbering(ntype, kind, folder / str(number), scratch / f"ids-{number}")
        for number, (ntype, kind) in enumerate(types.items())
    }
    of_ends = [[(f"{number}.{end}", etype[end]) for end in (0, 2)] for number, etype in enumerate(edges)]
    for ntype, table in tables.items():
        for _, chunk in table.ids():
            by_type[ntype].send(chunk, _TABLE)
    for columns, files in zip(of_ends, edges.values(), strict=True):
        for chunks in _edge_ids(files, how):
            for chunk, (name, ntype) in zip(chunks, columns, strict=True):
                by_type[ntype].send(chunk, name)
    counts = {ntype: numbering.number() for ntype, numbering in by_type.items()}
    with ExitStack() as stack:
        out = {
            name: stack.enter_context(ArrayFile(scratch / f"edges-{name}", index_dtype(counts[ntype])))
            for name, ntype in itertools.chain(*of_ends)
        }
        for ntype, numbering in by_type.items():
            rows: Array | None = None
            for name, found in itertools.groupby(numbering.numbers(), lambda one: one[0]):
                numbers = (numbers for _, numbers in found)
                if name == _TABLE:
                    rows = numbering.rows_of(np.concatenate([*numbers]), tables[ntype].files[0])
                for some in numbers:
                    out[name].append(some if rows is None else rows[some])
        sources = (ArrayEdges(out[src].array(), out[dst].array()) for (src, _), (dst, _) in of_ends)
        mapped: dict[CanonicalEtype, EdgeSource] = dict(zip(edges, sources, strict=True))
    for ntype, table in tables.items():
        by_type[ntype].store(chunk for _, chunk in table.ids())
    return MappedIds(counts, mapped, {ntype: numbering.ids for ntype, numbering in by_type.items()})


def nodes_of_list(table: FeatureSource, num_nodes: int, given: Column | None) -> Array:
    """The nodes of a list of IDs, (N,) bool; `given` has the IDs that nodes have in the input, None: 0 to N - 1.

    `PartitionError` if an ID is no node's, or is there twice.
    """
    where = f"{table.files[0]}{' and so on' if len(table.files) > 1 else ''}"
    found, count = [pyarrow.array([], pyarrow.string())], 0
    for _, column in table.ids():
        found.append(column.cast(pyarrow.string()))
        count += len(column)
        if count > 2 * num_nodes:  # no list of nodes, and perhaps without end
            raise PartitionError(f"{where} has more than {count} rows for {num_nodes} nodes; expected each node once.")
    ids = pyarrow.concat_arrays(found)
    counts = ids.value_counts()
    if twice := [one["values"].as_py() for one in counts if one["counts"].as_py() > 1][:1]:
        raise PartitionError(
            f"{where} has the node {twice[0]!r} more than once; expected a list of the IDs of nodes, each once. A mask "
            "is a node feature: --node-feature train_mask=FILE."
        )
    mask = np.zeros(num_nodes, np.bool_)
    if given is None or given.dtype.kind == "i":
        try:
            wanted = ids.cast(_INTEGERS).to_numpy()
        except pyarrow.ArrowInvalid as error:
            raise PartitionError(f"{where} has other things than integers ({error}); expected IDs of nodes.") from error
    else:
        wanted = np.array([b"", *_bytes_of(ids)])[1:]
    known = np.zeros(len(wanted), np.bool_)
    if given is None:
        known = (wanted >= 0) & (wanted < num_nodes)
        mask[wanted[known]] = True
    else:
        for rows in pieces(num_nodes, CHUNK_ROWS):
            some = given[rows]
            some = some if some.ndim == 1 else some.view(f"S{some.shape[1]}")[:, 0]
            mask[rows] = np.isin(some, wanted)
            known |= np.isin(wanted, some)
    if not known.all():
        raise PartitionError(f"{where} has the ID {ids[int(np.argmin(known))].as_py()!r}, which no node has.")
    return mask


def read_ids(table: FeatureSource) -> Array:
    """The IDs in a list of nodes, (S,): integers, or strings in UTF-8, as which text files give all IDs."""
    columns = [column for _, column in table.ids()]
    ids = pyarrow.concat_arrays(columns or [pyarrow.array([], _INTEGERS)])
    return ids.to_numpy() if pyarrow.types.is_integer(ids.type) else np.array([b"", *_bytes_of(ids)])[1:]


class _Numbering:
    """The numbering of one node type; see [Note: numbering by hash]."""

    ids: StoredArray  # by number, as `GIVEN_ID`; after `number`

    def __init__(self, ntype: str, kind: pyarrow.DataType, folder: Path, result: Path) -> None:
        self._ntype, self._kind, self._folder, self._result = ntype, kind, folder, result
        self._schema = pyarrow.schema([("id", kind)])
        self._width = 1  # bytes of the longest string
        self._sent: list[tuple[str, int, Array]] = []  # of chunks: destination, rows, and how many IDs each file got
        folder.mkdir()

    def send(self, chunk: pyarrow.Array, name: str) -> None:
        """Send the IDs of some rows to the files; `name` is the destination of their numbers."""
        encoded = self._converted(chunk).dictionary_encode()
        distinct = encoded.dictionary
        if self._kind != _INTEGERS:
            self._width = max(self._width, compute.max(compute.binary_length(distinct)).as_py() or 0)
            if self._width > _LONGEST or compute.any(compute.match_substring(distinct, "\0")).as_py():
                raise PartitionError(
                    f"a node of type '{self._ntype}' has an ID with a byte 0, or of more than {_LONGEST} bytes; "
                    "expected shorter IDs of other characters."
                )
        file_of = _file_of(distinct)
        order = np.argsort(file_of, kind="stable")
        place = np.empty(len(order), np.int32)
        place[order] = np.arange(len(order))
        counts = np.bincount(file_of, minlength=1 << _BITS).astype(np.int32)
        batch, ends = pyarrow.record_batch([distinct.take(pyarrow.array(order))], self._schema), counts.cumsum()
        try:
            with self._file("places").open("ab") as opened:
                opened.write(place[encoded.indices.to_numpy()].data)
            for file in np.flatnonzero(counts).tolist():
                with self._file(file).open("ab") as opened:
                    opened.write(batch.slice(ends[file] - counts[file], counts[file]).serialize())
        except OSError as error:
            raise PartitionError(f"cannot write IDs to {self._folder} ({error.strerror}); make room there.") from error
        self._sent.append((name, len(chunk), counts))

    def number(self) -> int:
        """Number the IDs of all files; how many there are."""

        def of_files() -> Iterator[pyarrow.Array]:
            count = 0
            for file in self._files():
                sent = self._read(file).dictionary_encode()
                order = compute.sort_indices(sent.dictionary)
                number = np.empty(len(order), np.int64)
                number[order.to_numpy()] = np.arange(count, count + len(order))
                # Not tofile(), which says nothing of a disk that becomes full with its last bytes.
                self._file(f"{file}.numbers").write_bytes(number[sent.indices.to_numpy()].data)
                count += len(order)
                yield sent.dictionary.take(order)

        self.store(of_files())
        return self.ids.shape[0]

    def numbers(self) -> Iterator[tuple[str, Array]]:
        """The numbers of the rows of all chunks, (n,) int64, and their destination."""
        with ExitStack() as stack:
            numbers = {file: stack.enter_context(self._file(f"{file}.numbers").open("rb")) for file in self._files()}
            places = stack.enter_context(self._file("places").open("ab+"))
            places.seek(0)
            for name, rows, counts in self._sent:
                found = [np.fromfile(opened, np.int64, counts[file]) for file, opened in numbers.items()]
                yield name, np.concatenate([np.empty(0, np.int64), *found])[np.fromfile(places, np.int32, rows)]

    def rows_of(self, numbers: Array, path: Path) -> Array:
        """The row of a table, whose rows have these numbers, that each number is in; `PartitionError` unless once."""
        rows = np.full(self.ids.shape[0], -1, index_dtype(len(numbers)))
        rows[numbers] = np.arange(len(numbers))
        if (again := np.flatnonzero(rows[numbers] != np.arange(len(numbers)))).size:
            number = int(numbers[again[0]])
            raise PartitionError(
                f"{path} has the ID {self._shown(number)} in row {again[0]} (from 0) and in row {rows[number]}; "
                f"expected every node of type '{self._ntype}' once. Remove one of the rows."
            )
        if (missing := np.flatnonzero(rows < 0)).size:
            raise PartitionError(
                f"edges name {len(missing)} nodes of type '{self._ntype}' that are in no row of {path}, such as "
                f"{self._shown(int(missing[0]))}. Add rows for them, or leave these edges out."
            )
        return rows

    def store(self, chunks: Iterable[pyarrow.Array]) -> None:
        """Set `ids`, in a file that stays."""
        is_text = self._kind != _INTEGERS
        dtype, shape = (np.uint8, (self._width,)) if is_text else (np.int64, ())
        with ArrayFile(self._result, np.dtype(dtype), shape) as file:
            for chunk in map(self._converted, chunks):
                rows = np.array(_bytes_of(chunk), f"S{self._width}") if is_text else chunk.to_numpy()
                file.append(rows.view(dtype).reshape(len(rows), *shape))
            self.ids = file.array()

    def _converted(self, chunk: pyarrow.Array) -> pyarrow.Array:
        """As integers or as strings; text is an integer if the integer is written like that, unlike 007."""
        try:
            found = chunk.cast(self._kind)
        except pyarrow.ArrowInvalid as error:
            raise _NotIntegersError(self._ntype) from error
        if self._kind == _INTEGERS and not found.cast(chunk.type).equals(chunk):
            raise _NotIntegersError(self._ntype)
        return found

    def _file(self, name: int | str) -> Path:
        return self._folder / str(name)

    def _files(self) -> list[int]:
        """Those that have IDs, in order."""
        return np.flatnonzero(sum(counts for _, _, counts in self._sent)).tolist()

    def _read(self, file: int) -> pyarrow.Array:
        """The IDs that were sent to a file."""
        found = [pyarrow.array([], self._kind)]
        with pyarrow.OSFile(str(self._file(file))) as opened:
            while opened.tell() < opened.size():
                found.append(pyarrow.ipc.read_record_batch(pyarrow.ipc.read_message(opened), self._schema).column(0))
        return pyarrow.concat_arrays(found)

    def _shown(self, number: int) -> str:
        (one,) = self.ids[number : number + 1]
        return str(one) if one.ndim == 0 else repr(one.tobytes().rstrip(b"\0").decode())


def _file_of(ids: pyarrow.Array) -> Array:
    """The file of each ID, (n,) integers."""
    if ids.type == _INTEGERS:
        return (ids.to_numpy().view(np.uint64) * STEP >> np.uint64(64 - _BITS)).astype(np.int64)
    return np.fromiter(map(crc32, _bytes_of(ids)), np.int64, len(ids)) % (1 << _BITS)


def _bytes_of(texts: pyarrow.Array) -> list[bytes]:
    return texts.cast(pyarrow.binary()).to_pylist()


def _edge_ids(files: Files, how: EdgeFormat) -> Iterator[Sequence[pyarrow.Array]]:
    """The IDs of sources and of destinations in chunks, integers or strings, (n,) each."""
    found, form = with_format(files, how.name)
    if form in ("text", "parquet"):
        choice = ColumnChoice("edges", how.columns)
        for file in found:
            yield from text_ids(file, how.text, choice) if form == "text" else parquet_ids(file, choice)
        return
    parts = open_npy_edges(found, False) if form == "npy" else open_raw_edges(found, how.dtype)
    unsigned = form == "npy" and any(open_npy(file)[0].dtype == np.uint64 for file in found)
    for ends in itertools.chain(*(edges.chunks() for _, edges in parts)):
        yield [pyarrow.array(ids.view(np.uint64) if unsigned else ids) for ids in ends]
