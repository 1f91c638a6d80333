"""`to_original_order`: arranges workers' rows in the order of the input graph."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar.comm import session
from sar.comm.collectives import exchange_tensors
from sar.common_tuples import StrPath
from sar.data.arrays import Array
from sar.errors import ConfigError, PartitionError, SarError
from sar.host.durable import put_in_place

Rows = Tensor | Array | StrPath

_SLICE_BYTES = 4 << 20  # of rows that are sent or written at a time


def to_original_order(values: Rows | Sequence[Rows], ids: Rows | Sequence[Rows], out: StrPath | None = None) -> Array:
    """Arrange the rows of all workers in the order of the input graph: `result[ids[i]] = values[i]`.

    In a running job, all workers call this together with their own rows, and worker 0 writes them into `out`. Outside
    a job, one process passes lists with the rows of all workers or partitions.

    Args:
        values: (N_i, ...) rows: a tensor, an array, an `.npy` file (memory-mapped), or a list of these.
        ids: (N_i,) the index of each row in the result, in the same form: `data["orig_id"]` for all nodes,
            `graph.edges[etype].data["orig_id"]` for edges, `data["orig_id"][data["_TYPE"] == type_id]` for one node
            type of several. All IDs together are 0 to N - 1, each exactly once.
        out: an `.npy` file on storage that all workers share. It is written one slice at a time, and replaces an
            earlier file when complete. Default None returns an array; a running job needs `out`.

    Returns:
        (N, ...) an array, or with `out` the memory-mapped file.

    Raises:
        ConfigError: values and IDs have different lengths, or the IDs are not 0 to N - 1, each exactly once.
        PartitionError: `out` cannot be written, for example because the disk is full.
        CommunicationError: another worker failed.
    """
    several = isinstance(values, list | tuple)
    if not several and session.has_peers():
        with session.current_group().guard():
            return _write_together(_as_array(values, "the values"), _as_array(ids, "the ids"), out)
    entries = list(values) if isinstance(values, list | tuple) else [values]
    places = list(ids) if isinstance(ids, list | tuple) else [ids]
    if not entries or len(entries) != len(places):
        raise ConfigError(f"there are {len(entries)} values and {len(places)} ids; expected as many, and one at least.")
    pairs = [
        (_as_array(rows, f"entry {number} of values"), _as_array(own, f"entry {number} of ids"))
        for number, (rows, own) in enumerate(zip(entries, places, strict=True))
    ]
    like = pairs[0][0]
    for number, (rows, own) in enumerate(pairs):
        _check(rows, own, like, f"entry {number}")
    seen = np.zeros(sum(len(own) for _, own in pairs), np.bool_)
    with _created(out, (len(seen), *like.shape[1:]), like.dtype) as result:
        for rows, own in pairs:
            for some_ids, some in _slices(own, rows):
                _scatter(some_ids, some, result, seen)
        _check_all(seen)
    return result


def _as_array(values: Any, name: str) -> Array:
    if isinstance(values, Tensor):
        try:
            return values.detach().cpu().numpy()
        except (TypeError, RuntimeError) as error:
            raise ConfigError(f"{name} are {values.dtype} {values.layout}, which numpy lacks; convert them.") from error
    if isinstance(values, np.ndarray):
        return values
    try:
        return np.load(values, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{name} are {values!r}, which cannot be read as an .npy file ({error}); expected a tensor, an array or "
            "such a file."
        ) from error


def _check(rows: Array, ids: Array, like: Array, whose: str) -> None:
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or rows.shape[:1] != ids.shape:
        raise ConfigError(
            f"{whose} has {ids.dtype} ids {ids.shape} for values {rows.shape}; expected an integer for each row."
        )
    if rows.dtype != like.dtype or rows.shape[1:] != like.shape[1:]:
        raise ConfigError(
            f"{whose} has {rows.dtype} values {rows.shape}; expected {like.dtype} rows of {like.shape[1:]}, as others."
        )


def _slices(ids: Array, rows: Array, least: int = 0) -> Iterator[tuple[Array, Array]]:
    """Slices of IDs and rows in ascending order, to write the pages of a large file sequentially.

    Empty slices follow, up to the number of slices of `least` rows.
    """
    order = np.argsort(ids)
    step = max(1, _SLICE_BYTES // max(1, prod(rows.shape[1:]) * rows.dtype.itemsize))
    for start in range(0, max(len(ids), least), step):
        some = order[start : start + step]
        yield ids[some], rows[some]


def _scatter(ids: Array, rows: Array, result: Array, seen: Array) -> None:
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= len(seen)):
        raise ConfigError(f"the ids have {int(ids.max())} or {int(ids.min())}; expected 0 to {len(seen) - 1}.")
    result[ids] = rows
    seen[ids] = True


def _check_all(seen: Array) -> None:
    """Check that every position was set. As there is one row per position, a repeated ID leaves another unset."""
    if missing := int((~seen).sum()):
        raise ConfigError(
            f"{missing} of the ids 0 to {len(seen) - 1} are missing, {int(seen.argmin())} for one, and others are "
            "there more than once; expected each once."
        )


def _write_together(rows: Array, ids: Array, out: StrPath | None) -> Array:
    """Let the process of worker 0 write the rows of all workers; inside `group.guard()`.

    Only one process writes, because hosts that map a file over NFS write whole pages, including outdated rows of other
    hosts. Workers of this process write their own rows; other workers send theirs to worker 0.
    """
    group, call = session.current_group(), "to_original_order"
    if out is None:
        raise ConfigError("out is None; expected an .npy file that all workers see, such as out='result.npy'.")
    _check(rows, ids, rows, f"worker {group.rank}")
    group.agree(f"{call}: {rows.dtype} {rows.shape[1:]} to {Path(out).name}")
    counts = group.gather_numbers([len(ids)], call)
    total = sum(count for (count,) in counts)
    seen = np.zeros(total if group.rank == 0 else 0, np.bool_)
    with _created(out, (total, *rows.shape[1:]), rows.dtype) if group.rank == 0 else nullcontext(rows) as result:
        group.agree(f"{call}: the file is there")
        writer = group.swap((result, seen), call).get(0)
        if writer is not None:
            for some_ids, some in _slices(ids, rows):
                _scatter(some_ids, some, *writer)
        per_process = len(group.local_peers)
        most = max(counts[per_process:], default=[0])[0]  # of the workers that send
        sent = slice(0) if writer is not None else slice(None)
        for some_ids, some in _slices(ids[sent], rows[sent], most) if most else ():  # the same number on all workers
            received = zip(_gather(some_ids.astype(np.int64)), _gather(some), strict=True)
            for own, values in received if group.rank == 0 else ():
                _scatter(own, values, result, seen)
        group.agree(f"{call}: all rows are there")
        _check_all(seen)
        group.agree(f"{call}: all rows are written")
    group.agree(f"{call}: the file has its name")
    try:
        return np.load(out, mmap_mode="r+")
    except FileNotFoundError as error:
        raise ConfigError(f"worker {group.rank} does not see '{out}' of worker 0: share its folder.") from error


def _gather(rows: Array) -> list[Array]:
    """Gather the rows of all workers on worker 0; returns nothing elsewhere."""
    group, width = session.current_group(), prod(rows.shape[1:]) * rows.dtype.itemsize
    own = torch.from_numpy(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).reshape(len(rows), width).copy())
    received = exchange_tensors([own if rank == 0 else own[:0] for rank in range(group.world_size)])
    return [sent.cpu().numpy().reshape(-1).view(rows.dtype).reshape(len(sent), *rows.shape[1:]) for sent in received]


@contextmanager
def _created(out: StrPath | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[Array]:
    """An array, or a file that is renamed to its name if the block ends without an error."""
    if out is None:
        yield np.empty(shape, dtype)
        return
    if Path(out).suffix != ".npy":
        raise ConfigError(f"out is '{os.fspath(out)}'; expected the name of an .npy file.")
    draft = Path(f"{os.fspath(out)}.unfinished")
    try:
        result = np.lib.format.open_memmap(draft, "w+", dtype, shape)
        with draft.open("rb+") as file:
            # Reserve all space now: if the disk is full, writing to a mapped hole kills the process.
            os.posix_fallocate(file.fileno(), 0, draft.stat().st_size)
        yield result
        result.flush()
        put_in_place(draft, Path(out))
    except BaseException as error:
        with suppress(OSError):
            draft.unlink()
        if isinstance(error, OSError) and not isinstance(error, SarError):
            size = prod(shape) * dtype.itemsize
            raise PartitionError(
                f"'{os.fspath(out)}' of {size:,} bytes cannot be written ({error.strerror}); make room there, or name "
                "another place."
            ) from error
        raise
