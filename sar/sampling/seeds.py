"""Seeds that are nodes: as users give them, in equal shares for all workers, and in batches.

[Note: which seeds are close]
Two seeds are close if an edge joins them or if they read the same node. So METIS divides the graph of all edges into
this worker's seeds, remote sources included, into about as many parts as there are batches. A part may have a few more
seeds than its batch; these fill up other batches.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from sar.comm import session
from sar.comm.collectives import exchange_tensors
from sar.core.graph.edges import edges_into
from sar.core.graph.graph import GraphShardManager
from sar.core.graph.mfg import Seeds, checked_nodes
from sar.errors import ConfigError, GraphError
from sar.logging_setup import logger

CPU: Final = torch.device("cpu")
IMBALANCE = 0.03  # how many more seeds than the mean a part of METIS may have: 3 %, its own default


def global_ids(graph: GraphShardManager, nodes: Seeds) -> Tensor:
    """The nodes as global IDs of all types together, (S,), in the order given; masks in ascending order.

    They are given as `DataLoader` takes them. IDs are not looked at; `GraphError` for unknown types, rows that do not
    exist or are given twice, and masks of another length. Inside `group.guard()`.
    """
    if not isinstance(nodes, Mapping):
        nodes = torch.as_tensor(nodes, device="cpu")
        first, last = graph.node_ranges[session.rank()]
        return _rows_of_mask("seeds", nodes, last - first) + first if nodes.dtype == torch.bool else nodes
    if not set(nodes) <= set(graph.ntypes):
        raise GraphError(f"The seeds have the node types {sorted(nodes)}; expected some of {graph.ntypes}.")
    return ids_of_rows(nodes, {ntype: graph.node_ids(ntype) for ntype in nodes})


def ids_of_rows(given: Mapping[Any, Tensor], ids: Mapping[Any, Tensor]) -> Tensor:
    """The IDs of rows by type, or of masks over them, (S,) int64; `ids` has those of all rows."""
    pieces = [torch.empty(0, dtype=torch.int64, device="cpu")]
    for kind, rows in given.items():
        what, rows, count = f"seeds[{kind!r}]", torch.as_tensor(rows, device="cpu"), len(ids[kind])
        if rows.dtype == torch.bool:
            rows = _rows_of_mask(what, rows, count)
        pieces.append(ids[kind].cpu()[checked_nodes(what, rows, (0, count), "rows", CPU)])
    return torch.cat(pieces)


def check_seeds(seeds: Tensor, node_ranges: Sequence[tuple[int, int]] | None, *, foreign: bool = False) -> Tensor:
    """This worker's seeds as int64 on the CPU; `GraphError` for those that are no nodes, given twice, or of others.

    `node_ranges` are those of the graph, None if the seeds are known to be nodes that this worker may use. `foreign`
    allows nodes of other partitions that no other worker has too, and makes this a collective call. Inside
    `group.guard()`.
    """
    group = session.current_group()
    allowed, whole = (0, node_ranges[-1][1] if node_ranges else 2**63 - 1), "the graph"
    if node_ranges and not foreign:
        allowed, whole = node_ranges[group.rank], "this worker's partition"
    seeds = checked_nodes(f"the seeds of worker {group.rank}", seeds, allowed, "global IDs", CPU, whole)
    if not foreign:
        return seeds
    # Worker s % W looks at seed s.
    ranks = range(group.world_size)
    arrived = [t.cpu() for t in exchange_tensors([seeds[seeds % group.world_size == q] for q in ranks])]
    owners = torch.repeat_interleave(
        torch.tensor(ranks, device="cpu"), torch.tensor([len(t) for t in arrived], device="cpu")
    )
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
    nothing to do here, if a partition has one worker. A worker keeps as many of its own seeds as its share allows,
    so that no other split into equal shares has fewer foreign seeds; only the surplus moves, the highest IDs first.

    Args:
        graph: the whole graph.
        seeds: this worker's own: global IDs, rows by type, or masks, as `DataLoader` takes them.

    Returns:
        (S,) int64 global IDs, ascending; some may be of other partitions. Equal seeds give equal shares.

    Raises:
        GraphError: for seeds that are not this worker's own, do not exist, or are given twice.
    """
    with session.current_group().guard() as group:
        group.agree("split_seeds")
        return equal_share(check_seeds(global_ids(graph, seeds), graph.node_ranges))


def equal_share(seeds: Tensor) -> Tensor:
    """This worker's share of all workers' seeds, (S,) int64, ascending; `seeds` are its own; inside `guard()`."""
    group, own = session.current_group(), seeds.sort().values
    moves = plan_moves(group.gather_numbers(len(own), "numbers of seeds"))[group.rank]
    kept = moves[group.rank]
    moves[group.rank] = 0
    sent = list(own[kept:].split(moves))
    sent[group.rank] = own[:kept]
    return torch.cat([piece.cpu() for piece in exchange_tensors(sent)]).sort().values


def plan_moves(counts: Sequence[int]) -> list[list[int]]:
    """How many of its `counts[p]` seeds each worker p gives to each worker q, [p][q]; it keeps [p][p].

    A worker with c seeds and a share of q takes at least max(0, q - c) foreign ones. The sum of these is least when the
    shares that are one larger go to the workers with most seeds.
    """
    workers = range(len(counts))
    share, rest = divmod(sum(counts), len(counts))
    shares = [share] * len(counts)
    for worker in sorted(workers, key=lambda p: -counts[p])[:rest]:
        shares[worker] += 1
    # All surplus in one line, and all that is missing in a second one: seeds move where both overlap.
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


class SeedBatches:
    """This worker's seeds in batches; all workers have the same number of batches.

    Without `drop_last` there are as many batches as the worker with most seeds needs, and each seed is in one batch of
    every epoch. That worker, and those that need as many, cut their seeds as `torch.utils.data.DataLoader` does: whole
    batches and the rest. The others spread theirs evenly over all batches, whose sizes differ by one at most; where
    there are fewer seeds than batches, some are empty.

    With `drop_last` there are as many batches as the worker with fewest seeds can fill, all whole. What is left over
    sits out the epoch: the end of the seeds, or of their new order with `shuffle`.

    `optimized` fixes which seeds come together. `shuffle` then changes the order of the batches, and `drop_last` leaves
    out the seeds of the last, smaller batch in every epoch.

    Called by all workers together.

    Args:
        seeds: this worker's, (S,) integer global IDs; may be empty.
        batch_size: seeds in a batch, at least 1; the same on every worker.
        drop_last: only whole batches.
        shuffle: another order in every epoch.
        seed: of the shuffling; with the number of the epoch and the rank it determines the order.
        optimized: the graph whose edges bring seeds that share neighbours into one batch; None takes them as they come.

    Raises:
        GraphError: for seeds that are negative, or given twice.
        ConfigError: for a batch size below 1.
        CommunicationError: if another worker raised, or passes other settings.
    """

    def __init__(
        self,
        seeds: Tensor,
        batch_size: int,
        *,
        drop_last: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        optimized: GraphShardManager | None = None,
    ) -> None:
        group = session.current_group()
        self._shuffle = shuffle
        self.seed = seed
        self._rank = group.rank
        with group.guard():
            group.agree(
                f"SeedBatches of {batch_size}, drop_last {drop_last}, shuffle {shuffle}, "
                f"optimised {optimized is not None}"
            )
            if not isinstance(batch_size, int) or batch_size < 1:
                raise ConfigError(f"batch_size is {batch_size}; expected an integer of at least 1.")
            self._seeds = check_seeds(seeds, None)
            counts = group.gather_numbers(len(self._seeds), "SeedBatches")
            self._count = min(counts) // batch_size if drop_last else -(-max(counts) // batch_size)
            self._sizes = _sizes(len(self._seeds), self._count, batch_size, drop_last)
            self._fixed: list[Tensor] | None = None
            if optimized is not None:
                self._fixed = group_neighbors(optimized, self._seeds, self._sizes)
                group.agree("SeedBatches: optimised batches are made")

    def __len__(self) -> int:
        """The number of batches in an epoch, the same on every worker."""
        return self._count

    def epoch(self, number: int) -> list[Tensor]:
        """The batches of an epoch, `len(self)` tensors of global IDs, (S_batch,) int64; not a collective call.

        The same number of the epoch gives the same batches.
        """
        if self._fixed is not None:
            return [self._fixed[k] for k in self._order(len(self._fixed), number)[: self._count].tolist()]
        sizes = self._sizes[: self._count]
        return list(self._seeds[self._order(len(self._seeds), number)[: sum(sizes)]].split(sizes))

    def _order(self, count: int, number: int) -> Tensor:
        if not self._shuffle:
            return torch.arange(count, device="cpu")
        text = f"{self.seed} {number} {self._rank}"
        state = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
        return torch.randperm(count, generator=torch.Generator().manual_seed(state), device="cpu")


def _sizes(num_seeds: int, count: int, batch_size: int, drop_last: bool) -> list[int]:
    """How many seeds are in each of a worker's batches; with `drop_last` of all that it can fill, `count` or more."""
    whole, rest = divmod(num_seeds, batch_size)
    if drop_last:
        return [batch_size] * whole
    if whole + (rest > 0) == count:
        return [batch_size] * whole + [rest] * (rest > 0)
    return [(k + 1) * num_seeds // count - k * num_seeds // count for k in range(count)]


def group_neighbors(graph: GraphShardManager, seeds: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Divide distinct seeds, (S,) int64 global IDs, into batches of these sizes: see [Note: which seeds are close].

    Seeds beyond the sum of the sizes are left out. Of seeds of other partitions only edges to own seeds are known.
    """
    largest = max(sizes, default=0)
    num_parts = round(len(seeds) / max(largest, 1))
    if num_parts > 1 and largest > 1:
        logger.info("grouping %d seeds that share neighbours into batches", len(seeds))
        seeds = seeds.sort().values
        nodes, readers = [seeds], [seeds[:0]]
        for etype in graph.canonical_etypes:
            own = graph.node_ids(etype[2])
            chosen = torch.isin(own, seeds.to(own.device)).nonzero().squeeze(1)
            sources, rows = edges_into(graph, chosen, etype)
            nodes.append(sources.cpu())
            readers.append(torch.searchsorted(seeds, own[rows].cpu()))
        ids, number = torch.cat(nodes).unique(return_inverse=True)
        of_seeds, sources = number[: len(seeds)], number[len(seeds) :]
        is_seed = torch.zeros(len(ids), dtype=torch.bool, device="cpu")
        is_seed[of_seeds] = True
        parts = seed_parts(sources, of_seeds[torch.cat(readers)], is_seed, num_parts)
        if parts is not None:
            part, order = parts[of_seeds].sort(stable=True)
            capacity = torch.tensor([*sizes, len(seeds) - sum(sizes)], device="cpu")
            fits = torch.arange(len(part), device="cpu") - torch.searchsorted(part, part) < capacity[part]
            free = capacity - torch.bincount(part[fits], minlength=len(capacity))
            part[~fits] = torch.repeat_interleave(free)
            seeds = seeds[order[part.argsort(stable=True)]]
    return list(seeds[: sum(sizes)].split(list(sizes)))


def seed_parts(src: Tensor, dst: Tensor, is_seed: Tensor, num_parts: int) -> Tensor | None:
    """The part of every node, (N,) int64: few edges between parts, and about as many seeds in each.

    Edges are (E,) int64 each, `is_seed` (N,) bool, and there are two parts at least. None if no edge joins two
    nodes. Raises `PartitionError` if METIS finds no such parts.
    """
    from sar.partition.assign.metis import METIS_INTEGER, AdjacencyLists, metis_parts  # imports the compiler

    # METIS takes edges in both directions, without loops and parallel ones.
    num_nodes, low, high = len(is_seed), torch.minimum(src, dst), torch.maximum(src, dst)
    pairs = (low * num_nodes + high)[low != high].unique()
    if not len(pairs):
        return None
    low, high = pairs // num_nodes, pairs % num_nodes
    start, end = torch.cat([low, high]), torch.cat([high, low])
    indptr = np.zeros(num_nodes + 1, METIS_INTEGER)
    np.cumsum(torch.bincount(start, minlength=num_nodes).numpy(), out=indptr[1:])
    neighbours = end[start.argsort(stable=True)].numpy()
    lists = AdjacencyLists(indptr, neighbours.astype(METIS_INTEGER, copy=False))
    parts = metis_parts(lists, is_seed.numpy()[:, None], num_parts, imbalance=IMBALANCE, seed=0)
    return torch.from_numpy(parts.astype(np.int64, copy=False))
