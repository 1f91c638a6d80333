"""From distributed graphs to what PyTorch Geometric's layers are called with."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from sar.adapters.pyg import attention, batch_vector, layers, norms, operations, propagate, refused, supergat
from sar.adapters.pyg.edge_index import DistributedEdgeIndex, edges_of
from sar.common_tuples import EID, ETYPE, NID, NTYPE, ORIG_ID, SPLIT, CanonicalEtype, PartitionData
from sar.core.graph.graph import GraphShardManager

NODE_NAMES = {"feat": "x", "label": "y"}
EDGE_NAMES = {"feat": "edge_attr", "aggregator_weight": "edge_norm"}
"""What PyTorch Geometric calls DGL's usual fields."""


def edge_index(graph: GraphShardManager) -> DistributedEdgeIndex | dict[CanonicalEtype, DistributedEdgeIndex]:
    """The edges into this worker's nodes, which layers of PyTorch Geometric take for their `edge_index`.

    Layers then compute with the whole graph, across workers; see docs/pyg.md. Calls are collective.

    Args:
        graph: from `construct_full_graph`, in any mode, or `construct_mfgs`.

    Returns:
        (2, E_i) int64, in the order of `graph.edata`; of a heterogeneous graph, a dictionary of one for each edge type.
    """
    _install()
    found = {etype: edges_of(graph[etype]) for etype in graph.canonical_etypes}
    return next(iter(found.values())) if graph.is_homogeneous else found


@cache
def _install() -> None:
    operations.install()
    attention.install()
    batch_vector.install()
    layers.install()
    norms.install()
    refused.install()
    supergat.install()
    propagate.install()


def make_data(partition: PartitionData, graph: GraphShardManager) -> Data | HeteroData:
    """This worker's nodes and in-edges with their features, as `sar.pyg.load_partition` returns them."""
    edges = edge_index(graph)
    fields = {t: _fields(partition.node_features, f"{t}/") for t in graph.ntypes}
    original, kinds = partition.node_features.get(ORIG_ID), partition.node_features.get(NTYPE)
    if original is not None:
        for kind, own in enumerate(fields.values()):
            own[ORIG_ID] = original if kinds is None else original[kinds == kind]
    if isinstance(edges, DistributedEdgeIndex):
        data = Data(edge_index=edges, num_nodes=graph.num_nodes(), graph=graph)
        set_fields(data, fields[graph.ntypes[0]])
        _set_batch(data, graph.device)
        set_fields(data, _fields(graph.edata, ""), EDGE_NAMES)
        return data
    data = HeteroData(graph=graph)
    for ntype, values in fields.items():
        data[ntype].num_nodes = graph.num_nodes(ntype)
        set_fields(data[ntype], values)
        _set_batch(data[ntype], graph.device)
    for etype, index in edges.items():
        data[etype].edge_index = index
        set_fields(data[etype], _fields(graph.edges[etype].data, ""), EDGE_NAMES)
    return data


def set_fields(store: Any, fields: Mapping[str, Tensor], names: Mapping[str, str] = NODE_NAMES) -> None:
    """Set fields as attributes, under the names that they have here unless there are fields of these names.

    Fields of edges that are called as fields of the nodes in the same store get `edge_` before their name.
    """
    for name, values in fields.items():
        own = names.get(name, name)
        own = name if own in fields else own
        own = f"edge_{own}" if own in store else own
        store[own] = values.bool() if name in SPLIT else values  # DGL's files have bytes


def _set_batch(store: Any, device: torch.device) -> None:
    """Let the graphs of `batch`, which is one where there is none, have nodes on all workers."""
    whole = batch_vector.whole_graph(store.num_nodes, device)
    store.batch = batch_vector.batch_vector(store.batch) if "batch" in store else whole


def _fields(fields: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    hidden = (NID, EID, NTYPE, ETYPE)
    names = [name for name in fields if name.startswith(prefix) and "/" not in name[len(prefix) :]]
    return {name[len(prefix) :]: fields[name] for name in names if name[len(prefix) :] not in hidden}
