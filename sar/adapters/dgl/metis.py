"""METIS (Karypis and Kumar, 1998), which DGL brings along."""

import contextlib
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


def _metis(src: Tensor, dst: Tensor, num_nodes: int, num_parts: int) -> Tensor:
    """The part of every node, (N,)."""
    if num_parts == 1:
        return torch.zeros(num_nodes, dtype=torch.int64)
    dgl = require_dgl()
    with _quiet():
        graph = dgl.graph((src, dst), num_nodes=num_nodes)
        # Types are not balanced: with so many constraints METIS balances none.
        part_of: Tensor | None = dgl.metis_partition_assignment(graph, num_parts, balance_edges=True)
    if part_of is None:
        raise PartitionError(f"METIS finds no {num_parts} parts of this graph; try another number of parts.")
    return part_of


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
