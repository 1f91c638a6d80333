"""Numbers nodes whose IDs are strings, or integers with gaps: `ids="map"` of `open_graph`.

[Note: numbering by hash] A hash assigns each ID to one of 256 files, which fit into memory one at a time. IDs are
sorted within a file, and numbers continue from file to file, so they only depend on the set of IDs. A chunk sends each
of its distinct IDs once, in the order of the files, and stores for every row the position of its ID among these. So
reading each file once more, sequentially, returns the numbers.
"""

import itertools
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
import pyarrow
import pyarrow.compute as compute

from sar.common_tuples import CanonicalEtype
from sar.data.arrays import Array, ArrayFile, StoredArray
from sar.errors import PartitionError
from sar.partition.graph_source import ArrayEdges, Column, index_dtype
from sar.partition.ingest.edges import read_edge_ids
from sar.partition.ingest.sources import InputFiles
from sar.partition.ingest.tables import as_bytes, read_ids
from sar.tensors.splitmix import STEP

_BITS = 8  # of the hash, to select the file
_LONGEST = 255
_ENDS = ("src", "dst")
_INTEGERS = pyarrow.int64()
_Destination = tuple[CanonicalEtype, str]  # of numbers: sources ("src") or destinations ("dst") of a type


class MappedIds(NamedTuple):
    """Nodes by their numbers."""

    num_nodes: dict[str, int]
    edges: dict[CanonicalEtype, ArrayEdges]
    ids: dict[str, Column]  # by node type, as `GIVEN_ID`


class _NotIntegersError(Exception):
    """Some IDs of a node type, its argument, are not 64-bit integers in canonical form."""


def map_ids(edges: Mapping[CanonicalEtype, InputFiles], tables: Mapping[str, InputFiles], scratch: Path) -> MappedIds:
    """Number the end nodes of edges. IDs are integers if all IDs of a node type are integers, else strings.

    `tables` contain the IDs of nodes by node type, and determine their numbers; other types are numbered as in
    [Note: numbering by hash]. `scratch` holds the results, and must exist as long as they are used.
    `PartitionError` if files are missing or damaged, or an ID is empty, too long, repeated in a table, or not in it.
    """
    types = dict.fromkeys(itertools.chain(*(etype[::2] for etype in edges)), _INTEGERS)
    while True:
        try:
            with tempfile.TemporaryDirectory(prefix="ids-", dir=scratch) as folder:
                return _mapped(edges, tables, types, scratch, Path(folder))
        except _NotIntegersError as found:
            types[found.args[0]] = pyarrow.string()


def _mapped(
    edges: Mapping[CanonicalEtype, InputFiles],
    tables: Mapping[str, InputFiles],
    types: Mapping[str, pyarrow.DataType],
    scratch: Path,
    folder: Path,
) -> MappedIds:
    numberings = {
        ntype: _Numbering(ntype, kind, tables.get(ntype), folder / str(number), scratch / f"ids-{number}")
        for number, (ntype, kind) in enumerate(types.items())
    }
    for etype, source in edges.items():
        for chunks in read_edge_ids(source):
            for chunk, ntype, end in zip(chunks, etype[::2], _ENDS, strict=True):
                numberings[ntype].send(chunk, (etype, end))
    counts = {ntype: numbering.number() for ntype, numbering in numberings.items()}
    with ExitStack() as stack:
        out: dict[_Destination | None, ArrayFile] = {}
        for number, etype in enumerate(edges):
            for ntype, end in zip(etype[::2], _ENDS, strict=True):
                file = ArrayFile(scratch / f"edges-{number}.{end}", index_dtype(counts[ntype]))
                out[etype, end] = stack.enter_context(file)
        for numbering in numberings.values():
            for destination, numbers in numbering.numbers():
                out[destination].append(numbers)
        mapped = {etype: ArrayEdges(*(out[etype, end].array() for end in _ENDS)) for etype in edges}
    return MappedIds(counts, mapped, {ntype: numbering.ids for ntype, numbering in numberings.items()})


class _Numbering:
    """The numbering of one node type; see [Note: numbering by hash].

    If there is a table with the IDs of the nodes, its row numbers replace these numbers at the end.
    """

    ids: StoredArray  # by number, as `GIVEN_ID`; after `numbers`

    def __init__(
        self, ntype: str, kind: pyarrow.DataType, table: InputFiles | None, folder: Path, result: Path
    ) -> None:
        self._ntype, self._kind, self._table, self._folder, self._result = ntype, kind, table, folder, result
        self._schema = pyarrow.schema([("id", kind)])
        self._width = 1  # bytes of the longest string
        # By chunk: destination, rows, and the number of IDs sent to each file. Chunks of the table come first.
        self._sent: list[tuple[_Destination | None, int, Array]] = []
        folder.mkdir()
        for chunk in read_ids(table) if table is not None else ():
            self.send(chunk, None)

    def send(self, chunk: pyarrow.Array, destination: _Destination | None) -> None:
        """Send the IDs of some rows to the files; `destination` is where their numbers go."""
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
        self._sent.append((destination, len(chunk), counts))

    def number(self) -> int:
        """Number the IDs of all files; return their number."""

        def of_files() -> Iterator[pyarrow.Array]:
            count, in_files = 0, sum(counts for _, _, counts in self._sent)
            for file in np.flatnonzero(in_files).tolist():
                sent = self._read(file).dictionary_encode()
                order = compute.sort_indices(sent.dictionary)
                number = np.empty(len(order), np.int64)
                number[order.to_numpy()] = np.arange(count, count + len(order))
                # Not tofile(), which ignores a disk that becomes full with the last bytes.
                self._file(f"{file}.numbers").write_bytes(number[sent.indices.to_numpy()].data)
                count += len(order)
                yield sent.dictionary.take(order)

        self._store(of_files())
        return self.ids.shape[0]

    def numbers(self) -> Iterator[tuple[_Destination | None, Array]]:
        """The numbers of the rows of all chunks of edges, (n,) int64, and their destination."""
        sent = self._numbers_sent()
        if self._table is None:
            yield from sent
            return
        of_table = sum(destination is None for destination, _, _ in self._sent)
        in_table = [numbers for _, numbers in itertools.islice(sent, of_table)]
        rows = self._rows_of(np.concatenate([np.empty(0, np.int64), *in_table]))
        for destination, numbers in sent:
            yield destination, rows[numbers]
        self._store(read_ids(self._table))

    def _numbers_sent(self) -> Iterator[tuple[_Destination | None, Array]]:
        read = np.zeros(1 << _BITS, np.int64)  # per file; some systems do not allow all files to be open at once
        with self._file("places").open("ab+") as places:
            places.seek(0)
            for destination, rows, counts in self._sent:
                found = [
                    np.fromfile(self._file(f"{file}.numbers"), np.int64, counts[file], offset=8 * read[file])
                    for file in np.flatnonzero(counts)
                ]
                read += counts
                of_chunk = np.concatenate([np.empty(0, np.int64), *found])
                yield destination, of_chunk[np.fromfile(places, np.int32, rows)]

    def _rows_of(self, numbers: Array) -> Array:
        """The table row of each number, from the numbers of the rows; `PartitionError` for missing or repeated IDs."""
        assert self._table is not None
        path = self._table.shown
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

    def _store(self, chunks: Iterable[pyarrow.Array]) -> None:
        """Set `ids`, in a permanent file."""
        is_text = self._kind != _INTEGERS
        dtype, shape = (np.uint8, (self._width,)) if is_text else (np.int64, ())
        with ArrayFile(self._result, np.dtype(dtype), shape) as file:
            for chunk in map(self._converted, chunks):
                rows = np.array(as_bytes(chunk), f"S{self._width}") if is_text else chunk.to_numpy()
                file.append(rows.view(dtype).reshape(len(rows), *shape))
            self.ids = file.array()

    def _converted(self, chunk: pyarrow.Array) -> pyarrow.Array:
        """Convert to integers or strings; text is an integer only in canonical form, unlike 007."""
        try:
            found = chunk.cast(self._kind)
        except pyarrow.ArrowInvalid as error:
            raise _NotIntegersError(self._ntype) from error
        if self._kind == _INTEGERS and not found.cast(chunk.type).equals(chunk):
            raise _NotIntegersError(self._ntype)
        return found

    def _file(self, name: int | str) -> Path:
        return self._folder / str(name)

    def _read(self, file: int) -> pyarrow.Array:
        """Read the IDs that were sent to a file."""
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
    return np.fromiter(map(crc32, ids.cast(pyarrow.binary()).to_pylist()), np.int64, len(ids)) % (1 << _BITS)
