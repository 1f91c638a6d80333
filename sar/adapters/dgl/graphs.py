"""What makes distributed graphs, for users, and what makes graphs of DGL's own of them.

Sampled layers become DGL's message flow graphs, pairs of nodes and subgraphs its graphs. A worker's edges become one to
sample from, laid out as DGL's partitions are: own nodes first, then the halo.
"""

from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sar.adapters.dgl.patched_layers import with_patched_dgl
from sar.adapters.dgl.shim import require_dgl
from sar.comm import session
from sar.comm.group import Group
from sar.comm.halo_plan import HaloPlan
from sar.common_tuples import NID, SPLIT, CanonicalEtype, PartitionData
from sar.core.build import build_structure
from sar.core.graph import mfg
from sar.core.graph.edges import source_ids
from sar.core.graph.graph import GraphShardManager, make_graph
from sar.core.relation import NodeSet, Relation, Structure
from sar.id_slices import count_ids
from sar.kernels import EdgeBlock
from sar.logging_setup import logger
from sar.nn.rows import fetch_rows
from sar.storage.part_files import INNER_NODE

Edges = Mapping[CanonicalEtype, tuple[Tensor, Tensor, Mapping[str, Tensor]]]

P = ParamSpec("P")
R = TypeVar("R")

construct_mfgs = with_patched_dgl(mfg.construct_mfgs)


@with_patched_dgl
def construct_full_graph(partition_data: PartitionData) -> GraphShardManager:
    """Make the distributed graph of a partitioned graph; called by all workers together.

    Calls `patch_dgl` where DGL is imported, unless `Config.patch_dgl` is False.

    Args:
        partition_data: this worker's partition, from `load_dgl_partition_data` or made in memory.

    Returns:
        The graph, with the partition's edge features in `edata`. Node features stay in `partition_data`.

    Raises:
        PartitionError: where the data contradicts itself or the number of workers.
        CommunicationError: where another worker raised, or holds another graph.
    """
    logger.info("making the graph of this worker's partition")
    structure, features = build_structure(partition_data, session.current_group(), make_sampling_graph)
    logger.info(
        "the graph is made: %d nodes, %d edges into them, %d nodes read from others",
        sum(structure.dst.counts.values()),
        sum(relation.num_edges for relation in structure.relations),
        sum(len(halo) for relation in structure.relations for halo in relation.halos),
    )
    return make_graph(structure, features, partition_data.partition_book)


def _on_the_cpu(make: Callable[P, R]) -> Callable[P, R]:
    """What DGL makes is on the CPU, whatever torch's default device is."""

    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.device("cpu"):
            return make(*args, **kwargs)

    return made


# -- what is sampled


@_on_the_cpu
def make_block(nodes: Mapping[str, Tensor], num_dst: Mapping[str, int], edges: Edges) -> Any:
    """One layer as a `DGLBlock`, with `dgl.NID` on both sides and the edges' fields.

    The structure goes in as CSC, which the forward reads; DGL makes the CSR of the backward from it by counting. Edge
    IDs go with it: without them DGL's kernels for float32 cannot sum edge values.

    Args:
        nodes: global IDs of the sources of every type, (N_src,) int64, destinations first.
        edges: by type: (N_dst + 1,) offsets, (E,) positions of the sources, int64 both, and fields, (E, ...) each.
    """
    dgl = require_dgl()
    block = dgl.create_block(
        {etype: ("csc", (indptr, src, torch.arange(len(src)))) for etype, (indptr, src, _) in edges.items()},
        num_src_nodes={ntype: len(ids) for ntype, ids in nodes.items()},
        num_dst_nodes=dict(num_dst),
    )
    for ntype, ids in nodes.items():
        block.srcnodes[ntype].data[NID] = ids
        block.dstnodes[ntype].data[NID] = ids[: num_dst[ntype]]
    for etype, (_, _, fields) in edges.items():
        block.edges[etype].data.update(fields)
    return block


def make_local_graph(
    nodes: Mapping[str, Tensor], num_dst: Mapping[str, int] | None, edges: Edges, device: torch.device
) -> GraphShardManager:
    """As `make_block`, on a device: a graph of this worker alone, because most builds of DGL are for the CPU only.

    Without `num_dst` all nodes are sources and destinations, as of `make_subgraph`.
    """
    src = _local_nodes({ntype: ids.to(device) for ntype, ids in nodes.items()})
    dst = src if num_dst is None else _local_nodes({t: ids[: num_dst[t]] for t, ids in src.ids.items()})
    device = next(iter(src.ids.values())).device  # with its number
    relations, features = [], []
    for etype, (indptr, cols, fields) in edges.items():
        counts, num_src, count = indptr.to(device).diff(), src.counts[etype[0]], len(cols)
        ends = torch.repeat_interleave(torch.arange(len(counts), device=device), counts, output_size=count)
        block = EdgeBlock.from_coo(cols.to(device), ends, num_src, len(counts))
        halo = block.cols[:0]
        plan = HaloPlan(0, [halo], torch.zeros(1, 1, dtype=torch.int64, device="cpu"), num_src)
        order, out_degrees = torch.arange(count, device=device), count_ids(block.cols, num_src)
        sizes = num_src, len(counts), count
        relations.append(Relation(etype, [block], [halo], plan, *sizes, counts, out_degrees, order))
        features.append({name: values.to(device) for name, values in fields.items()})
    total = sum(src.counts.values())
    structure = Structure(_alone(), device, [(0, total)], src, dst, relations, "of one worker")
    graph = make_graph(structure, features, None)
    for ntype in nodes:
        graph.srcnodes[ntype].data[NID] = src.ids[ntype]
        graph.dstnodes[ntype].data[NID] = dst.ids[ntype]
    return graph


def _local_nodes(ids: dict[str, Tensor]) -> NodeSet:
    rows = {ntype: torch.arange(len(of_type), device=of_type.device) for ntype, of_type in ids.items()}
    return NodeSet(ids, rows, {ntype: len(of_type) for ntype, of_type in ids.items()})


@cache
def _alone() -> Group:
    """A group of this worker, which nobody has to be told of."""
    return session.group_of_processes(dist.HashStore(), 0, 1)


@_on_the_cpu
def make_pair_graph(nodes: Mapping[str, Tensor], pairs: Edges) -> Any:
    """A `DGLGraph` with pairs of nodes as edges, with `dgl.NID` and the edges' fields.

    Args:
        nodes: global IDs of every type, (N,) int64.
        pairs: by type: (S,) positions of sources and of destinations, int64, and fields, (S, ...) each.
    """
    ends = {etype: (src, dst) for etype, (src, dst, _) in pairs.items()}
    graph = require_dgl().heterograph(ends, {ntype: len(ids) for ntype, ids in nodes.items()})
    for ntype, ids in nodes.items():
        graph.nodes[ntype].data[NID] = ids
    for etype, (_, _, fields) in pairs.items():
        graph.edges[etype].data.update(fields)
    return graph


@_on_the_cpu
def make_subgraph(
    nodes: Tensor, indptr: Tensor, src: Tensor, features: Mapping[str, Tensor], edge_fields: Mapping[str, Tensor]
) -> Any:
    """A `DGLGraph` of one type, as CSC, with fields of nodes and edges.

    Args:
        nodes: global IDs, (N,) int64, which become `dgl.NID`.
        indptr: (N + 1,) offsets of the nodes' in-edges, int64.
        src: (E,) positions of their sources, int64.
    """
    graph = require_dgl().graph(("csc", (indptr, src, torch.arange(len(src)))), num_nodes=len(nodes))
    graph.ndata.update({NID: nodes, **features})
    graph.edata.update(edge_fields)
    return graph


# -- a worker's edges


@_on_the_cpu
def make_sampling_graph(structure: Structure) -> Any:
    """A `DGLGraph` on the CPU, where DGL samples, of this worker's nodes, the remote ones that it reads, and its edges.

    Nodes of each type, (N_own + N_halo,): own ones in the order of their rows, then the halo, ascending, with global
    IDs (`_ID`) and `inner_node`. Edges of each type in the visible order.
    """
    read = {relation.etype: source_ids(structure, relation) for relation in structure.relations}
    halos = {ntype: ids[:0] for ntype, ids in structure.src.ids.items()}
    for (ntype, _, _), ids_by_part in read.items():
        remote = [ids for part, ids in enumerate(ids_by_part) if part != structure.part]
        halos[ntype] = torch.cat([halos[ntype], *remote]).unique()
    edges = {}
    for relation in structure.relations:
        places = [torch.searchsorted(halos[relation.etype[0]], ids) + relation.num_src for ids in read[relation.etype]]
        places[structure.part] = torch.arange(relation.num_src, device=structure.device)
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


@_on_the_cpu
def local_subgraphs(graph: GraphShardManager, data: PartitionData) -> list[Any]:
    """A `dgl.DGLGraph` of each of this worker's partitions and its halo; called by all workers together.

    Each has the partition's nodes, then the sources of edges into them that belong elsewhere (the halo), and all edges
    into the partition's nodes, in visible order. Halo nodes have no in-edges: a second layer sees of them what the
    first made of their own features. Features of halo nodes are fetched here, once.

    Args:
        graph: of `construct_full_graph(data)`, with the edge fields to take over.
        data: this worker's, with node features.

    Returns:
        On the CPU, one for each partition in the order of its nodes; where workers share a partition, or have none, one
        of the worker's nodes. All node features by their names; `train_mask`, `val_mask` and `test_mask` are False on
        the halo. Also `_ID`, the global node and edge IDs, and `inner_node`, which is False on the halo.

    Raises:
        GraphError: for a message flow graph, or node features of another length.
        CommunicationError: where another worker raised, or has other features.
    """
    group = session.current_group()
    with group.guard():
        whole = graph.sampling_graph
        ranges = data.part_ranges or [graph.node_ranges[group.rank]]
        parts = [_in_subgraph(whole, start, end) for start, end in ranges]
        for key in sorted(key for key in data.node_features if "/" in key):
            ntype, _, name = key.partition("/")
            values = data.node_features[key].detach()
            fetched = fetch_rows(graph, values, whole.nodes[ntype].data[NID][graph.num_nodes(ntype) :], ntype)
            values = torch.cat([values, fetched]).cpu()
            for part, rows in parts:
                column = values[rows[ntype]]
                if name in SPLIT:
                    column[~part.nodes[ntype].data[INNER_NODE]] = False
                part.nodes[ntype].data[name] = column
    return [part for part, _ in parts]


def _in_subgraph(whole: Any, start: int, end: int) -> tuple[Any, dict[str, Tensor]]:
    """All edges into the nodes with global IDs in [start, end), and by type the rows in `whole` of its nodes."""
    inner = {t: (whole.nodes[t].data[NID] >= start) & (whole.nodes[t].data[NID] < end) for t in whole.ntypes}
    read = {ntype: torch.zeros_like(own) for ntype, own in inner.items()}
    edges, chosen = {}, {}
    for etype in whole.canonical_etypes:
        src, dst = whole.edges(etype=etype, order="eid")
        chosen[etype] = inner[etype[2]][dst].nonzero().squeeze(1)
        edges[etype] = src[chosen[etype]], dst[chosen[etype]]
        read[etype[0]][edges[etype][0]] = True
    rows, place = {}, {}
    for ntype, own in inner.items():
        rows[ntype] = torch.cat([own.nonzero().squeeze(1), (read[ntype] & ~own).nonzero().squeeze(1)])
        place[ntype] = torch.empty(len(own), dtype=torch.int64)
        place[ntype][rows[ntype]] = torch.arange(len(rows[ntype]))
    renumbered = {etype: (place[etype[0]][src], place[etype[2]][dst]) for etype, (src, dst) in edges.items()}
    part = require_dgl().heterograph(renumbered, num_nodes_dict={ntype: len(ids) for ntype, ids in rows.items()})
    for ntype, ids in rows.items():
        part.nodes[ntype].data[NID] = whole.nodes[ntype].data[NID][ids]
        part.nodes[ntype].data[INNER_NODE] = inner[ntype][ids]
    for etype, ids in chosen.items():
        part.edges[etype].data.update({name: values[ids] for name, values in whole.edges[etype].data.items()})
    return part, rows
