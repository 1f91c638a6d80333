"""Puts what was computed part by part back into the order of the input graph, out of core."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache, partial
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sar import comm
from sar.adapters.dgl.reader.edge_type_names import types_of
from sar.adapters.dgl.reader.feature_files import FeatureFiles
from sar.adapters.dgl.reader.local_graph import PartFile
from sar.adapters.dgl.reader.partition_json import PartitionJson, graph_path, read_partition_json
from sar.adapters.dgl.reader.stored_tensor import load
from sar.adapters.dgl.reader.tensor_file import open_tensors
from sar.adapters.dgl.reader.worker_share import WorkerShare
from sar.comm.session import current_group
from sar.durable import put_in_place
from sar.errors import ConfigError, PartitionError, SarError
from sar.partition.graph_data import Array
from sar.partition.graph_source import Column
from sar.partition.once import Once
from sar.partition.stored import tensor_column
from sar.partition.write.team import Team

Values = Tensor | Array | str | PathLike[str]

_SLICE_BYTES = 4 * 2**20


def to_original_order(
    values: Values | Sequence[Values],
    directory: str | PathLike[str],
    *,
    ntype: str | None = None,
    out: str | PathLike[str] | None = None,
    allow_outside: bool = False,
) -> Array:
    """Put rows of all workers, in the order in which these have their nodes, into the order of the input graph.

    Beside the result it holds the IDs of one part and a slice of rows; with `out` the result is on disk.

    Args:
        values: one entry for each part, (N_i, ...) each: a tensor, an array, an `.npy` file (memory-mapped) or a file
            of one DGL tensor; or one for each worker of a job with more or fewer workers than parts, which has dealt
            them out by itself. In a running job also the rows of this worker alone; then all workers call this
            together, worker 0 writes the rows of all, and `out` names one file that all of them see.
        directory: the partition directory, or its JSON file; it has the original IDs.
        ntype: the node type that the rows belong to; may be left out where there is one.
        out: an `.npy` file to write; it appears when it is complete, in place of an earlier one.
        allow_outside: as in `load_dgl_partition_data`.

    Returns:
        (N, ...): an array, or with `out` the file, memory-mapped.

    Raises:
        PartitionError: the directory has no original IDs, or they are not a permutation; or the disk is full.
        ConfigError: rows, dtypes or widths of the values do not fit the directory or each other.
        CommunicationError: another worker failed.
    """
    spec = read_partition_json(directory, allow_outside=allow_outside)
    type_id = _type_id(spec, ntype)
    alone = not isinstance(values, Sequence) or isinstance(values, str)
    if alone and comm.is_initialized() and comm.world_size() > 1:
        with current_group().guard():
            return _together(_opened(values, "of this worker"), spec, type_id, out)  # type: ignore[arg-type]
    entries = [values] if alone else list(values)  # type: ignore[arg-type]
    if not entries:
        raise ConfigError(f"there are no values; expected an entry for each of {spec.num_parts} parts, or each worker.")
    rows = [_opened(entry, f"of entry {number}") for number, entry in enumerate(entries)]  # type: ignore[arg-type]
    shares = [share.rows(spec, type_id) for share in WorkerShare.all(spec, len(rows))]
    for number, (entry, cuts) in enumerate(zip(rows, shares, strict=True)):
        _check_form(spec, type_id, f"entry {number} of {len(rows)}", cuts, entry, rows[0])
    total = _num_nodes(spec, type_id)
    with _created(out, (total, *rows[0].shape[1:]), rows[0].dtype) as result:
        seen = Once(total)
        ids_of = lru_cache(maxsize=1)(partial(_original_ids, spec, type_id))  # workers of one part come in turn
        for entry, cuts in zip(rows, shares, strict=True):
            _scatter(_placed(ids_of, entry, cuts), result, seen)
        if not seen.is_permutation:
            raise _no_permutation(spec, seen)
    return result


def _opened(values: Values, whose: str) -> Column:
    """Rows on disk or in memory, of which slices are read."""
    if isinstance(values, Tensor):
        if values.dtype == torch.bfloat16:
            raise ConfigError(f"the values {whose} are bfloat16, which .npy files do not have; call .float() on them.")
        return values.detach().cpu().numpy()
    if isinstance(values, np.ndarray):
        return values
    path = Path(values)
    if path.suffix == ".npy":
        try:
            return cast(Array, np.load(path, mmap_mode="r"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"the values {whose}: '{path}' cannot be read as an .npy file: {error}") from error
    tensors = open_tensors(path)
    if len(tensors) != 1:
        raise ConfigError(f"the values {whose}: '{path}' holds the tensors {sorted(tensors)}; expected one.")
    return tensor_column(next(iter(tensors.values())))


def _type_id(spec: PartitionJson, ntype: str | None) -> int:
    if ntype is None and len(spec.node_types) == 1:
        return 0
    if ntype not in spec.node_types:
        raise ConfigError(f"ntype is {ntype!r}; expected one of {spec.node_types}, the node types of {spec.path}.")
    return spec.node_types.index(ntype)


def _num_nodes(spec: PartitionJson, type_id: int) -> int:
    return int((spec.node_ranges[:, type_id, 1] - spec.node_ranges[:, type_id, 0]).sum())


def _check_form(
    spec: PartitionJson, type_id: int, whose: str, cuts: Mapping[int, slice], rows: Column, like: Column
) -> None:
    count = sum(cut.stop - cut.start for cut in cuts.values())
    if len(rows.shape) == 0 or rows.shape[0] != count:
        raise ConfigError(
            f"the values of {whose} have shape {rows.shape}; expected {count} rows, one for each node of type "
            f"{spec.node_types[type_id]!r} that it has of {spec.path}."
        )
    if rows.dtype != like.dtype or rows.shape[1:] != like.shape[1:]:
        raise ConfigError(
            f"the values of {whose} are {rows.dtype} {rows.shape[1:]}; expected {like.dtype} {like.shape[1:]}, as of "
            "the first."
        )


def _original_ids(spec: PartitionJson, type_id: int, part: int) -> NDArray[np.int64]:
    """Of a part's nodes of one type, (N_i,), in the order of their global IDs."""
    stored = [one.stored for one in FeatureFiles.of_nodes(spec, part).original_ids() if one.type_id == type_id]
    if stored:
        return load(stored[0], torch.device("cpu")).long().numpy()
    start, end = spec.node_ranges[part, type_id].tolist()
    if start == end:
        return np.empty(0, np.int64)
    graph = PartFile(graph_path(spec, part)).read()
    if graph.orig_node_id is None:
        raise PartitionError(
            f"Part {part} of {spec.path} has no original IDs: neither orig_nids.dgl nor orig_id in graph.dgl. "
            "Partition again with `sar partition`, or save what partition_graph(..., return_mapping=True) returns as "
            "orig_nids.dgl."
        )
    owned = graph.is_inner & (types_of(graph.node_id, spec.node_ranges) == type_id)
    ids, order = graph.node_id[owned].sort()
    if len(ids) != end - start or not torch.equal(ids, torch.arange(start, end)):
        raise PartitionError(f"{graph_path(spec, part)} has not each of the nodes [{start}, {end}) once.")
    return graph.orig_node_id[owned][order].long().numpy()


def _placed(
    ids_of: Callable[[int], NDArray[np.int64]], rows: Column, cuts: Mapping[int, slice]
) -> Iterator[tuple[NDArray[np.int64], Array]]:
    """Rows of a worker and their places in the input, part by part and as many at a time as fit `_SLICE_BYTES`."""
    step, first = max(1, _SLICE_BYTES // max(1, prod(rows.shape[1:]) * rows.dtype.itemsize)), 0
    for part, cut in cuts.items():
        ids = ids_of(part)[cut]
        for start in range(0, len(ids), step):
            places = ids[start : start + step]
            yield places, rows[first + start : first + start + len(places)]
        first += len(ids)


def _scatter(placed: Iterable[tuple[NDArray[np.int64], Array]], result: Array, seen: Once) -> None:
    """Write rows to their places, up to one that there is not."""
    for places, rows in placed:
        seen.add(places)
        if seen.outside:
            return
        order = np.argsort(places)  # ascending, which disks like
        result[places[order]] = rows[order]


def _no_permutation(spec: PartitionJson, seen: Once) -> PartitionError:
    return PartitionError(
        f"The original IDs in {spec.path.parent} are not 0 to {seen.count - 1}, each once: {seen.repeated} are there "
        f"again, {seen.outside} are outside. `sar inspect` tells more; write the directory again."
    )


def _unfinished(out: str | PathLike[str]) -> Path:
    return Path(f"{os.fspath(out)}.unfinished")


@contextmanager
def _created(out: str | PathLike[str] | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[Array]:
    """An array, or a file that gets its name where the block ends without an error."""
    if out is None:
        yield np.empty(shape, dtype)
        return
    if Path(out).suffix != ".npy":
        raise ConfigError(f"out is '{os.fspath(out)}'; expected the name of an .npy file.")
    size = prod(shape) * dtype.itemsize
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    try:
        with _unfinished(out).open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            file.flush()
            # All of it now: where the disk is full, writing to memory mapped to a hole kills the process.
            if hasattr(os, "posix_fallocate"):  # macOS lacks it
                os.posix_fallocate(file.fileno(), 0, file.tell() + size)
        result: np.memmap[Any, Any] = np.load(_unfinished(out), mmap_mode="r+")
        yield result
        result.flush()
        put_in_place(_unfinished(out), Path(out))
    except BaseException as error:
        with suppress(OSError):
            _unfinished(out).unlink()
        if isinstance(error, OSError) and not isinstance(error, SarError):
            raise PartitionError(
                f"'{os.fspath(out)}' of {size:,} bytes cannot be written ({error.strerror}); make room there, or name "
                "another place."
            ) from error
        raise


def _together(rows: Column, spec: PartitionJson, type_id: int, out: str | PathLike[str] | None) -> Array:
    """Worker 0 writes the rows of all into one file; inside `group.guard()`.

    One alone, because hosts that map one file over NFS write whole pages, with other hosts' rows as they once were.
    """
    group = current_group()
    if out is None:
        raise ConfigError("the rows of one worker alone need `out`, a file in which the workers' rows meet.")
    cuts = WorkerShare.of(spec, group.rank, group.world_size).rows(spec, type_id)
    _check_form(spec, type_id, f"worker {group.rank}", cuts, rows, rows)
    total = _num_nodes(spec, type_id)
    shape, what = (total, *rows.shape[1:]), f"to_original_order, {spec.node_types[type_id]}"
    group.agree(f"{what}: {rows.dtype} {shape} to {Path(out).name}")
    with _created(out, shape, rows.dtype) if group.rank == 0 else nullcontext(np.empty(0)) as result:
        group.agree(f"{what}: the file is there")
        seen, team = Once(total if group.rank == 0 else 0), Team.here()
        placed = _placed(partial(_original_ids, spec, type_id), rows, cuts)
        nothing = (np.empty(0, np.int64), rows[:0])
        while not team.all((own := next(placed, None)) is None):
            places, values = (
                [arrived for _, arrived in team.deliver(sent, np.eye(1, team.size, dtype=np.int64)[0] * len(sent))]
                for sent in own or nothing
            )
            _scatter(zip(places, values, strict=True), result, seen)
        if group.rank == 0 and not seen.is_permutation:
            raise _no_permutation(spec, seen)
        group.agree(f"{what}: all rows are written")
    group.agree(f"{what}: the file has its name")
    return cast(Array, np.load(out, mmap_mode="r+"))
