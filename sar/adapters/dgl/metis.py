"""METIS (Karypis and Kumar, 1998) as it comes within DGL."""

import contextlib
import ctypes
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from sar.adapters.dgl.shim import require_dgl
from sar.errors import PartitionError
from sar.logging_setup import logger


def metis_of_edges(src: Tensor, dst: Tensor, num_nodes: int, num_parts: int) -> Tensor:
    """Parts with about equal numbers of edges into them; by DGL's public function.

    Args:
        src, dst: (E,) each, int64.
        num_nodes: N.
        num_parts: P.

    Returns:
        The part of every node, (N,) int64.

    Raises:
        PartitionError: METIS finds none.
    """
    if num_parts == 1:
        return torch.zeros(num_nodes, dtype=torch.int64)
    dgl = require_dgl()
    with _quiet(), _memory_set_to_zero():
        graph = dgl.graph(simple_edges(src, dst, num_nodes), num_nodes=num_nodes)
        # Types are not balanced: with so many constraints METIS balances none.
        part_of: Tensor | None = dgl.metis_partition_assignment(graph, num_parts, balance_edges=True)
    if part_of is None:
        raise _no_parts(num_parts)
    return part_of


def simple_edges(src: Tensor, dst: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """The edges without loops and parallel ones, ordered by source, then destination; src and dst again.

    METIS needs them so: it writes beyond its buffers where a node has more edges than there are nodes.
    """
    apart = src != dst
    pairs = (src[apart] * num_nodes + dst[apart]).unique()
    return pairs // num_nodes, pairs % num_nodes


def metis_of_lists(indptr: Tensor, neighbours: Tensor, weights: Tensor, num_parts: int) -> Tensor:
    """Parts with about equal sums of each weight, of a symmetric graph that is not copied.

    DGL's public function makes the graph symmetric in two more copies, and balances nothing but types and in-degrees;
    this goes to the function below it, which DGL 1.1 and 2 have alike. It knows no weights of edges. Its seed is fixed.

    Args:
        indptr, neighbours: (N + 1,) and (E,), int64; those of node v are neighbours[indptr[v]:indptr[v + 1]], distinct
            and other nodes than v.
        weights: (N, K), int64.
        num_parts: P, at least 2.

    Returns:
        The part of every node, (N,) int64.

    Raises:
        PartitionError: METIS finds none.
    """
    require_dgl()
    import dgl

    with _quiet(), _memory_set_to_zero():
        graph = dgl.graph(("csc", (indptr, neighbours, neighbours[:0])), num_nodes=len(indptr) - 1)
        flat = dgl.backend.zerocopy_to_dgl_ndarray(weights.reshape(-1))
        found = dgl.partition._CAPI_DGLMetisPartition_Hetero(graph._graph, num_parts, flat, "k-way", True)
        part_of: Tensor = dgl.backend.zerocopy_from_dgl_ndarray(found)
    if len(part_of) != len(indptr) - 1:
        raise _no_parts(num_parts)
    return part_of


def _no_parts(num_parts: int) -> PartitionError:
    return PartitionError(f"METIS finds no {num_parts} parts of this graph; try another number of parts.")


@contextlib.contextmanager
def _memory_set_to_zero() -> Iterator[None]:
    """Let glibc give out memory that holds zeros: DGL's METIS reads some that it has not written, so its parts would
    depend on what happened in the process before."""
    perturb = -6  # M_PERTURB; memory is filled with the complement of the byte that is set
    try:
        libc = ctypes.CDLL(None)
        mallopt = libc.mallopt
    except (OSError, AttributeError):  # another C library
        yield
        return
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    mallopt(perturb, 255)
    # Small blocks that this thread keeps for reuse would be given out as they are: 7 of each size.
    kept = [libc.malloc(size) for size in range(24, 1033, 16) for _ in range(7)]
    try:
        yield
    finally:
        mallopt(perturb, 0)
        for block in kept:
            libc.free(block)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Send what DGL prints from Python and METIS from C++ to the log."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        saved = [(descriptor, os.dup(descriptor)) for descriptor in (1, 2)]
        for descriptor, _ in saved:
            os.dup2(said.fileno(), descriptor)
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)  # DGL leaves files open, to be closed as garbage
                yield
        finally:
            for descriptor, copy in saved:
                os.dup2(copy, descriptor)
                os.close(copy)
            said.seek(0)
            logger.debug("DGL: %s", said.read().strip())
