"""Read a whole graph as `dgl.save_graphs` wrote it, homogeneous or heterogeneous, with its fields."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from sar.adapters.dgl.reader.graph_file import load_graphs
from sar.common_tuples import CanonicalEtype
from sar.errors import PartitionError

Array = NDArray[Any]


class WholeGraph(NamedTuple):
    """A graph in memory.

    num_nodes: by node type.
    edges: (source, destination) by canonical edge type, (E_r,) each, in the order of edge IDs.
    node_data, edge_data: fields by type and name.
    """

    num_nodes: dict[str, int]
    edges: dict[CanonicalEtype, tuple[Array, Array]]
    node_data: dict[str, dict[str, Array]]
    edge_data: dict[CanonicalEtype, dict[str, Array]]


def read_whole_graph(path: Path) -> WholeGraph:
    """Read the only graph of a file; DGL reads files of graphs as a whole, so it has to fit into memory.

    Raises:
        PartitionError: the file is missing or truncated, or holds another number of graphs, or fields of bfloat16.
        DglError: DGL is not there.
    """
    graphs = load_graphs(path, "Save the graph again with dgl.save_graphs.")
    if len(graphs) != 1:
        raise PartitionError(f"{path} holds {len(graphs)} graphs; expected one. Save that graph alone.")
    (graph,) = graphs
    ends = {etype: graph.edges(order="eid", etype=etype) for etype in graph.canonical_etypes}
    return WholeGraph(
        {ntype: graph.num_nodes(ntype) for ntype in graph.ntypes},
        {etype: (src.numpy(), dst.numpy()) for etype, (src, dst) in ends.items()},
        {ntype: _arrays(path, graph.nodes[ntype].data) for ntype in graph.ntypes},
        {etype: _arrays(path, graph.edges[etype].data) for etype in graph.canonical_etypes},
    )


def _arrays(path: Path, fields: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    for name, values in fields.items():
        if values.dtype == torch.bfloat16:
            raise PartitionError(
                f"the field {name!r} in {path} is bfloat16, which numpy lacks; save it as float16 or float32."
            )
    return {name: values.numpy() for name, values in fields.items()}
