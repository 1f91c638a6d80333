"""Creates distributed graphs for users, and DGL graphs from distributed graphs.

Sampled layers become DGL's message flow graphs; pairs of nodes and subgraphs become ordinary graphs. The graph for
sampling has the layout of DGL's partitions: own nodes first, then the halo.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from sar.adapters.dgl.advice import missing_method
from sar.adapters.dgl.patched_layers import patch_if_imported
from sar.adapters.dgl.shim import require_dgl
from sar.comm import session
from sar.comm.collectives import exchange_tensors
from sar.comm.group import Group
from sar.comm.tiles import HaloPlan
from sar.comm.transport import Transport
from sar.common_tuples import NID, SPLIT, CanonicalEtype, PartitionData
from sar.core.build import build_structure
from sar.core.graph.edges import source_ids
from sar.core.graph.graph import GraphShardManager, make_graph
from sar.core.graph.mfg import Seeds, build_mfgs
from sar.core.relation import GraphLibrary, NodeSet, Relation, Structure
from sar.data.part_files import INNER_NODE
from sar.errors import GraphError
from sar.kernels import EdgeBlock
from sar.logging_setup import logger
from sar.nn.rows import fetch_rows
from sar.tensors.ids import to_offsets
from sar.tensors.views import to_device

Edges = Mapping[CanonicalEtype, tuple[Tensor, Tensor, Mapping[str, Tensor]]]

P = ParamSpec("P")
R = TypeVar("R")


def construct_full_graph(partition_data: PartitionData) -> GraphShardManager:
    """Create the distributed graph of a partitioned graph. All workers must call this together.

    Calls `patch_dgl` if DGL is imported, unless `Config.patch_dgl` is False.

    Args:
        partition_data: this worker's partition, from `load_dgl_partition_data` or created in memory.

    Returns:
        The graph, with the partition's edge features in `edata`. Node features remain in `partition_data`.

    Raises:
        PartitionError: the data is inconsistent, or does not match the number of workers.
        CommunicationError: another worker raised, or has a different graph.
    """
    patch_if_imported()
    logger.info("making the graph of this worker's partition")
    structure, features = build_structure(partition_data, session.current_group(), DGL)
    logger.info(
        "the graph is made: %d nodes, %d edges into them, %d nodes read from others",
        sum(structure.dst.counts.values()),
        sum(relation.num_edges for relation in structure.relations),
        sum(len(halo) for relation in structure.relations for halo in relation.halos),
    )
    return make_graph(structure, features, partition_data.partition_book)


def construct_mfgs(
    partition_data: PartitionData, seed_nodes: Seeds, n_layers: int, keep_seed_nodes: bool = True
) -> list[GraphShardManager]:
    """Create the message flow graphs of a model with `n_layers` layers. All workers must call this together.

    Degrees count the edges of the message flow graph on all workers. The first graph's `input_nodes` are the rows of
    this partition's features that the model reads. Output rows follow `seed_nodes`.

    Args:
        partition_data: this worker's partition.
        seed_nodes: nodes of this partition whose output is computed; may be empty. Either global IDs, (S,) integer, of
            all types together, or a dictionary from node type to row numbers within that type, {ntype: (S_type,)
            integer}, such as `{"paper": train_mask.nonzero().squeeze(1)}`.
        n_layers: number of layers, at least 1.
        keep_seed_nodes: if True (default), the sources of each layer begin with its destinations, as in DGL's blocks.
            If False, sources are only the nodes that the layer reads.

    Returns:
        One graph per layer, input layer first.

    Raises:
        GraphError: the seeds are not integers, belong to another partition or an unknown type, or repeat.
        PartitionError, CommunicationError: as in `construct_full_graph`.
    """
    patch_if_imported()
    return build_mfgs(partition_data, seed_nodes, n_layers, keep_seed_nodes, DGL)


def _on_the_cpu(make: Callable[P, R]) -> Callable[P, R]:
    """Make DGL create tensors on the CPU, regardless of torch's default device."""

    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.device("cpu"):
            return make(*args, **kwargs)

    return made


# -- samples


@_on_the_cpu
def make_block(nodes: Mapping[str, Tensor], num_dst: Mapping[str, int], edges: Edges) -> Any:
    """Create one layer as a `DGLBlock`, with `dgl.NID` on both sides and the edges' features.

    The structure is passed as CSC, which the forward reads; DGL derives the CSR of the backward. Edge IDs are passed as
    well, because without them DGL's float32 kernels cannot sum edge values.

    Args:
        nodes: global IDs of the sources of every type, (N_src,) int64, destinations first.
        edges: by type: (N_dst + 1,) offsets and (E,) positions of the sources, int64, and features, (E, ...) each.
    """
    dgl = require_dgl()
    block = dgl.create_block(
        {etype: ("csc", (indptr, src, torch.arange(len(src)))) for etype, (indptr, src, _) in edges.items()},
        num_src_nodes={ntype: len(ids) for ntype, ids in nodes.items()},
        num_dst_nodes=dict(num_dst),
    )
    for ntype, ids in nodes.items():
        block.srcnodes[ntype].data[NID] = ids
        block.dstnodes[ntype].data[NID] = ids[: num_dst[ntype]].clone()
    for etype, (_, _, fields) in edges.items():
        block.edges[etype].data.update(fields)
    return block


def make_local_graph(
    nodes: Mapping[str, Tensor],
    num_dst: Mapping[str, int] | None,
    edges: Edges,
    device: torch.device,
    order: Mapping[CanonicalEtype, Tensor] | None = None,
) -> GraphShardManager:
    """Like `make_block`, on any device: a graph of only this worker, because most builds of DGL support the CPU only.

    Without `num_dst` all nodes are sources and destinations. `order` is the position of each edge in the graph's order
    and in its features, (E,) int64, by type; None if they are equal.
    """
    src = _local_nodes({ntype: ids.to(device) for ntype, ids in nodes.items()})
    dst = src if num_dst is None else _local_nodes({t: ids[: num_dst[t]] for t, ids in src.ids.items()})
    device = next(iter(src.ids.values())).device  # with its number
    relations, features = [], []
    for etype, (indptr, cols, fields) in edges.items():
        counts, num_src, count = indptr.to(device).diff(), src.counts[etype[0]], len(cols)
        ends = torch.repeat_interleave(torch.arange(len(counts), device=device), counts, output_size=count)
        ids = None if order is None else order[etype].to(device)
        block = EdgeBlock.from_coo(cols.to(device), ends, num_src, len(counts), edge_ids=ids)
        halo = block.cols[:0]
        plan = HaloPlan(0, [halo], torch.zeros(1, 1, dtype=torch.int64, device="cpu"), num_src)
        positions, out_degrees = torch.arange(count, device=device), block.cols.bincount(minlength=num_src)
        sizes = num_src, len(counts), count
        relations.append(Relation(etype, [block], [halo], plan, *sizes, counts, out_degrees, positions))
        features.append({name: values.to(device) for name, values in fields.items()})
    total = sum(src.counts.values())
    structure = Structure(_alone(), device, [(0, total)], src, dst, relations, "of one worker", DGL)
    graph = make_graph(structure, features, None)
    for ntype in nodes:
        graph._frames.src[ntype][NID] = src.ids[ntype].clone()
        graph._frames.dst[ntype][NID] = dst.ids[ntype].clone()
    return graph


def _local_nodes(ids: dict[str, Tensor]) -> NodeSet:
    rows = {ntype: torch.arange(len(of_type), device=of_type.device) for ntype, of_type in ids.items()}
    return NodeSet(ids, rows, {ntype: len(of_type) for ntype, of_type in ids.items()})


@cache
def _alone() -> Group:
    """A group with only this worker, which needs no agreement."""
    return Group(Transport(0, 1))


@_on_the_cpu
def make_pair_graph(nodes: Mapping[str, Tensor], pairs: Edges, device: torch.device) -> Any:
    """Create a graph whose edges are pairs of nodes, with `dgl.NID` and edge features; on the CPU a `DGLGraph`.

    Args:
        nodes: global IDs of every type, (N,) int64.
        pairs: by type: (S,) positions of sources and destinations, int64, and features, (S, ...) each.
        device: device of the graph.
    """
    if device.type != "cpu":
        order = {etype: dst.argsort(stable=True) for etype, (_, dst, _) in pairs.items()}
        by_destination = {
            etype: (to_offsets(torch.bincount(dst, minlength=len(nodes[etype[2]]))), src[order[etype]], fields)
            for etype, (src, dst, fields) in pairs.items()
        }
        return make_local_graph(nodes, None, by_destination, device, order)
    ends = {etype: (src, dst) for etype, (src, dst, _) in pairs.items()}
    graph = require_dgl().heterograph(ends, {ntype: len(ids) for ntype, ids in nodes.items()})
    for ntype, ids in nodes.items():
        graph.nodes[ntype].data[NID] = ids
    for etype, (_, _, fields) in pairs.items():
        graph.edges[etype].data.update(fields)
    return graph


# -- a worker's edges


@_on_the_cpu
def make_sampling_graph(structure: Structure) -> Any:
    """Create a `DGLGraph` on the CPU for DGL's samplers, with this worker's nodes, in-edges and remote sources.

    Nodes of each type, (N_own + N_halo,), are own nodes in row order, then the halo in ascending order, with global IDs
    (`_ID`) and `inner_node`. Edges of each type are in the visible order.
    """
    read = {relation.etype: source_ids(structure, relation) for relation in structure.relations}
    halos = {ntype: ids[:0] for ntype, ids in structure.src.ids.items()}
    for (ntype, _, _), ids_by_part in read.items():
        remote = [ids for part, ids in enumerate(ids_by_part) if part != structure.group.rank]
        halos[ntype] = torch.cat([halos[ntype], *remote]).unique()
    edges = {}
    for relation in structure.relations:
        places = [torch.searchsorted(halos[relation.etype[0]], ids) + relation.num_src for ids in read[relation.etype]]
        places[structure.group.rank] = torch.arange(relation.num_src, device=structure.device)
        src = [place[block.cols.long()] for place, block in zip(places, relation.blocks, strict=True)]
        dst = [block.destinations(0, block.num_edges) for block in relation.blocks]
        edges[relation.etype] = (torch.cat(src).cpu(), torch.cat(dst).cpu())
    nodes = {ntype: torch.cat([ids, halos[ntype]]).cpu() for ntype, ids in structure.src.ids.items()}
    counts = {ntype: len(ids) for ntype, ids in nodes.items()}
    graph = require_dgl().heterograph(edges, num_nodes_dict=counts)
    for ntype, ids in nodes.items():
        data = graph.nodes[ntype].data
        data[NID] = ids
        data[INNER_NODE] = torch.arange(len(ids)) < structure.src.counts[ntype]
    return graph


DGL = GraphLibrary(make_sampling_graph, missing_method)
"""The functions of DGL that distributed graphs use."""


@_on_the_cpu
def local_subgraphs(graph: GraphShardManager, data: PartitionData, *, both_ends: bool = True) -> list[Any]:
    """Return a `dgl.DGLGraph` of each of this worker's partitions with its halo. All workers must call this together.

    A graph has the partition's nodes, all their edges, and then the halo: nodes of other partitions at these edges. An
    edge between two partitions is in both, so every node has all of its neighbors (Huang et al., "SDT-GNN", section
    III-B). Edges between halo nodes are missing. The features of halo nodes, and the edges out of this worker's
    partitions, are fetched here, once.

    Args:
        graph: from `construct_full_graph(data)`; its edge features are copied.
        data: this worker's partition data, with node features.
        both_ends: include edges out of the partition. If False, halo nodes have no in-edges. Default True.

    Returns:
        Graphs on the CPU, one per partition in the order of its nodes; if workers share a partition, or have none, one
        graph of the worker's nodes. Edges into the partition come first, in edge order. All node features are copied by
        name; `train_mask`, `val_mask` and `test_mask` are False on the halo. `_ID` holds global node and edge IDs, and
        `inner_node` is False on the halo.

    Raises:
        GraphError: for a message flow graph, or node features of another length.
        CommunicationError: another worker raised, or has different features.
    """
    with session.current_group().guard() as group:
        if graph.is_block:
            raise GraphError("A message flow graph has only some of the edges; give that of construct_full_graph.")
        group.agree(f"subgraphs of partitions, with {'all edges' if both_ends else 'in-edges'}")
        edges = {etype: _edges_here(graph, etype, both_ends) for etype in graph.canonical_etypes}
        ranges = data.part_ranges or [graph.node_ranges[group.rank]]
        own = {ntype: graph.node_ids(ntype).cpu() for ntype in graph.ntypes}
        parts = [_in_subgraph(own, edges, start, end, both_ends) for start, end in ranges]
        known = dict(own)  # global IDs of nodes whose features are available, this worker's first
        for ntype, ids in own.items():
            nodes = torch.cat([part.nodes[ntype].data[NID] for part in parts])
            known[ntype] = torch.cat([ids, nodes[~torch.isin(nodes, ids)].unique()])
        rows = [{ntype: _places(ids, part.nodes[ntype].data[NID]) for ntype, ids in known.items()} for part in parts]
        for key in sorted(key for key in data.node_features if "/" in key):
            ntype, _, name = key.partition("/")
            values = data.node_features[key].detach()
            values = torch.cat([values, fetch_rows(graph, values, known[ntype][len(own[ntype]) :], ntype)]).cpu()
            for part, places in zip(parts, rows, strict=True):
                column = values[places[ntype]]
                if name in SPLIT:
                    column[~part.nodes[ntype].data[INNER_NODE]] = False
                part.nodes[ntype].data[name] = column
    return parts


def _edges_here(
    graph: GraphShardManager, etype: CanonicalEtype, both_ends: bool
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the edges into this worker's nodes in visible order; with `both_ends`, then its edges to other workers.

    Returns global IDs of both ends, (E,) int64, and features, (E, ...) each, on the CPU. A collective call.
    """
    structure, relation = graph._structure, graph._relation(etype)
    blocks, own = relation.blocks, structure.dst.ids[etype[2]]

    def with_others(pieces: Sequence[Tensor]) -> Tensor:
        """Append other workers' values of edges out of this worker's nodes to the worker's values."""
        if not both_ends:
            return torch.cat([*pieces]).cpu()
        sent = [piece[:0] if part == structure.group.rank else piece for part, piece in enumerate(pieces)]
        device = session.comm_device()
        received = exchange_tensors([to_device(piece.detach().contiguous(), device) for piece in sent])
        return torch.cat([piece.cpu() for piece in (*pieces, *received)])

    sizes = [block.num_edges for block in blocks]
    fields = sorted(graph.edges[etype].data.items())
    return (
        with_others([ids[b.cols.long()] for ids, b in zip(source_ids(structure, relation), blocks, strict=True)]),
        with_others([own[block.destinations(0, block.num_edges)] for block in blocks]),
        {name: with_others(values.detach().split(sizes)) for name, values in fields},
    )


def _in_subgraph(own: Mapping[str, Tensor], edges: Edges, start: int, end: int, both_ends: bool) -> Any:
    """The graph of the nodes with global IDs in [start, end), with these IDs; `own` are those of the worker's nodes."""

    def inside(ids: Tensor) -> Tensor:
        return (ids >= start) & (ids < end)

    chosen: dict[CanonicalEtype, Tensor] = {}
    found = {ntype: [ids[inside(ids)]] for ntype, ids in own.items()}
    for etype, (src, dst, _) in edges.items():
        into = inside(dst)
        out = (inside(src) & ~into) if both_ends else into[:0]
        chosen[etype] = torch.cat([into.nonzero().squeeze(1), out.nonzero().squeeze(1)])
        for ntype, ids in ((etype[0], src[chosen[etype]]), (etype[2], dst[chosen[etype]])):
            found[ntype].append(ids[~inside(ids)])
    nodes = {ntype: torch.cat([ids, torch.cat(halo).unique()]) for ntype, (ids, *halo) in found.items()}
    numbered = {
        (source, name, target): (_places(nodes[source], src[rows]), _places(nodes[target], dst[rows]))
        for ((source, name, target), (src, dst, _)), rows in zip(edges.items(), chosen.values(), strict=True)
    }
    part = require_dgl().heterograph(numbered, num_nodes_dict={ntype: len(ids) for ntype, ids in nodes.items()})
    for ntype, ids in nodes.items():
        part.nodes[ntype].data.update({NID: ids, INNER_NODE: inside(ids)})
    for etype, rows in chosen.items():
        part.edges[etype].data.update({name: values[rows] for name, values in edges[etype][2].items()})
    return part


def _places(known: Tensor, wanted: Tensor) -> Tensor:
    """Return the positions of IDs in a list of distinct IDs, in any order, that contains them all."""
    ascending, order = known.sort()
    return order[torch.searchsorted(ascending, wanted)]
