"""Message flow graphs: for each layer only the edges that its output at the seed nodes depends on.

[Note: from seeds to inputs]
We build layers from the last to the first. The last layer's destinations are the seeds. We look up its edges in the
partition's shards, which are sorted by destination. Each worker sends the others the IDs of their nodes that these
edges read. The sources of a worker are its own destinations, followed by all other nodes that any worker reads; they
are the destinations of the layer before. So the cost of a layer is its own size and a mask over the nodes. The full
graph is not indexed.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from sar.comm import session
from sar.common_tuples import CanonicalEtype, PartitionData
from sar.core.build import Halos, Shard, WorkerGraph, agree_on_graph, check_graph, connect, join_features
from sar.core.graph.edges import expand_runs
from sar.core.graph.graph import GraphShardManager, make_graph
from sar.core.relation import GraphLibrary, NodeSet, Structure, digest
from sar.errors import GraphError
from sar.kernels import EdgeBlock
from sar.tensors.ids import find_sorted, number_distinct
from sar.tensors.lasting import lasting

Rows = dict[str, Tensor]  # rows within each node type, int64
Seeds = Tensor | Mapping[str, Tensor]


@lasting
def build_mfgs(
    partition_data: PartitionData,
    seed_nodes: Seeds,
    n_layers: int,
    keep_seed_nodes: bool,
    library: GraphLibrary | None,
) -> list[GraphShardManager]:
    """The message flow graphs of a model with `n_layers` layers, the input layer first: see `construct_mfgs`."""
    with session.current_group().guard() as group:
        graph = agree_on_graph(check_graph(partition_data, group))
        group.agree(f"construct_mfgs of {n_layers} layers, keep_seed_nodes {keep_seed_nodes}")
        if n_layers < 1:
            raise GraphError(f"construct_mfgs got n_layers={n_layers}; expected at least 1.")
        rows: Rows = {}  # of the seeds, in their order
        if isinstance(seed_nodes, Mapping):
            counts = graph.nodes.counts
            if not set(seed_nodes) <= set(counts):
                names = sorted(seed_nodes)
                raise GraphError(f"seed_nodes has the node types {names}; expected some of {list(counts)}.")
            for ntype, count in counts.items():
                seeds = seed_nodes.get(ntype, torch.empty(0, dtype=torch.int64, device="cpu"))
                rows[ntype] = checked_nodes(f"seed_nodes[{ntype!r}]", seeds, (0, count), "rows", graph.device)
        else:
            own = partition_data.node_ranges[graph.group.rank]
            seeds = checked_nodes("seed_nodes", seed_nodes, own, "global IDs", graph.device)
            for ntype, ids in graph.nodes.ids.items():
                rows_of_type, is_of_type = find_sorted(ids, seeds)
                rows[ntype] = rows_of_type[is_of_type]
        layers: list[GraphShardManager] = []
        for depth in range(n_layers):
            structure, features, rows = _make_layer(graph, rows, keep_seed_nodes, depth, library)
            layers.insert(0, make_graph(structure, features, partition_data.partition_book))
    return layers


_OF_A_MASK = {
    torch.uint8: " Call .bool() on a mask.",
    torch.bool: " Of a mask, pass the rows by node type: {ntype: mask.nonzero().squeeze(1)}.",
}


def checked_nodes(
    what: str,
    nodes: Tensor,
    allowed: tuple[int, int],
    kind: str,
    device: torch.device,
    whole: str = "this worker's partition",
) -> Tensor:
    """Check that nodes are distinct integers, (S,), in the range `allowed`; return a copy as int64.

    Args:
        what: name of the argument, for errors.
        kind: kind of the numbers for errors, such as "global IDs".
        whole: set that the nodes belong to, for errors.
    """
    nodes = torch.as_tensor(nodes, device=device)
    if nodes.dim() != 1 or (nodes.numel() and nodes.dtype not in (torch.int64, torch.int32)):
        hint = _OF_A_MASK.get(nodes.dtype, "")
        raise GraphError(
            f"{what} are {nodes.dtype} of shape {tuple(nodes.shape)}; expected integer {kind}, (S,).{hint}"
        )
    nodes = nodes.to(torch.int64, copy=True)
    foreign = nodes[(nodes < allowed[0]) | (nodes >= allowed[1])]
    if len(foreign):
        raise GraphError(
            f"{len(foreign)} of {what}, such as {int(foreign[0])}, are not of {whole}, which has the {kind} "
            f"[{allowed[0]}, {allowed[1]}) there; pass {kind} from there."
        )
    if len(nodes.unique()) < len(nodes):
        raise GraphError(f"{len(nodes) - len(nodes.unique())} of {what} are given twice; pass each once.")
    return nodes


class _LayerEdges(NamedTuple):
    """The edges of one relation in a layer; lists are by source partition."""

    cols: list[Tensor]  # the edges' sources: rows of this partition's nodes, or positions in `halos`
    dst: list[Tensor]  # positions of the edges' destinations among the layer's
    features: dict[str, Tensor]  # edge features, (E, ...) each
    halos: Halos


def _make_layer(
    graph: WorkerGraph, rows: Rows, keep_seeds: bool, depth: int, library: GraphLibrary | None
) -> tuple[Structure, list[dict[str, Tensor]], Rows]:
    """Build a layer with destinations `rows`; return its structure, its edge features, and the rows of its sources."""
    edges = {etype: _find_edges(graph, etype, graph.nodes.ids[etype[2]][rows[etype[2]]]) for etype in graph.shards}
    sources: Rows = {}  # nodes that any worker reads: the destinations if they are kept, then the others, ascending
    for ntype, own in rows.items():
        is_read = torch.zeros(graph.nodes.counts[ntype], dtype=torch.bool, device=graph.device)
        for etype, of_relation in edges.items():
            for read in (of_relation.cols[graph.group.rank], *of_relation.halos.read_by) if etype[0] == ntype else ():
                is_read[read.long()] = True
        first = own if keep_seeds else own[:0]
        is_read[first] = False
        sources[ntype] = torch.cat([first, is_read.nonzero().squeeze(1)])
    counts = [
        *map(len, sources.values()),
        *map(len, rows.values()),
        *(sum(map(len, layer_edges.dst)) for layer_edges in edges.values()),
    ]
    totals = torch.tensor(graph.group.gather_numbers(counts, "counts of a message flow graph"), device="cpu").sum(0)
    src_counts, dst_counts, edge_counts = (some.tolist() for some in totals.split([len(rows), len(rows), len(edges)]))
    relations = []
    for (etype, of_relation), num_edges_global in zip(edges.items(), edge_counts, strict=True):
        chosen, num_dst = sources[etype[0]], len(rows[etype[2]])
        # Positions of the partition's nodes among the sources of the layer.
        number = torch.full((graph.nodes.counts[etype[0]],), -1, dtype=torch.int32, device=graph.device)
        number[chosen] = torch.arange(len(chosen), dtype=torch.int32, device=graph.device)
        blocks, offset = [], 0
        for part, (cols, destinations) in enumerate(zip(of_relation.cols, of_relation.dst, strict=True)):
            is_own = part == graph.group.rank
            num_src = len(chosen) if is_own else len(of_relation.halos.read[part])
            columns = number[cols.long()] if is_own else cols
            blocks.append(EdgeBlock.from_coo(columns, destinations, num_src, num_dst, edge_offset=offset))
            offset += len(destinations)
        halos = of_relation.halos._replace(read_by=[number[read.long()] for read in of_relation.halos.read_by])
        total = totals[list(rows).index(etype[0])]
        relations.append(connect(graph, etype, blocks, halos, int(total), num_edges_global, of_relation.features))
    src, dst = (
        NodeSet({t: graph.nodes.ids[t][index] for t, index in side.items()}, side, dict(zip(side, counts, strict=True)))
        for side, counts in ((sources, src_counts), (rows, dst_counts))
    )
    signature = digest(f"{graph.signature} {depth} layers below the last {totals.tolist()}")
    structure = Structure(graph.group, graph.device, [*graph.data.node_ranges], src, dst, relations, signature, library)
    return structure, [of_relation.features for of_relation in edges.values()], sources


def _find_edges(graph: WorkerGraph, etype: CanonicalEtype, destinations: Tensor) -> _LayerEdges:
    """Look up the edges into `destinations`, (N_dst,) global IDs, and exchange halo lists with all workers."""
    cols, dst, layer_shards, halos, counts = [], [], [], [], []
    for part, shard in enumerate(graph.shards[etype]):
        begin = torch.searchsorted(shard.dst, destinations)
        end = torch.searchsorted(shard.dst, destinations, right=True)
        edges, owner = expand_runs(begin, end)
        first, last = graph.data.node_ranges[part]
        sources = shard.src[edges] - first
        if part == graph.group.rank:
            column = graph.index(sources)
            halo = degrees = column.new_empty(0)
        else:
            halo, degrees, column = number_distinct(sources, last - first)
        cols.append(column)
        dst.append(owner)
        layer_shards.append(Shard(sources, owner, {name: values[edges] for name, values in shard.features.items()}))
        halos.append(halo)
        counts.append(degrees)
    return _LayerEdges(cols, dst, join_features(layer_shards), Halos.exchanged(graph, halos, counts, etype))
