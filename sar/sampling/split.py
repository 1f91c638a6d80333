"""Equal shares of the seed nodes for all workers, with as few nodes of other partitions as possible."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sar.comm import session
from sar.comm.collectives import exchange_tensors
from sar.core.graph.graph import GraphShardManager
from sar.core.graph.mfg import Seeds
from sar.sampling.seed_ids import check_seeds, global_ids


def split_seeds(graph: GraphShardManager, seeds: Seeds) -> Tensor:
    """Give every worker the same number of seeds, or one more; called by all workers together.

    The first level of the split in "DistDGL: Distributed Graph Neural Network Training for Billion-Scale Graphs" (Zheng
    et al., 2020), which cuts the seeds into equal ranges of IDs; the second, among the trainers of one partition, has
    nothing to do here, where a partition has one worker. A worker keeps as many of its own seeds as its share holds, so
    that no other split into equal shares has fewer foreign seeds; only what is too much moves, the highest IDs first.

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
        own = check_seeds(global_ids(graph, seeds), group, graph.node_ranges).sort().values
        counts = torch.stack(group.all_gather(torch.tensor([len(own)]), "split_seeds")).squeeze(1).tolist()
        moves = plan_moves(counts)[group.rank]
        keep = moves[group.rank]
        moves[group.rank] = 0
        sent = list(own[keep:].split(moves))
        sent[group.rank] = own[:keep]
        return torch.cat([piece.cpu() for piece in exchange_tensors(sent)]).sort().values


def plan_moves(counts: Sequence[int]) -> list[list[int]]:
    """How many of its `counts[p]` seeds each worker p gives to each worker q, [p][q]; what it keeps is [p][p].

    A worker with c seeds and a share of q takes at least max(0, q - c) foreign ones. The sum of these is least when the
    shares that are one larger go to the workers with most seeds.
    """
    workers = range(len(counts))
    share, rest = divmod(sum(counts), len(counts))
    by_count = sorted(workers, key=lambda p: (-counts[p], p))
    shares = [share + (by_count.index(p) < rest) for p in workers]
    moves = [[0] * len(counts) for _ in workers]
    for p in workers:
        moves[p][p] = min(counts[p], shares[p])
    giver = 0
    for q in workers:
        while (missing := shares[q] - sum(row[q] for row in moves)) > 0:
            if (spare := counts[giver] - sum(moves[giver])) == 0:
                giver += 1
                continue
            moves[giver][q] += min(spare, missing)
    return moves
