"""Puts what was computed part by part back into the order of the input graph, out of core."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property, lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sar.comm import session
from sar.comm.session import current_group
from sar.common_tuples import AnyEtype, CanonicalEtype, StrPath
from sar.data.arrays import Array, as_column
from sar.data.part_files import (
    FeatureFiles,
    PartFile,
    canonical_edge_types,
    check_edge_ids,
    check_node_ids,
    parse_edge_type,
    types_of,
)
from sar.data.partition_json import IdRanges, PartitionJson, graph_path, read_partition_json
from sar.data.regroup import WorkerShare, order_edges
from sar.data.tensor_files import open_tensors
from sar.durable import put_in_place
from sar.errors import ConfigError, PartitionError, SarError
from sar.id_slices import first_of_equals, pieces
from sar.partition.graph_source import Column
from sar.partition.ingest.objects import as_array
from sar.partition.write.writers import Writers

Ids = NDArray[np.int64]
Values = Tensor | Array | StrPath

_SLICE_BYTES = 4 * 2**20
_CHUNK = 2**18


class Originals(NamedTuple):
    """The nodes of a type, or the edges."""

    name: str
    total: int  # on all workers
    of_worker: Callable[[WorkerShare, Sequence[int]], Iterator[Ids]]  # by its share, and where each worker's nodes end


class PermutationCheck:
    """Whether IDs that come in pieces are 0 to `count` - 1, each once, in one bit for each."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.found = 0  # how many of these have been seen
        self.repeated = 0  # came again
        self.outside = 0  # are none of these

    @cached_property
    def _seen(self) -> NDArray[np.uint8]:
        return np.zeros(-(-self.count // 8), np.uint8)

    @property
    def is_permutation(self) -> bool:
        return self.found == self.count and not self.repeated and not self.outside

    def add(self, ids: Ids) -> None:  # (n,)
        for chunk in pieces(len(ids), _CHUNK):
            piece = np.sort(ids[chunk])
            inside = piece[(piece >= 0) & (piece < self.count)]
            self.outside += len(piece) - len(inside)
            new = inside[first_of_equals(inside)]
            new = new[(self._seen[new >> 3] >> (new & 7).astype(np.uint8)) & 1 == 0]
            self.repeated += len(inside) - len(new)
            self.found += len(new)
            np.add.at(self._seen, new >> 3, np.left_shift(1, new & 7).astype(np.uint8))  # of bits that are all 0


def to_original_order(
    values: Values | Sequence[Values],
    directory: StrPath,
    *,
    ntype: str | None = None,
    etype: AnyEtype = None,
    out: StrPath | None = None,
    allow_outside: bool = False,
) -> Array:
    """Put rows of all workers, in the order in which these have their nodes or edges, into that of the input graph.

    Beside the result it holds the IDs of one part, or the edges of one worker, and a slice of rows; with `out` the
    result is on disk.

    Args:
        values: one entry for each part, (N_i, ...) each: a tensor, an array, an `.npy` file (memory-mapped) or a file
            of one DGL tensor; or one for each worker of a job with more or fewer workers than parts, which has dealt
            them out by itself. In a running job also the rows of this worker alone; then all workers call this
            together, worker 0 writes the rows of all, and `out` names one file that all of them see.
        directory: the partition directory, or its JSON file; it has the original IDs.
        ntype: the node type that the rows belong to; may be left out where there is one.
        etype: the edge type, also where there is one, for rows of edges, as in `graph.edges[etype].data`.
        out: an `.npy` file to write; it appears when it is complete, in place of an earlier one.
        allow_outside: as in `load_dgl_partition_data`.

    Returns:
        (N, ...) or (E, ...): an array, or with `out` the file, memory-mapped.

    Raises:
        PartitionError: the directory has no original IDs, or they are not a permutation; or the disk is full.
        ConfigError: rows, dtypes or widths of the values do not fit the directory or each other.
        CommunicationError: another worker failed.
    """
    spec = read_partition_json(directory, allow_outside=allow_outside)
    originals = original_nodes(spec, ntype) if etype is None else original_edges(spec, etype)
    alone = not isinstance(values, Sequence) or isinstance(values, str)
    if alone and session.is_initialized() and session.world_size() > 1:
        with current_group().guard():
            return _together(_opened(values, "of this worker"), spec, originals, out)  # type: ignore[arg-type]
    entries = [values] if alone else list(values)  # type: ignore[arg-type]
    if not entries:
        raise ConfigError(f"there are no values; expected an entry for each of {spec.num_parts} parts, or each worker.")
    rows = [_opened(entry, f"of entry {number}") for number, entry in enumerate(entries)]  # type: ignore[arg-type]
    shares = WorkerShare.all(spec, len(rows))
    whose = [f"of entry {number} of {len(rows)}" for number in range(len(rows))]
    for number, entry in enumerate(rows):
        _check_form(whose[number], entry, rows[0])
    with _created(out, (originals.total, *rows[0].shape[1:]), rows[0].dtype) as result:
        seen, ends = PermutationCheck(originals.total), [share.end for share in shares]
        for number, entry in enumerate(rows):
            _scatter(_placed(originals, whose[number], entry, shares[number], ends), result, seen)
        if not seen.is_permutation:
            raise _no_permutation(spec, seen)
    return result


def _opened(values: Values, whose: str) -> Column:
    """Rows on disk or in memory, of which slices are read."""
    if isinstance(values, Tensor | np.ndarray):
        return as_array(f"values {whose}", values)
    path = Path(values)
    if path.suffix == ".npy":
        try:
            return cast(Array, np.load(path, mmap_mode="r"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"the values {whose}: '{path}' cannot be read as an .npy file: {error}") from error
    tensors = open_tensors(path)
    if len(tensors) != 1:
        raise ConfigError(f"the values {whose}: '{path}' holds the tensors {sorted(tensors)}; expected one.")
    return as_column(next(iter(tensors.values())))


def _check_form(whose: str, rows: Column, like: Column) -> None:
    if len(rows.shape) == 0 or rows.dtype != like.dtype or rows.shape[1:] != like.shape[1:]:
        raise ConfigError(
            f"the values {whose} are {rows.dtype} {rows.shape}; expected {like.dtype} and rows of {like.shape[1:]}, as "
            "of the first."
        )


def _placed(
    originals: Originals, whose: str, rows: Column, share: WorkerShare, ends: Sequence[int]
) -> Iterator[tuple[Ids, Array]]:
    """Rows of a worker and their places in the input, as many at a time as fit `_SLICE_BYTES`."""
    step, first = max(1, _SLICE_BYTES // max(1, prod(rows.shape[1:]) * rows.dtype.itemsize)), 0
    for ids in originals.of_worker(share, ends):
        if first + len(ids) <= rows.shape[0]:
            for chunk in pieces(len(ids), step):
                yield ids[chunk], rows[first + chunk.start : first + chunk.stop]
        first += len(ids)
    if first != rows.shape[0]:
        raise ConfigError(
            f"the values {whose} have shape {rows.shape}; expected {first} rows, one for each {originals.name} that it "
            "has."
        )


def _scatter(placed: Iterable[tuple[Ids, Array]], result: Array, seen: PermutationCheck) -> None:
    """Write rows to their places, up to one that there is not."""
    for places, rows in placed:
        seen.add(places)
        if seen.outside:
            return
        order = np.argsort(places)  # ascending, which disks like
        result[places[order]] = rows[order]


def _no_permutation(spec: PartitionJson, seen: PermutationCheck) -> PartitionError:
    return PartitionError(
        f"The original IDs in {spec.path.parent} are not 0 to {seen.count - 1}, each once: {seen.repeated} are there "
        f"again, {seen.outside} are outside. `sar inspect` tells more; write the directory again."
    )


@contextmanager
def _created(out: StrPath | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[Array]:
    """An array, or a file that gets its name where the block ends without an error."""
    if out is None:
        yield np.empty(shape, dtype)
        return
    if Path(out).suffix != ".npy":
        raise ConfigError(f"out is '{os.fspath(out)}'; expected the name of an .npy file.")
    draft, size = Path(f"{os.fspath(out)}.unfinished"), prod(shape) * dtype.itemsize
    try:
        result = np.lib.format.open_memmap(draft, "w+", dtype, shape)
        with draft.open("rb+") as file:
            # All of it now: where the disk is full, writing to memory mapped to a hole kills the process.
            os.posix_fallocate(file.fileno(), 0, draft.stat().st_size)
        yield result
        result.flush()
        put_in_place(draft, Path(out))
    except BaseException as error:
        with suppress(OSError):
            draft.unlink()
        if isinstance(error, OSError) and not isinstance(error, SarError):
            raise PartitionError(
                f"'{os.fspath(out)}' of {size:,} bytes cannot be written ({error.strerror}); make room there, or name "
                "another place."
            ) from error
        raise


def _together(rows: Column, spec: PartitionJson, originals: Originals, out: StrPath | None) -> Array:
    """Worker 0 writes the rows of all into one file; inside `group.guard()`.

    One alone, because hosts that map one file over NFS write whole pages, with other hosts' rows as they once were.
    """
    group = current_group()
    if out is None:
        raise ConfigError(
            "the rows of one worker alone need `out`, a file in which the workers' rows meet: on all workers, name the "
            "same .npy file in a folder that all see, as in out='result.npy'."
        )
    share, whose = WorkerShare.of(spec, group.rank, group.world_size), f"of worker {group.rank}"
    _check_form(whose, rows, rows)
    total = originals.total
    shape, what = (total, *rows.shape[1:]), f"to_original_order, each {originals.name}"
    group.agree(f"{what}: {rows.dtype} {shape} to {Path(out).name}")
    with _created(out, shape, rows.dtype) if group.rank == 0 else nullcontext(np.empty(0)) as result:
        ends = group.gather_numbers(share.end, f"{what}: the file is there")
        seen, writers = PermutationCheck(total if group.rank == 0 else 0), Writers.here()
        placed, nothing = _placed(originals, whose, rows, share, ends), (np.empty(0, np.int64), rows[:0])
        while not writers.all((own := next(placed, None)) is None):
            to_first = np.eye(1, writers.size, dtype=np.int64)[0]
            places, values = (
                [arrived for _, arrived in writers.deliver(sent, to_first * len(sent))] for sent in own or nothing
            )
            _scatter(zip(places, values, strict=True), result, seen)
        if group.rank == 0 and not seen.is_permutation:
            raise _no_permutation(spec, seen)
        group.agree(f"{what}: all rows are written")
    group.agree(f"{what}: the file has its name")
    return cast(Array, np.load(out, mmap_mode="r+"))


def original_nodes(spec: PartitionJson, ntype: str | None) -> Originals:
    """The nodes of a type, which may be left out where there is one; in the order of global IDs."""
    ntype = spec.node_types[0] if ntype is None and len(spec.node_types) == 1 else ntype
    if ntype not in spec.node_types:
        raise ConfigError(f"ntype is {ntype!r}; expected one of {spec.node_types}, the node types of {spec.path}.")
    kind = spec.node_types.index(ntype)
    of_part = lru_cache(maxsize=1)(partial(_nodes_of_part, spec, kind))  # workers of one part come in turn

    def of_worker(share: WorkerShare, ends: Sequence[int]) -> Iterator[Ids]:
        for part, rows in share.rows(spec.node_ranges, kind).items():
            yield of_part(part)[rows]

    return Originals(f"node of type {ntype!r}", _total(spec.node_ranges[:, kind]), of_worker)


def original_edges(spec: PartitionJson, etype: str | CanonicalEtype) -> Originals:
    """The edges of a type, by its canonical or its plain name; in each worker's visible order."""
    names = [parse_edge_type(name) or name for name in spec.edge_types]
    if isinstance(etype, str):
        matches = [etype == (name if isinstance(name, str) else name[1]) for name in names]
    else:
        matches = [name in (etype, etype[1]) for name in names]
    if sum(matches) != 1:
        raise ConfigError(f"etype is {etype!r}; expected one of {names}, the edge types of {spec.path}.")
    kind = matches.index(True)
    of_part = lru_cache(maxsize=1)(partial(_edges_of_part, spec, kind))

    def of_worker(share: WorkerShare, ends: Sequence[int]) -> Iterator[Ids]:
        # All parts at once: in the visible order a source's worker, which may have several, comes first.
        parts = [of_part(part) for part in share.parts]
        src, dst, ids, originals = (torch.cat(columns).numpy() for columns in zip(*parts, strict=True))
        order = np.lexsort((ids, dst, np.searchsorted(ends, src, side="right")))
        yield originals[order[(dst[order] >= share.start) & (dst[order] < share.end)]]

    return Originals(f"edge of type {names[kind]!r}", _total(spec.edge_ranges[:, kind]), of_worker)


def _total(ranges: IdRanges) -> int:
    return int((ranges[:, 1] - ranges[:, 0]).sum())


def _nodes_of_part(spec: PartitionJson, kind: int, part: int) -> Ids:
    """Of a part's nodes of one type, (N_i,), in the order of their global IDs."""
    stored = [one.stored for one in FeatureFiles(spec, part, "nodes").original_ids() if one.type_id == kind]
    if stored:
        return stored[0].load().long().numpy()
    start, end = spec.node_ranges[part, kind].tolist()
    if start == end:
        return np.empty(0, np.int64)
    graph = PartFile(graph_path(spec, part)).read()
    ids, originals = graph.own_nodes()
    if originals is None:
        raise _no_ids(spec, part, "orig_nids.dgl")
    check_node_ids(spec, part, graph)
    return originals[(ids >= start) & (ids < end)].long().numpy()


def _edges_of_part(spec: PartitionJson, kind: int, part: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a part's edges of one type: sources, destinations, global and original IDs, (E,) each."""
    graph = PartFile(graph_path(spec, part)).read()
    check_node_ids(spec, part, graph)
    check_edge_ids(spec, part, graph)
    files = FeatureFiles(spec, part, "edges", canonical_edge_types(spec, graph, part))
    edges = order_edges(graph, spec.partition_ranges, part)
    mine = types_of(edges.edge_id, spec.edge_ranges) == kind
    ids, originals = edges.edge_id[mine], edges.orig_edge_id
    stored = [one.stored for one in files.original_ids() if one.type_id == kind]
    if stored:
        originals = stored[0].load().long()[ids - int(spec.edge_ranges[part, kind, 0])]
    elif originals is not None:
        originals = originals[mine]
    elif len(ids):
        raise _no_ids(spec, part, "orig_eids.dgl")
    else:
        originals = ids
    return edges.src[mine], edges.dst[mine], ids, originals


def _no_ids(spec: PartitionJson, part: int, file: str) -> PartitionError:
    return PartitionError(
        f"Part {part} of {spec.path} has no original IDs: neither {file} nor orig_id in graph.dgl. Partition again "
        f"with `sar partition`, or save what partition_graph(..., return_mapping=True) returns as {file}."
    )
