"""Real graphs of tests in `.npz` files, as `shared/data/README.md` describes them; the files are trusted."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from sar.common_tuples import SPLIT, StrPath
from sar.data.arrays import Array
from sar.partition.graph_source import ArrayEdges, GraphSource


def write_npz(graph: GraphSource, path: StrPath) -> None:
    """Write a homogeneous graph, whose fields are in memory, so that `read_npz` gives it back."""
    (num_nodes,), (node_data,) = graph.num_nodes.values(), graph.node_data.values()
    fields: dict[str, Any] = dict(node_data)  # Any: savez has a keyword that is no array
    src, dst = graph.ends()
    np.savez(path, src=src, dst=dst, num_nodes=np.int64(num_nodes), **fields)


def read_npz(path: StrPath) -> GraphSource:
    """A graph of one or several types; of several splits, the first."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    if "src" in arrays:
        ends = (arrays[end].astype(np.int64) for end in ("src", "dst"))
        num_nodes = int(arrays["num_nodes"])
        return GraphSource.homogeneous(*ends, num_nodes, _node_fields(arrays, num_nodes))
    counts = {key.split("/")[1]: int(arrays[key]) for key in arrays if key.startswith("num_nodes/")}
    edges = {}
    for name in sorted(key.split("/")[1] for key in arrays if key.startswith("edges/") and key.endswith("/src")):
        source, relation, destination = name.split(":")
        ends = (arrays[f"edges/{name}/{end}"].astype(np.int64) for end in ("src", "dst"))
        edges[source, relation, destination] = ArrayEdges(*ends)
    node_data = {}
    for ntype, count in counts.items():
        of_type = {key.split("/")[0]: value for key, value in arrays.items() if key.split("/")[1:] == [ntype]}
        node_data[ntype] = _node_fields(of_type, count)
    return GraphSource(counts, edges, node_data, {})


def _node_fields(arrays: Mapping[str, Array], num_nodes: int) -> dict[str, Array]:
    """Features, labels and masks among the arrays of one node type."""
    fields: dict[str, Array] = {}
    if "feat_data" in arrays:
        fields["feat"] = np.zeros(tuple(arrays["feat_shape"]), np.float32)
        rows = np.repeat(np.arange(num_nodes), np.diff(arrays["feat_indptr"]))
        fields["feat"][rows, arrays["feat_indices"]] = arrays["feat_data"]
    elif "feat" in arrays:
        fields["feat"] = arrays["feat"].astype(np.float32)
    if "label" in arrays:
        fields["label"] = arrays["label"].astype(np.int64)
    for mask in SPLIT:
        if mask in arrays:
            fields[mask] = arrays[mask] if arrays[mask].ndim == 1 else arrays[mask][0]
        elif (ids := arrays.get(mask.replace("_mask", "_idx"))) is not None:
            fields[mask] = np.isin(np.arange(num_nodes), ids)
    return fields
