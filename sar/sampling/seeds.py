"""Seed nodes: as users give them, as global IDs that are known to be sound, and in equal shares for all workers."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from sar.comm import session
from sar.comm.collectives import exchange_tensors
from sar.comm.group import Group
from sar.core.graph.graph import GraphShardManager
from sar.core.graph.mfg import Seeds, checked_nodes
from sar.errors import GraphError

CPU: Final = torch.device("cpu")


def global_ids(graph: GraphShardManager, nodes: Seeds) -> Tensor:
    """The nodes as global IDs of all types together, in the order given; masks in ascending order.

    An error reaches the other workers at their next collective call.

    Args:
        graph: the whole graph.
        nodes: as `construct_mfgs` takes seeds: global IDs, (S,) integer, or rows of this worker's nodes by type,
            {ntype: (S_type,) integer}. In place of IDs or rows also masks over this worker's nodes, (N_i,) or
            {ntype: (N_type,)} bool.

    Returns:
        (S,), int64 but for IDs, which are not looked at.

    Raises:
        GraphError: for unknown types, rows that do not exist or are given twice, and masks of another length.
    """
    group = session.current_group()
    with group.guard():
        if not isinstance(nodes, Mapping):
            nodes = torch.as_tensor(nodes)
            first, last = graph.node_ranges[group.rank]
            return _rows_of_mask("seeds", nodes, last - first) + first if nodes.dtype == torch.bool else nodes
        if not set(nodes) <= set(graph.ntypes):
            raise GraphError(f"The seeds have the node types {sorted(nodes)}; expected some of {graph.ntypes}.")
        return ids_of_rows(nodes, {ntype: graph.node_ids(ntype) for ntype in nodes})


def ids_of_rows(given: Mapping[Any, Tensor], ids: Mapping[Any, Tensor]) -> Tensor:
    """The IDs of rows by type, or of masks over them, (S,) int64; `ids` has those of all rows."""
    pieces = [torch.empty(0, dtype=torch.int64)]
    for kind, rows in given.items():
        what, rows, count = f"seeds[{kind!r}]", torch.as_tensor(rows), len(ids[kind])
        if rows.dtype == torch.bool:
            rows = _rows_of_mask(what, rows, count)
        pieces.append(ids[kind].cpu()[checked_nodes(what, rows, (0, count), "rows", CPU)])
    return torch.cat(pieces)


def check_seeds(
    seeds: Tensor, group: Group, node_ranges: Sequence[tuple[int, int]] | None, *, foreign: bool = False
) -> Tensor:
    """The seeds as int64 on the CPU, once it is sure that each is a node and no worker has it twice or another's.

    Collective with `foreign`; otherwise an error reaches the other workers at their next collective call. Inside
    `group.guard()`.

    Args:
        seeds: this worker's, (S,) integer global IDs.
        group: this worker's end of the group.
        node_ranges: the [start, end) range of global IDs of every partition; None where it is known that the seeds are
            nodes that this worker may use.
        foreign: allow nodes of other partitions, as long as no other worker has them too.

    Raises:
        GraphError: where they are not so.
    """
    allowed, whole = (0, node_ranges[-1][1] if node_ranges else 2**63 - 1), "the graph"
    if node_ranges and not foreign:
        allowed, whole = node_ranges[group.rank], "this worker's partition"
    seeds = checked_nodes(f"the seeds of worker {group.rank}", seeds, allowed, "global IDs", CPU, whole)
    if not foreign:
        return seeds
    # Worker s % W looks at seed s.
    ranks = range(group.world_size)
    arrived = [t.cpu() for t in exchange_tensors([seeds[seeds % group.world_size == q] for q in ranks])]
    owners = torch.repeat_interleave(torch.tensor(ranks), torch.tensor([len(t) for t in arrived]))
    nodes = torch.cat(arrived)
    distinct, counts = nodes.unique(return_counts=True)
    if len(distinct) < len(nodes):
        shared = distinct[counts > 1]
        raise GraphError(
            f"{len(shared)} seeds are given to several workers, such as {int(shared[0])} to workers "
            f"{owners[nodes == shared[0]].tolist()}; give each to one."
        )
    return seeds


def split_seeds(graph: GraphShardManager, seeds: Seeds) -> Tensor:
    """Give every worker the same number of seeds, or one more; called by all workers together.

    The first level of the split in "DistDGL: Distributed Graph Neural Network Training for Billion-Scale Graphs" (Zheng
    et al., 2020), which cuts the seeds into equal ranges of IDs; the second, among the trainers of one partition, has
    nothing to do here, where a partition has one worker. A worker keeps as many of its own seeds as its share allows,
    so that no other split into equal shares has fewer foreign seeds; only the surplus moves, the highest IDs first.

    Args:
        graph: the whole graph.
        seeds: this worker's own: global IDs, rows by type, or masks, as `global_ids` takes them.

    Returns:
        (S,) int64 global IDs, ascending; some may be of other partitions. Equal seeds give equal shares.

    Raises:
        GraphError: for seeds that are not this worker's own, do not exist, or are given twice.
    """
    group = session.current_group()
    with group.guard():
        group.agree("split_seeds")
        return equal_share(check_seeds(global_ids(graph, seeds), group, graph.node_ranges))


def equal_share(seeds: Tensor) -> Tensor:
    """This worker's share of all workers' seeds, (S,) int64, ascending; `seeds` are its own; inside `guard()`."""
    group, own = session.current_group(), seeds.sort().values
    counts = [int(count) for count in group.all_gather(torch.tensor(len(own)), "numbers of seeds")]
    moves = plan_moves(counts)[group.rank]
    kept = moves[group.rank]
    moves[group.rank] = 0
    sent = list(own[kept:].split(moves))
    sent[group.rank] = own[:kept]
    return torch.cat([piece.cpu() for piece in exchange_tensors(sent)]).sort().values


def plan_moves(counts: Sequence[int]) -> list[list[int]]:
    """How many of its `counts[p]` seeds each worker p gives to each worker q, [p][q]; what it keeps is [p][p].

    A worker with c seeds and a share of q takes at least max(0, q - c) foreign ones. The sum of these is least when the
    shares that are one larger go to the workers with most seeds.
    """
    workers = range(len(counts))
    share, rest = divmod(sum(counts), len(counts))
    shares = [share] * len(counts)
    for worker in sorted(workers, key=lambda p: -counts[p])[:rest]:
        shares[worker] += 1
    # All surplus in one line, and all that is missing beside it: what lies next to each other moves.
    surplus = [max(count - wanted, 0) for count, wanted in zip(counts, shares, strict=True)]
    missing = [max(wanted - count, 0) for count, wanted in zip(counts, shares, strict=True)]
    given = [0, *accumulate(surplus)]
    taken = [0, *accumulate(missing)]
    moves = [[max(0, min(given[p + 1], taken[q + 1]) - max(given[p], taken[q])) for q in workers] for p in workers]
    for p in workers:
        moves[p][p] = min(counts[p], shares[p])
    return moves


def _rows_of_mask(what: str, mask: Tensor, count: int) -> Tensor:
    if mask.shape != (count,):
        raise GraphError(f"{what} is a mask of {tuple(mask.shape)}; expected one over this worker's nodes, ({count},).")
    return mask.nonzero().squeeze(1)
