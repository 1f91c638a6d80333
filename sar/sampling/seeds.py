"""Seed nodes: reading them from arguments, splitting them evenly over workers, and dividing them into batches.

[Note: which seeds are close]
Two seeds are close if an edge joins them or if they read the same node. So METIS divides the graph of all edges into
this worker's seeds, including remote sources, into about one part per batch. If a part has more seeds than its batch
holds, the surplus goes to other batches.
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
IMBALANCE = 0.03  # METIS parts may exceed the mean number of seeds by 3 %, which is its default


def global_ids(graph: GraphShardManager, nodes: Seeds) -> Tensor:
    """Convert nodes, given as for `DataLoader`, to global IDs of all types, (S,), in order; masks in ascending order.

    Does not check IDs. Raises `GraphError` for unknown types, invalid or repeated rows, and masks of another length.
    Inside `group.guard()`.
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
    """Return this worker's seeds as int64 on the CPU; `GraphError` for invalid, repeated or other workers' nodes.

    `node_ranges` are the graph's; None if the seeds are known to be valid. `foreign` allows nodes of other partitions
    if no two workers share one, which makes this a collective call. Inside `group.guard()`.
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
    """Redistribute the seeds evenly: workers get equal numbers, up to one. All workers must call this together.

    Implements the first level of the split in "DistDGL: Distributed Graph Neural Network Training for Billion-Scale
    Graphs" (Zheng et al., 2020), among workers. Only the surplus of a worker moves, highest IDs first, so no other even
    split moves fewer seeds.

    Args:
        graph: the whole graph.
        seeds: this worker's nodes: global IDs, rows by type, or masks, as for `DataLoader`.

    Returns:
        (S,) int64 global IDs, ascending; some may belong to other partitions. Deterministic.

    Raises:
        GraphError: for seeds of other workers, seeds that do not exist, or duplicates.
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
    """Return how many of its `counts[p]` seeds each worker p sends to each worker q, as [p][q]; it keeps [p][p].

    A worker with c seeds and a share of q receives at least max(0, q - c). The total is smallest if the workers with
    the most seeds get the shares that are larger by one.
    """
    workers = range(len(counts))
    share, rest = divmod(sum(counts), len(counts))
    shares = [share] * len(counts)
    for worker in sorted(workers, key=lambda p: -counts[p])[:rest]:
        shares[worker] += 1
    # Lay all surplus seeds on one line and all missing ones on a second line. Seeds move where both lines overlap.
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
    """Divides this worker's seeds into batches, equally many on all workers.

    By default, the worker with the most seeds sets the number of batches, and each seed is in one batch per epoch.
    Workers that need this number of batches fill them as `torch.utils.data.DataLoader` does; the other workers spread
    their seeds evenly, so batch sizes differ by at most one, and some batches may be empty.

    With `drop_last`, the worker with the fewest seeds sets the number of batches, and all batches are full. The last
    seeds (after shuffling) are dropped in this epoch.

    With `optimized`, the seeds of a batch are fixed: `shuffle` permutes the batches, and `drop_last` drops the smaller
    last batch in every epoch.

    All workers must create it together.

    Args:
        seeds: this worker's seeds, (S,) integer global IDs; may be empty.
        batch_size: seeds per batch, at least 1; the same on all workers.
        drop_last: drop incomplete batches. Default False.
        shuffle: reshuffle in every epoch. Default False.
        seed: seed for shuffling, combined with the epoch and the rank. Default 0.
        optimized: graph whose edges decide which seeds share neighbors and go into one batch. Default None keeps order.

    Raises:
        GraphError: for negative or repeated seeds.
        ConfigError: for a batch size below 1.
        CommunicationError: another worker raised, or passed different settings.
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
        """Return the batches of an epoch, `len(self)` tensors of global IDs, (S_batch,) int64. Not a collective call.

        Deterministic for a given epoch number.
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
    """The number of seeds in each of a worker's batches; with `drop_last` all full batches, at least `count`."""
    whole, rest = divmod(num_seeds, batch_size)
    if drop_last:
        return [batch_size] * whole
    if whole + (rest > 0) == count:
        return [batch_size] * whole + [rest] * (rest > 0)
    return [(k + 1) * num_seeds // count - k * num_seeds // count for k in range(count)]


def group_neighbors(graph: GraphShardManager, seeds: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Divide distinct seeds, (S,) int64 global IDs, into batches of these sizes: see [Note: which seeds are close].

    Seeds beyond the sum of the sizes are dropped. For seeds of other partitions, only edges to own seeds are known.
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
