"""Data of PyTorch Geometric from distributed graphs and from sampled batches.

[Note: batches of one edge index]
A sampled layer draws edges into all nodes found so far. `NeighborLoader` draws at each node only once, when it is
found. So we drop each layer's edges into nodes that were found in earlier layers (nearer to the seeds), and nodes that
no other edge reaches. All layers number nodes in the order in which they were found, seeds first.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from sar.adapters.pyg import attention, batch_vector, layers, norms, products, propagate, refused
from sar.adapters.pyg import operations as operations  # gives an edge index its handlers
from sar.adapters.pyg.edge_index import DistributedEdgeIndex, edges_of
from sar.adapters.pyg.guarded import replace
from sar.common_tuples import EID, ETYPE, NTYPE, ORIG_ID, SPLIT, CanonicalEtype
from sar.core.graph.graph import GraphShardManager
from sar.errors import GraphError

NODE_NAMES = {"feat": "x", "label": "y", NTYPE: "node_type"}
EDGE_NAMES = {"feat": "edge_attr", "aggregator_weight": "edge_norm", ETYPE: "edge_type"}
"""PyTorch Geometric's names of DGL's usual features."""

Fields = Mapping[str, Mapping[str, Tensor]]

for _part in (attention, layers, products, refused, propagate):  # also lets layers run on empty batches
    replace(_part.REPLACED)


class PartData(Data):  # type: ignore[misc]  # PyTorch Geometric has no types
    """A worker's part of a graph with one type of nodes and edges."""

    @property
    def adj_t(self) -> Any:
        """`edge_index`, for scripts that call layers with `adj_t`. Raises a `GraphError` if edges have weights."""
        return _unweighted(self._store)


class PartHeteroData(HeteroData):  # type: ignore[misc]
    """A worker's part of a graph with several types."""

    @property
    def adj_t_dict(self) -> dict[CanonicalEtype, Any]:
        """Like `PartData.adj_t`, by edge type."""
        return {etype: _unweighted(store) for etype, store in self.edge_items()}


def _unweighted(store: Any) -> Any:
    if "edge_weight" in store:
        raise GraphError("adj_t has no weights on a partition; pass edge_index, and beside it edge_weight.")
    return store.edge_index


def edge_index(graph: GraphShardManager) -> DistributedEdgeIndex | dict[CanonicalEtype, DistributedEdgeIndex]:
    """Return the edges into this worker's nodes, as the `edge_index` of layers of PyTorch Geometric.

    Layers then compute on the whole graph, across workers; see docs/pyg.md. Calls are collective.

    Args:
        graph: a graph from `construct_full_graph`, in any mode, or from `construct_mfgs`.

    Returns:
        (2, E_i) int64, in the order of `graph.edata`; for a heterogeneous graph, a dictionary by edge type.
    """
    graph._structure.group.model_checks.add(norms.refuse_unconverted)
    found = {etype: edges_of(graph[etype]) for etype in graph.canonical_etypes}
    return next(iter(found.values())) if graph.is_homogeneous else found


def make_data(node_features: Mapping[str, Tensor], graph: GraphShardManager) -> Data | HeteroData:
    """This worker's nodes and in-edges with their features, as `sar.pyg.load_partition` returns them."""
    edges: Any = edge_index(graph)
    stored = node_features.items()
    fields = {t: {k.removeprefix(f"{t}/"): x for k, x in stored if k.startswith(f"{t}/")} for t in graph.ntypes}
    original, kinds = node_features.get(ORIG_ID), node_features.get(NTYPE)
    if original is not None:
        for kind, own in enumerate(fields.values()):
            own[ORIG_ID] = original if kinds is None else original[kinds == kind]
    single = isinstance(edges, DistributedEdgeIndex)
    alone = {"edge_index": edges, "num_nodes": graph.num_nodes()} if single else {}
    data: Any = (PartData if single else PartHeteroData)(graph=graph, **alone)
    for ntype, values in fields.items():
        store = data if single else data[ntype]
        store.num_nodes = graph.num_nodes(ntype)
        set_fields(store, values)
        # Graphs have nodes on all workers. Without `batch`, all nodes belong to one graph.
        whole = batch_vector.whole_graph(store.num_nodes, graph.device)
        store.batch = batch_vector.batch_vector(store.batch) if "batch" in store else whole
    for etype in graph.canonical_etypes:
        store = data if single else data[etype]
        store.edge_index = edges if single else edges[etype]
        set_fields(store, {name: x for name, x in graph.edges[etype].data.items() if name != EID}, EDGE_NAMES)
    return data


def set_fields(store: Any, fields: Mapping[str, Tensor], names: Mapping[str, str] = NODE_NAMES) -> None:
    """Set features as attributes, and rename `feat`, `label` and so on unless the new name is taken.

    Features whose name is taken, and original IDs of edges in a batch, get the prefix `node_` or `edge_`.
    """
    of_edges = names is EDGE_NAMES
    for name, values in fields.items():
        own = names.get(name, name)
        own = name if own in fields else own
        own = f"edge_{own}" if of_edges and own == ORIG_ID and "n_id" in store else own
        while own in store:  # a field must not take the place of another
            own = f"edge_{own}" if of_edges else f"node_{own}"
        store[own] = values.bool() if name in SPLIT else values  # DGL's files have bytes


# -- mini-batches as PyTorch Geometric's loaders make them


class LayerEdges(NamedTuple):
    """Edges of one layer and type: positions of both ends, (E,) int64, and fields, (E, ...) each."""

    src: Tensor
    dst: Tensor
    fields: Mapping[str, Tensor]


class SeedPairs(NamedTuple):
    """Seed edges of one type, and negative pairs drawn for them."""

    numbers: Tensor  # positions of the seeds among all seeds of the loader, (S,) int64
    positive: tuple[Tensor, Tensor]  # positions of sources and of destinations, (S,) int64 each
    negative: tuple[Tensor, Tensor] | None  # likewise, (M,)
    labels: Tensor | None  # labels of the seeds, (S, ...)


def make_batch(
    nodes: Mapping[str, Tensor],
    num_dst: Sequence[Mapping[str, int]],
    edges: Sequence[Mapping[CanonicalEtype, LayerEdges]],
    inputs: Fields,
    outputs: Fields,
) -> Data | HeteroData:
    """Create a batch with `n_id`, `e_id` and `batch_size`; see [Note: batches of one edge index].

    Args:
        nodes: global IDs of the input layer's sources of every type, (N,) int64, in the order in which they were found.
        num_dst: number of destinations of every type in each layer, input layer first.
        edges: edges of each layer, by type.
        inputs: features of `nodes`, by type and name.
        outputs: features of the seeds, which are the first `batch_size` nodes, by type and name.
    """
    found = {etype: _once(etype, num_dst, edges) for etype in edges[0]}
    seeds = num_dst[-1]
    reached = {ntype: torch.arange(len(ids), device="cpu") < seeds[ntype] for ntype, ids in nodes.items()}
    for (source, _, target), (src, dst, _) in found.items():
        reached[source][src] = True
        reached[target][dst] = True
    number = {ntype: mask.cumsum(0) - 1 for ntype, mask in reached.items()}
    single = len(nodes) == 1 and len(found) == 1
    data: Any = Data() if single else HeteroData()
    for ntype, ids in nodes.items():
        store, mask = data if single else data[ntype], reached[ntype]
        store.n_id = ids[mask]
        store.num_nodes = len(store.n_id)
        store.batch_size = seeds[ntype]
        set_fields(store, {name: rows[mask] for name, rows in inputs.get(ntype, {}).items()})
        set_fields(store, outputs.get(ntype, {}))
    for etype, (src, dst, fields) in found.items():
        store = data if single else data[etype]
        store.edge_index = torch.stack([number[etype[0]][src], number[etype[2]][dst]])
        store.e_id = fields[EID]
        set_fields(store, {name: rows for name, rows in fields.items() if name != EID}, EDGE_NAMES)
    return data


def add_seed_pairs(data: Data | HeteroData, pairs: Mapping[CanonicalEtype, SeedPairs], *, triplets: int) -> None:
    """Add the seed edges of a batch, of every type with seeds on any worker, under the names of `LinkNeighborLoader`.

    triplets: number of negative pairs per seed, for triplets of a source and two destinations; 0 for other formats.
    """
    stores: Any = data
    for store in [data] if isinstance(data, Data) else data.node_stores:
        del store["batch_size"]  # `LinkNeighborLoader` sets none
    for (source, name, target), (numbers, (src, dst), negative, labels) in pairs.items():
        single = isinstance(data, Data)
        store = data if single else stores[source, name, target]
        store.input_id = numbers
        if triplets and negative is not None:
            at_source, at_target = (data, data) if single else (stores[source], stores[target])
            at_source.src_index, at_target.dst_pos_index = src, dst
            at_target.dst_neg_index = negative[1].view(len(src), triplets).squeeze(-1)
            continue
        if negative is not None:
            labels = torch.ones(len(src), device="cpu") if labels is None else labels
            labels = torch.cat([labels, labels.new_zeros(len(negative[0]), *labels.shape[1:])])
            src, dst = torch.cat([src, negative[0]]), torch.cat([dst, negative[1]])
        store.edge_label_index = torch.stack([src, dst])
        if labels is not None:
            store.edge_label = labels


def _once(
    etype: CanonicalEtype, num_dst: Sequence[Mapping[str, int]], edges: Sequence[Mapping[CanonicalEtype, LayerEdges]]
) -> LayerEdges:
    """The edges of one type, from the seeds outwards: each destination keeps the draws of the layer that found it."""
    kept, found = [], 0
    for layer in reversed(range(len(edges))):
        src, dst, fields = edges[layer][etype]
        new = dst >= found
        kept.append(LayerEdges(src[new], dst[new], {name: rows[new] for name, rows in fields.items()}))
        found = num_dst[layer][etype[2]]
    names = kept[0].fields
    joined = {name: torch.cat([each.fields[name] for each in kept]) for name in names}
    return LayerEdges(torch.cat([each.src for each in kept]), torch.cat([each.dst for each in kept]), joined)
