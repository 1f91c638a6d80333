"""Writes a partition directory with DGL's own METIS partitioner."""

import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from sar.adapters.dgl.shim import require_dgl
from sar.logging_setup import logger

ORIGINAL_NODES = "orig_nids.dgl"
ORIGINAL_EDGES = "orig_eids.dgl"
"""The files in which DGL's distributed partitioning pipeline leaves the original IDs of each part."""


def write_metis_partitions(
    edges: tuple[NDArray[Any], NDArray[Any]],
    num_nodes: int,
    node_data: Mapping[str, NDArray[Any]],
    out_dir: Path,
    graph_name: str,
    num_parts: int,
) -> list[tuple[Tensor, Tensor]]:
    """Assign nodes to parts with METIS, with about equal nodes and edges, and write one directory for each.

    Args:
        edges: (source, destination), int64, (E,) each.
        num_nodes: N.
        node_data: node fields, (N, ...) each.
        out_dir: an existing directory.
        graph_name: the JSON file becomes `out_dir/graph_name.json`.
        num_parts: W.

    Returns:
        For each part the original IDs of its nodes and of its in-edges, which are written beside it too.
    """
    require_dgl()
    import dgl
    import dgl.data.utils
    import dgl.distributed

    src, dst = (torch.from_numpy(ids) for ids in edges)
    graph = dgl.graph((src, dst), num_nodes=num_nodes)
    for key, value in node_data.items():
        graph.ndata[key] = torch.from_numpy(value)
    with _quiet():
        original_nodes, original_edges = dgl.distributed.partition_graph(
            graph, graph_name, num_parts, str(out_dir), part_method="metis", balance_edges=True, return_mapping=True
        )
        parts = []
        for part in range(num_parts):
            book = dgl.distributed.load_partition_book(str(out_dir / f"{graph_name}.json"), part)[0]
            nodes, in_edges = original_nodes[book.partid2nids(part)], original_edges[book.partid2eids(part)]
            folder = out_dir / f"part{part}"
            dgl.data.utils.save_tensors(str(folder / ORIGINAL_NODES), {graph.ntypes[0]: nodes})
            dgl.data.utils.save_tensors(str(folder / ORIGINAL_EDGES), {"_N:_E:_N": in_edges})
            parts.append((nodes, in_edges))
    return parts


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
