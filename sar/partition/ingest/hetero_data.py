"""A whole heterogeneous graph in memory, as it is before partitioning, and its `.npz` file."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from os import PathLike

import numpy as np

from sar.common_tuples import CanonicalEtype
from sar.errors import ConfigError
from sar.partition.graph_data import Array, GraphData, edge_ends, node_fields, read_arrays


@dataclass(frozen=True)
class HeteroGraphData:
    """A directed graph of several node and edge types, with node fields.

    num_nodes: N_t by node type.
    edges: (source, destination) by (source type, relation, destination type), int64, (E_r,) each.
    node_data: by node type the fields of `GraphData.node_data`, (N_t, ...) each.
    """

    num_nodes: dict[str, int]
    edges: dict[CanonicalEtype, tuple[Array, Array]]
    node_data: dict[str, dict[str, Array]]

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> "HeteroGraphData":
        """Check arrays named as in the `.npz` file and bring them to the dtypes above.

        Args:
            arrays: `num_nodes/NTYPE`; `edges/NTYPE:RELATION:NTYPE/src` and `.../dst`; where known, `NAME/NTYPE` with
                the names of `GraphData.from_arrays`, or `train_idx`, `val_idx` and `test_idx`, node IDs, for the masks.

        Raises:
            ConfigError: an array is missing, has another length than its type, or names an unknown type.
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
            source, relation, destination = [*name.split(":"), "", ""][:3]
            if name.count(":") != 2 or "/" in name or not {source, destination} <= num_nodes.keys():
                raise ConfigError(f"edge type '{name}' is not NTYPE:RELATION:NTYPE of the types {sorted(num_nodes)}.")
            if f"edges/{name}/dst" not in arrays:
                raise ConfigError(f"edges/{name}/dst is missing.")
            src, dst = (arrays[f"edges/{name}/{end}"] for end in ("src", "dst"))
            edges[source, relation, destination] = edge_ends(src, dst, num_nodes[source], num_nodes[destination])
        node_data = {ntype: node_fields(_of_type(arrays, ntype, count), count) for ntype, count in num_nodes.items()}
        return cls(num_nodes, edges, node_data)

    def with_reverse_edges(self) -> "HeteroGraphData":
        """The graph with, for every relation r, a relation `r reversed` of its edges the other way round."""
        reverse = {(d, f"{r} reversed", s): (dst, src) for (s, r, d), (src, dst) in self.edges.items()}
        return replace(self, edges=self.edges | reverse)

    def without(self, relations: Collection[str]) -> "HeteroGraphData":
        """The graph without some edge types, each named `NTYPE:RELATION:NTYPE`.

        Raises:
            ConfigError: one is not there.
        """
        names = {":".join(etype): etype for etype in self.edges}
        unknown = sorted(set(relations) - names.keys())
        if unknown:
            raise ConfigError(f"there are no edge types {unknown}; expected some of {sorted(names)}.")
        return replace(self, edges={e: self.edges[e] for name, e in names.items() if name not in relations})


def read_any_npz(path: str | PathLike[str], split: int = 0) -> GraphData | HeteroGraphData:
    """Read a graph of either kind from an `.npz` file; nothing in the file is unpickled.

    Args:
        path: file with the arrays of `GraphData.from_arrays` or `HeteroGraphData.from_arrays`.
        split: which split to take where a homogeneous graph has several.

    Raises:
        ConfigError: the file is missing, damaged or does not fit the schema.
    """
    arrays = read_arrays(path)
    try:
        if any(key.startswith("edges/") for key in arrays):
            return HeteroGraphData.from_arrays(arrays)
        return GraphData.from_arrays(arrays, split)
    except ConfigError as error:
        raise ConfigError(f"'{path}': {error}") from error


def _of_type(arrays: Mapping[str, Array], ntype: str, num_nodes: int) -> dict[str, Array]:
    """The arrays of one node type under their names without it, and masks for lists of node IDs."""
    mine = {key.split("/")[0]: value for key, value in arrays.items() if key.split("/")[1:] == [ntype]}
    for part in ("train", "val", "test"):
        if f"{part}_idx" in mine:
            mine[f"{part}_mask"] = np.isin(np.arange(num_nodes), mine[f"{part}_idx"])
    return mine
