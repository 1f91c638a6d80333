"""Graphs in `.npz` files, or in arrays named as in these, as a `GraphSource` in memory."""

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from sar.common_tuples import SPLIT, StrPath
from sar.data.arrays import Array
from sar.data.partition_json import parse_edge_type
from sar.errors import ConfigError
from sar.partition.graph_source import ArrayEdges, GraphSource, find_outside, first_outside


def read_npz(path: StrPath, split: int | None = None) -> GraphSource:
    """Read a graph from an `.npz` file with the arrays of `graph_of_arrays`.

    Nothing is unpickled. `ConfigError` if the file is missing, damaged or holds objects.
    """
    try:
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file '{path}'.") from error
    except (OSError, EOFError, ValueError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"'{path}' cannot be read as an .npz file of plain arrays: {error}") from error
    try:
        return graph_of_arrays(arrays, split)
    except ConfigError as error:
        raise ConfigError(f"'{path}': {error}") from error


def write_npz(graph: GraphSource, path: StrPath) -> None:
    """Write a homogeneous graph, whose fields are in memory, so that `read_npz` gives it back."""
    (num_nodes,), (node_data,) = graph.num_nodes.values(), graph.node_data.values()
    fields: dict[str, Any] = dict(node_data)  # Any: savez has a keyword that is no array
    src, dst = graph.ends()
    np.savez(path, src=src, dst=dst, num_nodes=np.int64(num_nodes), **fields)


def graph_of_arrays(arrays: Mapping[str, Array], split: int | None = None) -> GraphSource:
    """Check the arrays of a graph, or raise `ConfigError`.

    Args:
        arrays: of a homogeneous graph `src`, `dst`, (E,) each, and `num_nodes`; if known, `feat`, (N, F), or its CSR
            parts `feat_data`, `feat_indices`, `feat_indptr`, `feat_shape`; `label`, (N,), -1 for none; and the three
            masks, (N,). Of a heterogeneous one `num_nodes/NTYPE`, `edges/NTYPE:RELATION:NTYPE/src` and `.../dst`; if
            known, `NAME/NTYPE` with the names above, or `train_idx`, `val_idx` and `test_idx`, node IDs, for the
            masks.
        split: row to take if masks hold several splits, (S, N). Default: the first, with a note.

    Returns:
        The graph, with IDs and labels as int64, features as float32 and masks as bool.
    """
    if any(key.startswith("edges/") for key in arrays):
        return _typed_graph(arrays)
    missing = [key for key in ("src", "dst", "num_nodes") if key not in arrays]
    if missing:
        raise ConfigError(f"a graph needs the arrays src, dst and num_nodes; found {sorted(arrays)}, not {missing}.")
    num_nodes = int(arrays["num_nodes"])
    src, dst = edge_ends(arrays["src"], arrays["dst"], num_nodes, num_nodes)
    graph = GraphSource.homogeneous(src, dst, num_nodes, _node_fields(arrays, num_nodes, split or 0))
    several = [len(arrays[key]) for key in SPLIT if key in arrays and arrays[key].ndim > 1]
    if split is not None and not several:
        raise ConfigError(f"split {split} was asked for; expected masks of several splits, (S, N).")
    taken = split is None and max(several, default=1) > 1
    note = "the first of {} splits was taken; --mask-column chooses another."
    return replace(graph, notes=[note.format(max(several))] if taken else [])


def _typed_graph(arrays: Mapping[str, Array]) -> GraphSource:
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
    node_data = {ntype: _node_fields(_of_type(arrays, ntype, count), count) for ntype, count in num_nodes.items()}
    return GraphSource(num_nodes, edges, node_data, {})


def _of_type(arrays: Mapping[str, Array], ntype: str, num_nodes: int) -> dict[str, Array]:
    """The arrays of one node type under their names without it, and masks for lists of node IDs."""
    found = {key.split("/")[0]: value for key, value in arrays.items() if key.split("/")[1:] == [ntype]}
    for name in ("train", "val", "test"):
        if f"{name}_idx" in found:
            found[f"{name}_mask"] = mask_of_ids(f"{name}_idx/{ntype}", found[f"{name}_idx"], num_nodes)
    return found


def mask_of_ids(what: str, nodes: Array, num_nodes: int) -> Array:
    """The mask, (N,) bool, of a list of nodes; `ConfigError`, with its name, if it has other things than their IDs."""
    is_list = nodes.ndim == 1 and nodes.dtype.kind in "iu"
    if not is_list or first_outside(np.ascontiguousarray(nodes, np.int64), num_nodes) is not None:
        raise ConfigError(f"{what} has others than IDs of the {num_nodes} nodes, (K,) from 0 on.")
    mask = np.zeros(num_nodes, np.bool_)
    mask[nodes] = True
    return mask


def edge_ends(src: Array, dst: Array, num_sources: int, num_destinations: int) -> tuple[Array, Array]:
    """The ends of edges as int64, (E,) each; `ConfigError` if they differ in length, or one is no node."""
    given = [np.asarray(ids) for ids in (src, dst)]
    src, dst = (np.ascontiguousarray(ids, dtype=np.int64) for ids in given)
    if any(ids.dtype.kind == "f" and (ids != whole).any() for ids, whole in zip(given, (src, dst), strict=True)):
        raise ConfigError("src or dst has numbers that are not whole; expected IDs of nodes.")
    if src.ndim != 1 or src.shape != dst.shape:
        raise ConfigError(f"src and dst have shapes {src.shape} and {dst.shape}; expected (E,) for both.")
    if (found := find_outside(src, dst, (num_sources, num_destinations))) is not None:
        raise ConfigError(f"of edge {found[0]} (from 0), {found[1]}")
    return src, dst


def _node_fields(arrays: Mapping[str, Array], num_nodes: int, split: int = 0) -> dict[str, Array]:
    """The fields of nodes among the arrays of `graph_of_arrays`; `ConfigError` if the length of one is another."""
    fields = {}
    if "feat_data" in arrays:
        fields["feat"] = _dense_features(arrays)
    elif "feat" in arrays:
        fields["feat"] = np.asarray(arrays["feat"], dtype=np.float32)
    if "label" in arrays:
        if arrays["label"].dtype.kind == "f" and np.isnan(arrays["label"]).any():
            raise ConfigError("labels are NaN for some nodes; expected integers, -1 for nodes without a label.")
        fields["label"] = np.asarray(arrays["label"], dtype=np.int64)
    for key in SPLIT:
        if key in arrays:
            masks = np.asarray(arrays[key])
            if not np.isin(masks, (0, 1)).all():
                raise ConfigError(f"'{key}' has other values than True and False, or 1 and 0; expected a mask.")
            masks = masks.astype(np.bool_)
            if masks.ndim > 1 and not 0 <= split < len(masks):
                raise ConfigError(f"split {split} of '{key}' was asked for; it has splits 0 to {len(masks) - 1}.")
            fields[key] = masks[split] if masks.ndim > 1 else masks
    for key, value in fields.items():
        if value.ndim != (2 if key == "feat" else 1) or len(value) != num_nodes:
            expected = f"({num_nodes}, F)" if key == "feat" else f"({num_nodes},)"
            raise ConfigError(f"node field '{key}' has shape {value.shape}; expected {expected}, a row per node.")
    return fields


def _dense_features(arrays: Mapping[str, Array]) -> Array:
    """Dense (N, F) features from their CSR parts."""
    missing = [f"feat_{part}" for part in ("indices", "indptr", "shape") if f"feat_{part}" not in arrays]
    if missing:
        raise ConfigError(f"sparse features lack {missing}; expected feat_data, feat_indices, feat_indptr, feat_shape.")
    values, columns, starts = (arrays[f"feat_{part}"] for part in ("data", "indices", "indptr"))
    n_rows, n_columns = (int(n) for n in arrays["feat_shape"])
    lengths = np.diff(starts)
    fits = len(starts) == n_rows + 1 and len(values) == len(columns) == lengths.sum() and (lengths >= 0).all()
    if not fits or (columns.size and not 0 <= columns.min() <= columns.max() < n_columns):
        raise ConfigError(f"the sparse features do not fit their shape ({n_rows}, {n_columns}).")
    dense = np.zeros((n_rows, n_columns), dtype=np.float32)
    dense[np.repeat(np.arange(n_rows), lengths), columns] = values
    return dense
