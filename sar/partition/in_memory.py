"""Partitions a graph in memory: `dgl.distributed.partition_graph` with sar's methods and writer."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from sar.common_tuples import SPLIT, CanonicalEtype, StrPath
from sar.data.arrays import Array
from sar.errors import ConfigError
from sar.partition.assign.assigning import IN_EDGES, ORDERS, AssigningOptions, in_degrees
from sar.partition.graph_source import ONLY_TYPE, ArrayEdges, GraphSource, first_outside, logged_stages
from sar.partition.ingest.cleanup import clean_up
from sar.partition.ingest.features import fields_without_nan
from sar.partition.ingest.masks import check_splits, with_masks, with_split
from sar.partition.ingest.objects import as_array, from_object
from sar.partition.pipeline import run_partition
from sar.partition.write.write import PartitionReport, by_worker_0, part_sizes
from sar.partition.write.write_job import OutputOptions

Mapped = tuple[Tensor, Tensor] | tuple[dict[str, Tensor], dict[CanonicalEtype, Tensor]]

_MOST_KINDS = 64
_OF_SPLITS = {"train": SPLIT[0], "val": SPLIT[1], "valid": SPLIT[1], "test": SPLIT[2]}


def partition_graph(
    g: Any,
    graph_name: str,
    num_parts: int,
    out_path: StrPath,
    num_hops: int = 1,
    part_method: str = "metis",
    balance_ntypes: Any = None,
    balance_edges: bool | str = False,
    return_mapping: bool = False,
    num_trainers_per_machine: int = 1,
    objtype: str = "cut",
    graph_formats: str | Sequence[str] | None = None,
    use_graphbolt: bool = False,
    *,
    seed: int = 0,
    order: str = ORDERS[0],
    reshuffle: bool = True,
    split_idx: Mapping[str, Any] | None = None,
    allow_nan: bool = False,
) -> Mapped | None:
    """Partition a graph in memory, like `dgl.distributed.partition_graph`, with the same arguments.

    After `sar.initialize_comms` all workers call this together. Worker 0 does the work, and the others wait for up to
    `sar.Config.timeout` seconds. Parts may lack some or all types of nodes or edges. The graph is not changed.

    Args:
        g: a `DGLGraph`, a `Data` or `HeteroData` of PyTorch Geometric (with `edge_index` or `adj_t`), or the result of
            `sar.open_graph`.
        graph_name: name of the JSON file, `graph_name.json`.
        num_parts: P, from 1 to the number of nodes.
        out_path: directory to create. It must not exist, or be empty.
        num_hops: hops of the halo, at least 1, as in `sar.write_partitions`. Default 1.
        part_method: `metis` (default), `random`, or another method that `sar partition --help` lists.
        balance_ntypes: integer class of each node; every part gets about the same number of nodes of each class. (N,),
            in order of node types, or a dictionary by node type, (N_t,); a missing type is one class. Default None.
        balance_edges: also balance the in-edges of each edge type and, with `balance_ntypes`, of each class. The name
            of an edge feature, such as `train_mask`, balances its sum over in-edges. Default False.
        return_mapping: return original IDs. Default False.
        num_trainers_per_machine: T. Nodes are assigned to P T trainers, T consecutive trainers form a part, and nodes
            and edges get the feature `trainer_id`, for edges that of the destination. Default 1.
        objtype: must be `cut`.
        graph_formats: must be `coo` or None; DGL converts parts to other formats when it loads them.
        use_graphbolt: must be False.
        seed: random seed of the method. Default 0.
        order: order of the nodes of a part and type: `clusters` (default), in which clusters of the method are
            contiguous, so that sums use caches better, or `ids`, the order in the graph.
        reshuffle: must be True, as in DGL before 1.0: IDs of nodes and edges are contiguous in each part.
        split_idx: node IDs by `train`, `valid` (or `val`) and `test`, (K,) each or by node type, as from the Open Graph
            Benchmark's `get_idx_split()`; stored as `train_mask`, `val_mask` and `test_mask`.
        allow_nan: accept NaN and infinity in features. Default False.

    Returns:
        With `return_mapping`, the original IDs of nodes and edges in their new order: (N,) and (E,) int64, or
        dictionaries by node type and canonical edge type if there are several. Otherwise None.

    Raises:
        ConfigError: an argument is invalid or does not fit the graph, or the directory is not empty.
        PartitionError: a feature has NaN or infinity, or the disk is full.
    """
    trainers = num_trainers_per_machine
    graph_formats = [graph_formats] if isinstance(graph_formats, str) else graph_formats
    old = "; DGL before 1.0 had reshuffle before balance_ntypes, so name the arguments"
    for name, value, can, why in (
        ("num_parts", num_parts, isinstance(num_parts, SupportsIndex), "a whole number"),
        ("num_hops", num_hops, isinstance(num_hops, SupportsIndex), "a whole number"),
        ("balance_ntypes", balance_ntypes, not isinstance(balance_ntypes, bool), f"a kind for each node{old}"),
        ("balance_edges", balance_edges, isinstance(balance_edges, bool | np.bool_ | str), f"True or False{old}"),
        ("objtype", objtype, objtype == "cut", "'cut': methods minimise the edges that are cut"),
        ("graph_formats", graph_formats, set(graph_formats or ["coo"]) == {"coo"}, "'coo', which DGL converts"),
        ("use_graphbolt", use_graphbolt, not use_graphbolt, "False: parts are written as DGLGraphs"),
        ("num_trainers_per_machine", trainers, isinstance(trainers, SupportsIndex) and trainers >= 1, "1 or more"),
        ("reshuffle", reshuffle, reshuffle is True, "True: sar and DGL 1.0 or later read contiguous IDs only"),
    ):
        if not can:
            raise ConfigError(f"{name} is {value!r}; expected {why}.")
    graph = check_splits(from_object(g))
    if not allow_nan and not isinstance(g, GraphSource):  # for files, `open_graph` decides
        node_data, edge_data = fields_without_nan(graph.node_data), fields_without_nan(graph.edge_data)
        graph = replace(graph, node_data=node_data, edge_data=edge_data)
    if unknown := sorted(set(split_idx or ()) - _OF_SPLITS.keys()):
        raise ConfigError(f"split_idx has {unknown[0]!r}; expected node IDs by {', '.join(_OF_SPLITS)}.")
    lists = [(_OF_SPLITS[split], ids) for split, ids in (split_idx or {}).items()]
    graph = with_masks(graph, lists, lambda _, ids, ntype: _mask_of(ids, graph.num_nodes[ntype]))
    field = balance_edges if isinstance(balance_edges, str) else None
    balance = (IN_EDGES if field is None else f"{IN_EDGES}/{field}",) if balance_edges else ()
    kinds = _kinds(graph, balance_ntypes)
    if balance_edges and kinds:
        degrees = sum(in_degrees(graph, field).values())
        kinds |= {f"{IN_EDGES} of {kind}": nodes * degrees for kind, nodes in kinds.items()}
    _check_parts(graph, index(num_parts))
    options = AssigningOptions(index(num_parts) * trainers, part_method, seed, balance, kinds, order=order)
    output = OutputOptions(Path(out_path), graph_name, num_hops=num_hops)

    def partition() -> Array:
        assigned = run_partition(graph, options, output, logged_stages(), trainers=trainers).assigned
        place = np.zeros_like(assigned.part_of) if assigned.place is None else assigned.place
        return np.stack([assigned.part_of, place]).astype(np.int64, copy=False)

    call = "partitioning (sar.partition_graph), which all workers do together"
    part_of, place = by_worker_0(call, partition, (2, graph.total_nodes))
    if not return_mapping:
        return None
    places, parts = graph.by_type(place), graph.by_type(part_of)
    # Original IDs by new ones: nodes go by part and by place, edges by the part of their destination.
    nodes = {ntype: torch.from_numpy(np.lexsort((places[ntype], parts[ntype]))) for ntype in parts}
    edges = {
        etype: torch.from_numpy(parts.argsort(kind="stable")) for etype, parts in graph.by_destination(part_of).items()
    }
    alone = len(nodes) == len(edges) == 1
    return (next(iter(nodes.values())), next(iter(edges.values()))) if alone else (nodes, edges)


def training_graph(graph: GraphSource, seed: int = 0, *, undirected: bool = True) -> GraphSource:
    """Create a homogeneous graph for training: every edge in both directions, one self-loop at each node, and masks.

    Without masks, labelled nodes are split at random into 60, 20 and 20 %. The result is in memory, without edge
    features.
    """
    with tempfile.TemporaryDirectory() as scratch:
        graph = clean_up(replace(graph, edge_data={}), scratch, undirected=undirected, self_loops="add")
        graph = replace(graph, edges={ONLY_TYPE: ArrayEdges(*graph.ends())})
    (fields,) = graph.node_data.values()
    return graph if all(name in fields for name in SPLIT) else with_split(graph, seed=seed)


def divide(graph: GraphSource, out_dir: StrPath, name: str, num_parts: int) -> PartitionReport:
    """Partition a graph with METIS, balancing nodes and in-edges, for the examples and the demo.

    Creates the directory with `name.json` and `part0`, `part1`, ... `ConfigError` if the number of parts is invalid or
    the directory is not empty.
    """
    _check_parts(graph, num_parts)
    options = AssigningOptions(num_parts, "metis", balance=(IN_EDGES,))
    outcome = run_partition(graph, options, OutputOptions(Path(out_dir), name), logged_stages())
    return PartitionReport.of(outcome.json_file, part_sizes(outcome.report))


def _mask_of(split_ids: Any, num_nodes: int) -> Array:
    ids = as_array("split_idx", split_ids)
    is_list = ids.ndim == 1 and ids.dtype.kind in "iu"
    if not is_list or first_outside(np.ascontiguousarray(ids, np.int64), num_nodes) is not None:
        raise ConfigError(f"split_idx has others than IDs of the {num_nodes} nodes, (K,) from 0 on.")
    mask = np.zeros(num_nodes, np.bool_)
    mask[ids] = True
    return mask


def _check_parts(graph: GraphSource, num_parts: int) -> None:
    if not 1 <= num_parts <= graph.total_nodes:
        expected = f"expected 1 to {graph.total_nodes}"
        raise ConfigError(f"cannot divide {graph.total_nodes} nodes into {num_parts} parts; {expected}.")


def _kinds(graph: GraphSource, given: Any) -> dict[str, Array]:
    """The nodes of each kind, (N,) bool each; `given` is `balance_ntypes`."""
    spans = {ntype: (graph.first_node[ntype], count) for ntype, count in graph.num_nodes.items()}
    if given is not None and not isinstance(given, Mapping):
        spans, given = {"nodes": (0, graph.total_nodes)}, {"nodes": given}
    kinds: dict[str, Array] = {}
    for ntype, some in (given or {}).items():
        values = as_array(f"balance_ntypes of {ntype}", some)
        first, count = spans.get(ntype, (0, -1))
        if values.shape != (count,) or values.dtype.kind not in "biu":
            expected = {name: count for name, (_, count) in spans.items()}
            form = f"shape {values.shape} and type {values.dtype} for {ntype!r}"
            raise ConfigError(f"balance_ntypes has {form}; expected one integer per node: {expected}.")
        for value in np.unique(values)[: _MOST_KINDS + 1]:
            mine = kinds[f"{ntype} of kind {value}"] = np.zeros(graph.total_nodes, np.bool_)
            mine[first : first + count] = values == value
    if len(kinds) > _MOST_KINDS:
        raise ConfigError(f"balance_ntypes has more kinds of nodes than the limit of {_MOST_KINDS}; merge some.")
    return kinds
