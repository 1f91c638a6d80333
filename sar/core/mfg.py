"""Message flow graphs: for each layer only the edges that its output at the seed nodes depends on.

[Note: from seeds to inputs]
The last layer's destinations are the seeds. Its edges are found by walking the full graph's blocks at these rows only;
what the edges read of other partitions is asked of their owners; and all nodes of a worker that anybody reads, with its
own destinations first, are its sources, which are the destinations of the layer before. So each layer costs what it
contains, and two passes over a mask of the nodes.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from sar.comm import process_group
from sar.comm.collectives import exchange_tensors
from sar.comm.engine import Engine
from sar.comm.plan import HaloPlan
from sar.common_tuples import PartitionData
from sar.core.graph import GraphShardManager, make_graph
from sar.core.shard import NodeSet, Relation, Structure, build_structure, digest, number_distinct
from sar.errors import GraphError
from sar.kernels import EdgeBlock

Rows = dict[str, Tensor]  # rows within each node type, int64
Seeds = Tensor | Mapping[str, Tensor]


def construct_mfgs(
    partition_data: PartitionData, seed_nodes: Seeds, n_layers: int, keep_seed_nodes: bool = True
) -> list[GraphShardManager]:
    """Make the message flow graphs of a model with `n_layers` layers; called by all workers together.

    Degrees count the edges of the message flow graph, on all workers. `input_nodes` of the first graph are the nodes
    whose features the model starts from, as rows of this partition's features; output rows follow `seed_nodes`.

    Args:
        partition_data: this worker's partition.
        seed_nodes: nodes of this partition whose output is wanted; may be empty. Either their global IDs, (S,) integer,
            of all types together, or a dictionary from node type to rows of the partition's nodes of that type,
            {ntype: (S_type,) integer}, such as `{"paper": train_mask.nonzero().squeeze(1)}`.
        n_layers: number of layers, at least 1.
        keep_seed_nodes: let each layer's sources begin with its destinations, as in DGL's blocks; without, sources are
            just the nodes that are read.

    Returns:
        One graph a layer, the input layer first.

    Raises:
        GraphError: for seeds that are not integers, not of this partition, of an unknown type, or given twice.
        PartitionError, CommunicationError: as `construct_full_graph`.
    """
    engine = process_group.engine()
    structure, features = build_structure(partition_data, engine)
    with engine.guard():
        engine.agree(f"construct_mfgs of {n_layers} layers, keep_seed_nodes {keep_seed_nodes}")
        if n_layers < 1:
            raise GraphError(f"construct_mfgs got n_layers={n_layers}; expected at least 1.")
        rows = _find_rows(structure, seed_nodes)
        layers: list[GraphShardManager] = []
        for depth in range(n_layers):
            block, positions, rows = _layer(structure, rows, keep_seed_nodes, depth)
            columns = [
                {name: column[index] for name, column in columns.items()}
                for columns, index in zip(features, positions, strict=True)
            ]
            layers.insert(0, make_graph(block, columns, partition_data.partition_book))
    return layers


def _find_rows(structure: Structure, seed_nodes: Seeds) -> Rows:
    """The rows of the seeds within their types, in the order given."""
    device = structure.device
    if isinstance(seed_nodes, Mapping):
        counts = structure.dst.counts
        if not set(seed_nodes) <= set(counts):
            raise GraphError(f"seed_nodes has the node types {sorted(seed_nodes)}; expected some of {list(counts)}.")
        none = torch.empty(0, dtype=torch.int64)
        return {
            ntype: _checked(f"seed_nodes[{ntype!r}]", seed_nodes.get(ntype, none), (0, count), "rows", device)
            for ntype, count in counts.items()
        }
    own = structure.node_ranges[structure.engine.rank]
    seeds = _checked("seed_nodes", seed_nodes, own, "global IDs", device)
    rows = {}
    for ntype, ids in structure.dst.ids.items():
        place = torch.searchsorted(ids, seeds)
        found = ids[place.clamp(max=max(len(ids) - 1, 0))] == seeds if len(ids) else torch.zeros_like(place).bool()
        rows[ntype] = place[found]
    return rows


def _checked(what: str, nodes: Tensor, allowed: tuple[int, int], kind: str, device: torch.device) -> Tensor:
    """The nodes as int64, once it is sure that they are distinct integers in the allowed range."""
    nodes = torch.as_tensor(nodes, device=device)
    if nodes.dim() != 1 or (nodes.numel() and nodes.dtype not in (torch.int64, torch.int32)):
        raise GraphError(f"{what} is {nodes.dtype} {tuple(nodes.shape)}; expected integer {kind}, (S,).")
    nodes = nodes.long()
    foreign = nodes[(nodes < allowed[0]) | (nodes >= allowed[1])]
    if len(foreign):
        raise GraphError(
            f"{len(foreign)} of {what}, such as {int(foreign[0])}, are not of this worker's partition, which has the "
            f"{kind} [{allowed[0]}, {allowed[1]}) there; pass {kind} of its own nodes."
        )
    if len(nodes.unique()) < len(nodes):
        raise GraphError(f"{len(nodes) - len(nodes.unique())} of {what} are given twice; pass each once.")
    return nodes


class _Selection(NamedTuple):
    """The edges of one relation that a layer needs.

    cols: by source partition, columns of the edges: rows of the full graph for the own one, else places in `halos`.
    dst: by source partition, positions of their destinations among the layer's.
    positions: visible positions in the full graph, (E,).
    halos: by source partition, which halo columns are read, ascending; nothing for the own one.
    asked: by reader, this worker's rows that it reads.
    degrees: by reader, the edges at each of these rows.
    """

    cols: list[Tensor]
    dst: list[Tensor]
    positions: Tensor
    halos: list[Tensor]
    asked: list[Tensor]
    degrees: list[Tensor]


def _layer(full: Structure, rows: Rows, keep_seeds: bool, depth: int) -> tuple[Structure, list[Tensor], Rows]:
    """One layer with destinations `rows`: its structure, the positions of its edges, and the rows of its sources."""
    engine = full.engine
    chosen = [_select(relation, rows[relation.etype[2]], engine) for relation in full.relations]
    sources = {}
    for ntype, ids in full.src.ids.items():
        first = rows[ntype] if keep_seeds else rows[ntype][:0]
        read = torch.zeros(len(ids), dtype=torch.bool, device=full.device)
        for relation, selection in zip(full.relations, chosen, strict=True):
            if relation.etype[0] == ntype:
                for used in (selection.cols[engine.rank], *selection.asked):
                    read[used.long()] = True
        read[first] = False
        sources[ntype] = torch.cat([first, read.nonzero().squeeze(1)])
    counts = [len(sources[t]) for t in sources] + [len(rows[t]) for t in rows] + [len(c.positions) for c in chosen]
    totals = torch.stack(engine.all_gather(torch.tensor(counts), "counts of a message flow graph")).sum(0).tolist()
    types = len(sources)
    src = NodeSet(_ids(full, sources), sources, dict(zip(sources, totals[:types], strict=True)))
    dst = NodeSet(_ids(full, rows), rows, dict(zip(rows, totals[types : 2 * types], strict=True)))
    relations = [
        _relation(relation, selection, sources[relation.etype[0]], len(rows[relation.etype[2]]), total, engine)
        for relation, selection, total in zip(full.relations, chosen, totals[2 * types :], strict=True)
    ]
    signature = digest(f"{full.signature} {depth} layers below the last {totals}")
    structure = Structure(engine, full.device, full.node_ranges, src, dst, relations, signature)
    return structure, [selection.positions for selection in chosen], sources


def _ids(full: Structure, rows: Rows) -> dict[str, Tensor]:
    return {ntype: full.dst.ids[ntype][index] for ntype, index in rows.items()}


def _select(relation: Relation, rows: Tensor, engine: Engine) -> _Selection:
    cols, dst, positions, halos, degrees = [], [], [], [], []
    for p, block in enumerate(relation.blocks):
        place, owner = _edges_at(block, rows)
        column, used = block.cols[place], block.cols[:0]
        if p != engine.rank:
            used, column = number_distinct(column.long(), block.num_src)
        cols.append(column)
        dst.append(owner)
        positions.append(place + block.edge_offset)
        halos.append(used)
        degrees.append(torch.bincount(column, minlength=len(used))[: len(used)])
    asked = [
        send[columns.long().to(send.device)]
        for send, columns in zip(relation.plan.send_rows, exchange_tensors(halos), strict=True)
    ]
    theirs = [d.to(rows.device) for d in exchange_tensors(degrees)]
    return _Selection(cols, dst, torch.cat(positions), halos, asked, theirs)


def _edges_at(block: EdgeBlock, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Positions in the block of all edges into `rows`, row after row, and for each the index of its row."""
    dense = torch.full((block.num_dst,), -1, dtype=torch.int64, device=rows.device)
    dense[block.rows.long()] = torch.arange(len(block.rows), device=rows.device)
    group = dense[rows]
    here = (group >= 0).nonzero().squeeze(1)
    group = group[here]
    begin, end = block.indptr[group].long(), block.indptr[group + 1].long()
    counts = end - begin
    offset = torch.repeat_interleave(begin - (counts.cumsum(0) - counts), counts)
    return torch.arange(len(offset), device=rows.device) + offset, torch.repeat_interleave(here, counts)


def _relation(
    full: Relation, chosen: _Selection, sources: Tensor, num_dst: int, num_edges_global: int, engine: Engine
) -> Relation:
    number = torch.full((full.num_src,), -1, dtype=torch.int32, device=sources.device)
    number[sources] = torch.arange(len(sources), dtype=torch.int32, device=sources.device)
    blocks, halos, offset = [], [], 0
    in_degrees = torch.zeros(num_dst, dtype=torch.int64, device=sources.device)
    for p, (cols, dst) in enumerate(zip(chosen.cols, chosen.dst, strict=True)):
        own = p == engine.rank
        num_src = len(sources) if own else len(chosen.halos[p])
        columns = number[cols.long()] if own else cols
        blocks.append(EdgeBlock.from_coo(columns, dst, num_src, num_dst, edge_offset=offset))
        halos.append(full.halos[p][chosen.halos[p].long()])
        in_degrees += torch.bincount(dst, minlength=num_dst)
        offset += len(dst)
    send_rows = [number[rows.long()] for rows in chosen.asked]
    out_degrees = torch.bincount(blocks[engine.rank].cols, minlength=len(sources))
    for rows, degrees in zip(send_rows, chosen.degrees, strict=True):
        out_degrees.index_add_(0, rows, degrees)
    counts = engine.all_gather(torch.tensor([len(halo) for halo in halos]), f"halo counts of {full.etype}")
    plan = HaloPlan(engine.rank, send_rows, torch.stack(counts).T)
    return Relation(full.etype, blocks, halos, plan, len(sources), num_dst, num_edges_global, in_degrees, out_degrees)
