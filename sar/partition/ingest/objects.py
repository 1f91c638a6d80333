"""Graphs in memory: those of DGL and PyTorch Geometric as a `GraphSource`, `.npz` files, and data sets by name.

Graphs of packages are read by their attributes; neither is imported.
"""

import pickle
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sar.adapters.dgl.datasets import DGL_DATASETS, load_dgl_dataset
from sar.common_tuples import EID, NID, SPLIT, CanonicalEtype, StrPath
from sar.data.arrays import Array
from sar.data.part_files import parse_edge_type
from sar.errors import ConfigError
from sar.partition.graph_data import GraphData, edge_ends, node_fields, read_arrays
from sar.partition.graph_source import ArrayEdges, GraphSource

ONLY_TYPE: CanonicalEtype = ("_N", "_E", "_N")
_NO_FIELDS = ("adj_t", "edge_index", "num_nodes")
_OF_SPLITS = {"train": SPLIT[0], "val": SPLIT[1], "valid": SPLIT[1], "test": SPLIT[2]}


def from_object(graph: Any) -> GraphSource:
    """A graph that some package has in memory as a `GraphSource`, without a copy where its tensors are on the CPU.

    Args:
        graph: a `DGLGraph`; a `Data` or `HeteroData` of PyTorch Geometric with `edge_index`, or else `adj_t`, whose
            values become `edge_weight` unless all are 1; a graph of `sar.partition.graph_data`; or a `GraphSource`,
            which stays as it is. Fields keep their names. What a `Data` holds that PyTorch Geometric takes neither for
            an attribute of nodes nor of edges is left out, with a warning. `ConfigError` for anything else, an unknown
            number of nodes, and sparse fields.
    """
    if isinstance(graph, GraphSource):
        return graph
    if isinstance(graph, GraphData):
        edges = ArrayEdges(graph.src, graph.dst)
        return GraphSource({"_N": graph.num_nodes}, {ONLY_TYPE: edges}, {"_N": graph.node_data}, {})
    if all(hasattr(graph, name) for name in ("canonical_etypes", "formats", "is_block")):
        return _from_dgl(graph)
    if all(hasattr(graph, name) for name in ("node_stores", "edge_stores")):
        return _from_stores(graph)
    found = f"{type(graph).__module__}.{type(graph).__qualname__}"
    raise ConfigError(
        f"the graph is a {found}; expected a DGLGraph, a Data or HeteroData of PyTorch Geometric, what "
        "sar.open_graph returns, or a GraphData of sar.partition.graph_data."
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
    """The fields but for DGL's own, which its `partition_graph` leaves out as well."""
    return {name: as_array(f"{kind}/{name}", data[name]) for name in data if name not in of_dgl}


def _from_stores(graph: Any) -> GraphSource:
    """From the stores of PyTorch Geometric, one for each type; a `Data` has one, of nodes and edges together."""
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
    if names:
        left_out = ", ".join(sorted(names))
        warnings.warn(f"{left_out}: left out, as they are no attributes of nodes or edges.", stacklevel=4)
    return GraphSource(num_nodes, edges, node_data, edge_data)


def _num_nodes(ntype: str, store: Any) -> int:
    if (count := store.num_nodes) is None:
        raise ConfigError(f"the number of nodes of type '{ntype}' is not known; set its num_nodes.")
    return int(count)


def _edges(etype: CanonicalEtype, store: Any, num_nodes: Mapping[str, int]) -> tuple[ArrayEdges, dict[str, Array]]:
    """The edges of a type, and their weights where a matrix has them."""
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
    try:
        return ArrayEdges(*edge_ends(src, dst, num_nodes[etype[0]], num_nodes[etype[2]])), fields
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _entries(name: str, matrix: Any) -> tuple[Array, Array, Array | None]:
    """Rows, columns and values, (E,) each, of a sparse matrix of torch, or of torch_sparse, which may lack values."""
    if isinstance(matrix, torch.Tensor) and matrix.layout != torch.strided:
        matrix = matrix.to_sparse_coo()
        (row, col), values = matrix._indices(), matrix._values()  # as they are: entries of the same place stay apart
    elif hasattr(matrix, "coo"):
        row, col, values = matrix.coo()
    else:
        raise ConfigError(f"{name} is a {type(matrix).__qualname__}; expected a sparse matrix, as of T.ToSparseTensor.")
    if values is not None and values.dim() != 1:
        shape = tuple(values.shape)
        raise ConfigError(f"{name} has values of shape {shape}; expected numbers: give edge_index and edge_attr.")
    return as_array(name, row), as_array(name, col), None if values is None else as_array(name, values)


def with_masks(graph: GraphSource, split_idx: Mapping[str, Any]) -> GraphSource:
    """The graph with masks for lists of nodes, as `partition_graph` has them; `ConfigError` where they do not fit."""
    node_data = {ntype: dict(fields) for ntype, fields in graph.node_data.items()}
    for split, ids in split_idx.items():
        if split not in _OF_SPLITS:
            raise ConfigError(f"split_idx has {split!r}; expected node IDs by {', '.join(_OF_SPLITS)}.")
        by_type = ids if isinstance(ids, Mapping) else dict.fromkeys(graph.num_nodes, ids)
        if not by_type.keys() <= graph.num_nodes.keys() or (by_type is not ids and len(by_type) > 1):
            raise ConfigError(f"split_idx[{split!r}] has to be by node type; expected some of {list(graph.num_nodes)}.")
        for ntype, of_type in by_type.items():
            count, mask = graph.num_nodes[ntype], _OF_SPLITS[split]
            nodes = as_array(f"split_idx[{split!r}]", of_type)
            are_ids = nodes.ndim == 1 and nodes.dtype.kind in "iu"
            if not are_ids or (nodes.size and not 0 <= nodes.min() <= nodes.max() < count):
                raise ConfigError(f"split_idx[{split!r}] has others than IDs of the {count} nodes, (K,) from 0 on.")
            if mask in node_data.setdefault(ntype, {}):
                raise ConfigError(f"the graph has a {mask} already, and split_idx makes one; give either.")
            node_data[ntype][mask] = np.isin(np.arange(count), nodes)
    return replace(graph, node_data=node_data)


def as_array(name: str, values: Any) -> Array:
    """The values of a field, of a tensor on the CPU without a copy; `ConfigError` where numpy has nothing like it."""
    if not isinstance(values, torch.Tensor):
        return np.asarray(values)
    form = f"of layout {values.layout}"
    if values.layout == torch.strided:
        try:
            return values.detach().cpu().resolve_conj().resolve_neg().numpy()
        except (TypeError, RuntimeError):
            form = f"{str(values.dtype).removeprefix('torch.')}, which numpy lacks"
    raise ConfigError(f"field '{name}' is {form}; expected a dense tensor of another type.")


def load_dataset(name: str, folder: StrPath | None = None, split: int = 0) -> GraphData | GraphSource:
    """Load a graph with one class per node; only an `.npz` file may hold a heterogeneous one.

    Args:
        name: an `.npz` file; or `cora` for `cora.npz` in `folder`; or, where there is no such file, a name known to
            `dgl.data` (`cora`, `reddit`, ...) or to the Open Graph Benchmark (`ogbn-arxiv`, ...), which are downloaded
            at first use.
        folder: where `.npz` files lie and downloads are kept; None for the packages' own defaults.

    `ConfigError` where the name is unknown, the download failed, or the graph is of another kind.
    """
    if name.endswith(".npz"):
        return read_any_npz(name, split)
    if folder is not None and (file := Path(folder) / f"{name}.npz").exists():
        return read_any_npz(file, split)
    key = name.lower()
    if key.startswith("ogbn-"):
        return _through("ogb", name, lambda: _ogb_arrays(key, folder), split)
    key = key.replace("-", "_")
    if key in DGL_DATASETS:
        return _through("dgl.data", name, lambda: load_dgl_dataset(key, None if folder is None else str(folder)), split)
    where = f"no {name}.npz in '{folder}', and " if folder is not None else ""
    raise ConfigError(
        f"unknown data set '{name}': {where}neither a path that ends in .npz, nor an ogbn- name, nor one of "
        f"{', '.join(sorted(DGL_DATASETS))}."
    )


def read_any_npz(path: StrPath, split: int = 0) -> GraphData | GraphSource:
    """Read a graph from an `.npz` file, with the arrays of `GraphData.from_arrays` or `typed_graph`."""
    arrays = read_arrays(path)
    try:
        if any(key.startswith("edges/") for key in arrays):
            return typed_graph(arrays)
        return GraphData.from_arrays(arrays, split)
    except ConfigError as error:
        raise ConfigError(f"'{path}': {error}") from error


def typed_graph(arrays: Mapping[str, Array]) -> GraphSource:
    """Check arrays named as in the `.npz` file of a heterogeneous graph, and bring them to the dtypes of `GraphData`.

    They are `num_nodes/NTYPE`; `edges/NTYPE:RELATION:NTYPE/src` and `.../dst`; where known, `NAME/NTYPE` with the names
    of `GraphData.from_arrays`, or `train_idx`, `val_idx` and `test_idx`, node IDs, for the masks. `ConfigError` where
    one is missing, has another length than its type, or names an unknown type.
    """
    num_nodes = {key.removeprefix("num_nodes/"): int(arrays[key]) for key in arrays if key.startswith("num_nodes/")}
    relations = {key[len("edges/") : -len("/src")] for key in arrays if key[:6] == "edges/" and key[-4:] == "/src"}
    if not num_nodes or not relations:
        raise ConfigError(f"expected num_nodes/NTYPE and edges/NTYPE:RELATION:NTYPE/src; found {sorted(arrays)}.")
    unusable = sorted(ntype for ntype in num_nodes if "/" in ntype or ":" in ntype)
    if unusable:
        raise ConfigError(f"node types {unusable} have a slash or a colon in their names; rename them.")
    edges = {}
    for name in sorted(relations):
        etype = parse_edge_type(name)
        if etype is None or "/" in name or not {etype[0], etype[2]} <= num_nodes.keys():
            raise ConfigError(f"edge type '{name}' is not NTYPE:RELATION:NTYPE of the types {sorted(num_nodes)}.")
        if f"edges/{name}/dst" not in arrays:
            raise ConfigError(f"edges/{name}/dst is missing.")
        src, dst = (arrays[f"edges/{name}/{end}"] for end in ("src", "dst"))
        edges[etype] = ArrayEdges(*edge_ends(src, dst, num_nodes[etype[0]], num_nodes[etype[2]]))
    node_data = {ntype: node_fields(_of_type(arrays, ntype, count), count) for ntype, count in num_nodes.items()}
    return GraphSource(num_nodes, edges, node_data, {})


def _of_type(arrays: Mapping[str, Array], ntype: str, num_nodes: int) -> dict[str, Array]:
    """The arrays of one node type under their names without it, and masks for lists of node IDs."""
    found = {key.split("/")[0]: value for key, value in arrays.items() if key.split("/")[1:] == [ntype]}
    for name in ("train", "val", "test"):
        if f"{name}_idx" in found:
            ids = found[f"{name}_idx"]
            if ids.dtype.kind not in "iu" or (ids.size and not 0 <= ids.min() <= ids.max() < num_nodes):
                raise ConfigError(f"{name}_idx/{ntype} has others than IDs of the {num_nodes} nodes, 0 and above.")
            found[f"{name}_mask"] = np.isin(np.arange(num_nodes), ids)
    return found


def _through(package: str, name: str, load: Callable[[], Mapping[str, Array]], split: int) -> GraphData:
    """Load through a package and turn its errors into one that says what to do."""
    try:
        return GraphData.from_arrays(load(), split)
    except ImportError as error:
        raise ConfigError(f"data set '{name}' needs the package {package}, which does not import: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"data set '{name}' from {package}: {error}") from error
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"data set '{name}' could not be loaded through {package}: {error}. Without a network, name a folder that "
            f"holds {name}.npz, or an .npz file itself."
        ) from error


def _ogb_arrays(name: str, folder: StrPath | None) -> Mapping[str, Array]:
    """A graph of the Open Graph Benchmark (Hu et al., 2020), as the arrays of `GraphData.from_arrays`."""
    from ogb.nodeproppred import NodePropPredDataset

    root = Path("dataset" if folder is None else folder)
    cache = root / name.replace("-", "_") / "processed" / "data_processed"
    if cache.exists():
        raise ConfigError(f"'{cache}' is a pickle, which is not read; delete it, and ogb reads its raw files again.")
    dataset = NodePropPredDataset(name=name, root=str(root))
    cache.unlink(missing_ok=True)  # just written, and of no use: torch.load does not read it back
    graph, labels = dataset[0]
    split = dataset.get_idx_split()
    if "edge_index" not in graph:
        raise ConfigError("the graph is heterogeneous; expected one node type and one edge type.")
    if labels.shape[1] != 1:
        raise ConfigError(f"nodes have {labels.shape[1]} labels each; expected one class.")
    num_nodes = int(graph["num_nodes"])
    arrays = {"src": graph["edge_index"][0], "dst": graph["edge_index"][1], "num_nodes": np.int64(num_nodes)}
    if graph.get("node_feat") is not None:
        arrays["feat"] = graph["node_feat"]
    arrays["label"] = np.nan_to_num(labels[:, 0], nan=-1)
    for key, ours in (("train", "train_mask"), ("valid", "val_mask"), ("test", "test_mask")):
        arrays[ours] = np.isin(np.arange(num_nodes), split[key])
    return arrays
