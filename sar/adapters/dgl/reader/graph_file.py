"""Read the structure of one partition, `graph.dgl`.

The file holds the partition's nodes and halo as a homogeneous graph with local node numbers.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from sar.adapters.dgl.shim import require_dgl
from sar.common_tuples import EID, NID, ORIG_ID
from sar.errors import PartitionError

SRC: Final = "src"
DST: Final = "dst"


@dataclass
class LocalGraph:
    """The graph of one partition, with everything that the reader has no use for dropped.

    node_id: (N,) global IDs of the partition's nodes and halo.
    is_inner: (N,) whether the partition owns the node.
    orig_node_id: (N,) IDs in the input graph, which DGL wrote up to 0.9.
    edges: (E,) each: `src` and `dst` (local nodes), `_ID` (global), and `orig_id` where DGL wrote it.
    lacks_part_id: nodes have no `part_id`, as DGL's dispatch pipeline writes them.
    """

    node_id: Tensor
    is_inner: Tensor
    orig_node_id: Tensor | None
    edges: dict[str, Tensor]
    lacks_part_id: bool


def read_graph_file(path: Path) -> LocalGraph:
    """Read a `graph.dgl`; errors as of `load_graph`."""
    return local_graph(load_graph(path))


def local_graph(graph: Any) -> LocalGraph:
    """What the reader needs of what `load_graph` gives."""
    nodes, edges = graph.ndata, graph.edata
    src, dst = graph.edges(order="eid")
    return LocalGraph(
        node_id=nodes[NID],
        is_inner=nodes["inner_node"].bool(),
        orig_node_id=nodes.get(ORIG_ID),
        edges={SRC: src, DST: dst} | {key: edges[key] for key in (EID, ORIG_ID) if key in edges},
        lacks_part_id="part_id" not in nodes,
    )


def load_graph(path: Path) -> Any:
    """The `dgl.DGLGraph` in a `graph.dgl`, with all of its fields.

    Raises:
        PartitionError: the file is missing, truncated, or holds something else.
    """
    graph = load_graphs(path, "Copy it again, or partition again.")[0]
    nodes, edges = graph.ndata, graph.edata
    if NID not in nodes or EID not in edges or "inner_node" not in nodes:
        raise PartitionError(
            f"{path} has the node fields {sorted(nodes)} and edge fields {sorted(edges)}; expected at least {NID} and "
            f"inner_node on nodes, {EID} on edges. It is not the graph of a partition: check the JSON file's paths."
        )
    return graph


def load_graphs(path: Path, advice: str) -> list[Any]:
    """All of a file's graphs; `advice` says how to correct a file that DGL cannot read."""
    _check_complete(path)
    dgl = require_dgl()
    try:
        graphs: list[Any] = dgl.load_graphs(str(path))[0]
    except dgl.DGLError as error:
        raise PartitionError(f"DGL cannot read {path}: {error}. {advice}") from error
    return graphs


def _check_complete(path: Path) -> None:
    """Refuse a truncated file, for which DGL's reader may crash or return garbage.

    A complete file ends with the table of its graphs: size of the table, count, one offset per graph, size again.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 8))
            (table_bytes,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            if 16 <= table_bytes <= size - 16:
                file.seek(size - 16 - table_bytes)
                size_again, count = struct.unpack("<QQ", file.read(16))
                if size_again == table_bytes == 8 * (count + 1):
                    return
    except OSError as error:
        raise PartitionError(
            f"Cannot read {path} ({error.strerror}); expected a file of graphs. Copy it again, or write it again."
        ) from error
    raise PartitionError(
        f"{path} is truncated, or no DGL graph file: its {size} bytes do not end with a table of graphs. "
        "Copy it again, or write it again."
    )
