"""Reads graphs of DGL and PyTorch Geometric in memory as a `GraphSource`.

Graphs are read by their attributes; neither package is imported.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sar.common_tuples import EID, NID, SPLIT, CanonicalEtype
from sar.data.arrays import Array
from sar.errors import ConfigError
from sar.partition.graph_source import ONLY_TYPE, ArrayEdges, GraphSource

_NO_FIELDS = ("adj_t", "edge_index", "num_nodes")


def from_object(graph: Any) -> GraphSource:
    """Convert a graph in memory to a `GraphSource`, without copies if its tensors are on the CPU.

    Args:
        graph: a `DGLGraph`; a `Data` or `HeteroData` of PyTorch Geometric with `edge_index`, or else `adj_t`, whose
            values become `edge_weight` unless all are 1; or a `GraphSource`, which is returned unchanged. Fields keep
            their names. Attributes that PyTorch Geometric assigns neither to nodes nor to edges are skipped with a
            warning. `ConfigError` for other types, an unknown number of nodes, and sparse fields.
    """
    if isinstance(graph, GraphSource):
        return graph
    if all(hasattr(graph, name) for name in ("canonical_etypes", "formats", "is_block")):
        return _from_dgl(graph)
    if all(hasattr(graph, name) for name in ("node_stores", "edge_stores")):
        return _from_stores(graph)
    found = f"{type(graph).__module__}.{type(graph).__qualname__}"
    raise ConfigError(
        f"the graph is a {found}; expected a DGLGraph, a Data or HeteroData of PyTorch Geometric, or what "
        "sar.open_graph returns."
    )


def _from_dgl(graph: Any) -> GraphSource:
    if graph.is_block:
        raise ConfigError("the graph is a block of sampled edges; expected a graph (dgl.block_to_graph makes one).")
    allowed = [name for names in graph.formats().values() for name in names]
    if "coo" not in allowed:
        raise ConfigError(f"the graph allows the formats {allowed} only; expected coo: call .formats(['coo']) on it.")
    edges, edge_data = {}, {}
    for etype in graph.canonical_etypes:
        src, dst = graph.edges(form="uv", order="eid", etype=etype)
        edges[etype] = ArrayEdges(as_array(f"{etype}", src), as_array(f"{etype}", dst))
        edge_data[etype] = _fields(":".join(etype), graph.edges[etype].data, (EID, "inner_edge"))
    node_data = {ntype: _fields(ntype, graph.nodes[ntype].data, (NID, "inner_node")) for ntype in graph.ntypes}
    return GraphSource({ntype: graph.num_nodes(ntype) for ntype in graph.ntypes}, edges, node_data, edge_data)


def _fields(kind: str, data: Mapping[str, Any], of_dgl: tuple[str, str]) -> dict[str, Array]:
    """The fields, except DGL's internal ones, which its `partition_graph` also skips."""
    return {name: as_array(f"{kind}/{name}", data[name]) for name in data if name not in of_dgl}


def _from_stores(graph: Any) -> GraphSource:
    """Convert the stores of PyTorch Geometric, one per type; a `Data` has one store for nodes and edges."""
    typed = hasattr(graph, "node_types")
    node_stores = dict(zip(graph.node_types if typed else ONLY_TYPE[:1], graph.node_stores, strict=True))
    edge_stores = dict(zip(graph.edge_types if typed else [ONLY_TYPE], graph.edge_stores, strict=True))
    kept: set[tuple[int, str]] = set()

    def attributes(kind: str, store: Any, is_one: Callable[[str], bool]) -> dict[str, Array]:
        names = [name for name in store if name not in _NO_FIELDS and is_one(name)]
        kept.update((id(store), name) for name in names)
        return {name: as_array(f"{kind}/{name}", store[name]) for name in names}

    num_nodes = {ntype: _num_nodes(ntype, store) for ntype, store in node_stores.items()}
    edges, weights = {}, {}
    for etype, store in edge_stores.items():
        edges[etype], weights[etype] = _edges(etype, store, num_nodes)
    node_data = {ntype: attributes(ntype, store, store.is_node_attr) for ntype, store in node_stores.items()}
    edge_data = {e: attributes(":".join(e), store, store.is_edge_attr) | weights[e] for e, store in edge_stores.items()}
    names = {name for store in graph.stores for name in store if (id(store), name) not in kept} - set(_NO_FIELDS)
    for ntype, store in node_stores.items():
        for name in ("x", "y", *SPLIT):
            left_over = name in store and (id(store), name) not in kept
            if left_over and (shape := getattr(store[name], "shape", ())) and shape[0] > 1:
                raise ConfigError(
                    f"'{name}' of type '{ntype}' has {shape[0]} rows; expected {num_nodes[ntype]}, one for each node "
                    "(num_nodes, or the rows of x)."
                )
    if names:
        left_out = ", ".join(sorted(names))
        warnings.warn(f"{left_out}: skipped, because they belong neither to nodes nor to edges.", stacklevel=4)
    return GraphSource(num_nodes, edges, node_data, edge_data)


def _num_nodes(ntype: str, store: Any) -> int:
    if (count := store.num_nodes) is None:
        raise ConfigError(f"the number of nodes of type '{ntype}' is not known; set its num_nodes.")
    return int(count)


def _edges(etype: CanonicalEtype, store: Any, num_nodes: Mapping[str, int]) -> tuple[ArrayEdges, dict[str, Array]]:
    """The edges of a type, and their weights if a matrix has them."""
    name = ":".join(etype)
    unknown = sorted({etype[0], etype[2]} - num_nodes.keys())
    if unknown:
        raise ConfigError(f"the edges {name} join nodes of types {unknown}, which are not there; set their num_nodes.")
    fields: dict[str, Array] = {}
    where = f"{name}/edge_index" if "edge_index" in store else f"{name}/adj_t"
    if "edge_index" in store:
        index = as_array(where, store["edge_index"])
        if index.ndim != 2 or len(index) != 2 or index.dtype.kind not in "iu":
            raise ConfigError(f"{where} has shape {index.shape} of {index.dtype}; expected (2, E) node IDs.")
        src, dst = index
    elif "adj_t" in store:
        dst, src, values = _entries(where, store["adj_t"])
        if values is not None and not (values == 1).all():
            fields["edge_weight"] = values
    else:
        raise ConfigError(f"the edges {name} have {sorted(store)}; expected edge_index, (2, E) node IDs, or adj_t.")
    return ArrayEdges(src, dst), fields


def _entries(name: str, matrix: Any) -> tuple[Array, Array, Array | None]:
    """Rows, columns and values, (E,) each, of a sparse matrix of torch or torch_sparse, which may have no values."""
    import torch

    if isinstance(matrix, torch.Tensor) and matrix.layout != torch.strided:
        matrix = matrix.to_sparse_coo()
        (row, col), values = matrix._indices(), matrix._values()  # without coalescing, to keep parallel edges
    elif hasattr(matrix, "coo"):
        row, col, values = matrix.coo()
    else:
        raise ConfigError(f"{name} is a {type(matrix).__qualname__}; expected a sparse matrix, as of T.ToSparseTensor.")
    if values is not None and values.dim() != 1:
        shape = tuple(values.shape)
        raise ConfigError(f"{name} has values of shape {shape}; expected numbers: give edge_index and edge_attr.")
    return as_array(name, row), as_array(name, col), None if values is None else as_array(name, values)


def as_array(name: str, values: Any) -> Array:
    """The values of a field as an array, without a copy for CPU tensors; `ConfigError` if numpy has no such dtype."""
    import torch

    if not isinstance(values, torch.Tensor):
        return np.asarray(values)
    form = f"of layout {values.layout}"
    if values.layout == torch.strided:
        try:
            return values.detach().cpu().resolve_conj().resolve_neg().numpy()
        except (TypeError, RuntimeError):
            form = f"{str(values.dtype).removeprefix('torch.')}, which numpy lacks"
    raise ConfigError(f"field '{name}' is {form}; expected a dense tensor of another type.")
