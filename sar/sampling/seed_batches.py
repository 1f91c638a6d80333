"""Which seeds are in which mini-batch: as many batches on every worker, each seed once an epoch.

[Note: which seeds are close]
Two seeds are close where an edge joins them or where they read the same node. So METIS divides the graph of all edges
into this worker's seeds, remote sources included, between the batches; nodes that one seed alone reads tell nothing and
are left out. METIS balances a few percent at best. `fit` then moves the seeds that have least to do with their batch
from batches that are too large to those that are too small, to where most of their neighbours are.
"""

import hashlib
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar.comm import session
from sar.core.graph.edges import edges_into
from sar.core.graph.graph import GraphShardManager
from sar.durable import written_whole
from sar.errors import ConfigError
from sar.id_slices import find_sorted
from sar.logging_setup import logger
from sar.partition.metis_library import METIS_INTEGER, AdjacencyLists, metis_parts
from sar.sampling.seeds import check_seeds
from sar.tensor_views import as_bytes

IMBALANCE = 0.03  # how many more seeds than the mean a part of METIS may have: 3 %, its own default


class SeedBatches:
    """This worker's seeds in batches, as many as every other worker has.

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
        optimized: puts seeds that lie close into one batch; None takes them as they come.
        node_ranges: `graph.node_ranges`, by which seeds of other partitions are refused; None where that has been done.
        foreign: allow seeds of other partitions, such as `split_seeds` returns, as long as each is on one worker only.

    Raises:
        GraphError: for seeds that are no nodes, given twice, or of another partition.
        ConfigError: for a batch size below 1.
        CommunicationError: where another worker raised, or passes other settings.
    """

    def __init__(
        self,
        seeds: Tensor,
        batch_size: int,
        *,
        drop_last: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        optimized: "OptimizedBatches | None" = None,
        node_ranges: Sequence[tuple[int, int]] | None = None,
        foreign: bool = False,
    ) -> None:
        group = session.current_group()
        self._shuffle = shuffle
        self.seed = seed
        self._rank = group.rank
        with group.guard():
            group.agree(
                f"SeedBatches of {batch_size}, drop_last {drop_last}, shuffle {shuffle}, "
                f"optimised {optimized is not None}, foreign seeds {foreign}"
            )
            if not isinstance(batch_size, int) or batch_size < 1:
                raise ConfigError(f"batch_size is {batch_size}; expected an integer of at least 1.")
            self._seeds = check_seeds(seeds, node_ranges, foreign=foreign)
            counts = group.gather_numbers(len(self._seeds), "SeedBatches")
            self._count = min(counts) // batch_size if drop_last else -(-max(counts) // batch_size)
            self._sizes = _sizes(len(self._seeds), self._count, batch_size, drop_last)
            self._fixed: list[Tensor] | None = None
            if optimized is not None:
                self._fixed = optimized.group(self._seeds, self._sizes)
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


class OptimizedBatches:
    """How to put seeds that share neighbours into one batch.

    The file of each worker, `CACHE-RANK-of-W.npz`, holds arrays only, which are read without unpickling anything. It
    counts for exactly the seeds, batch sizes and edges that it was made for; a file for others, or one that is damaged,
    is made anew, which a line in the log tells.

    Args:
        graph: the whole graph.
        cache: path without rank and ending of the files to keep the batches in; None to keep none.
    """

    def __init__(self, graph: GraphShardManager, cache: str | os.PathLike[str] | None = None) -> None:
        group = session.current_group()
        self._graph = graph
        self._file = None
        if cache is not None:
            path = Path(cache)
            name = path.name.removesuffix(".npz")
            self._file = path.with_name(f"{name}-{group.rank}-of-{group.world_size}.npz")

    def group(self, seeds: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Divide seeds among batches of given sizes; not a collective call.

        Args:
            seeds: (S,) int64 distinct global IDs. Of those of other partitions only edges to own seeds are known.
            sizes: seeds in each batch; what is more than these hold is left out.

        Returns:
            The batches, (size,) each.

        Raises:
            ConfigError: where the file cannot be written.
        """
        rest = len(seeds) - sum(sizes)
        all_sizes = [*sizes, rest] if rest else list(sizes)
        if max(all_sizes, default=0) <= 1 or len(all_sizes) == 1:
            return list(seeds[: sum(sizes)].split(list(sizes)))
        seeds = seeds.sort().values
        logger.info("grouping %d seeds that share neighbours into batches", len(seeds))
        reader, read, num_nodes = self._edges_into(seeds)
        # The key covers all that the batches depend on.
        digest = hashlib.blake2b(f"sar batches 1 {len(seeds)} {all_sizes}".encode(), digest_size=32)
        for tensor in (seeds, reader, read):
            digest.update(as_bytes(tensor))
        key = digest.digest()
        batch_of = self._load(key, all_sizes)
        if batch_of is None:
            batch_of = _assign(reader, read, num_nodes, all_sizes)
            self._save(key, batch_of)
        ordered = seeds[batch_of.argsort(stable=True)]
        return list(ordered[: sum(sizes)].split(list(sizes)))

    def _edges_into(self, seeds: Tensor) -> tuple[Tensor, Tensor, int]:
        """The edges into ascending `seeds`: which seed reads which node, (E,) each, and the number of nodes.

        The seeds are the first nodes, in their order; the others are the nodes that more than one edge reads.
        """
        readers, read = [seeds[:0]], [seeds[:0]]
        for etype in self._graph.canonical_etypes:
            own = self._graph.node_ids(etype[2])
            chosen = torch.isin(own, seeds.to(own.device)).nonzero().squeeze(1)
            sources, rows = edges_into(self._graph, chosen, etype)
            readers.append(torch.searchsorted(seeds, own[rows].cpu()))
            read.append(sources.cpu())
        reader, sources = torch.cat(readers), torch.cat(read)
        node, is_seed = find_sorted(seeds, sources)
        other = ~is_seed
        _, number, counts = sources[other].unique(return_inverse=True, return_counts=True)
        shared = counts > 1
        node[other] = (shared.cumsum(0) - 1 + len(seeds))[number]
        keep = torch.ones_like(other)
        keep[other] = shared[number]
        return reader[keep], node[keep], len(seeds) + int(shared.sum())

    def _load(self, key: bytes, sizes: Sequence[int]) -> Tensor | None:
        """The batch of each seed as it is in the file, where that was made for the same."""
        if self._file is None or not self._file.exists():
            return None
        try:
            with np.load(self._file, allow_pickle=False) as arrays:
                if arrays["key"].tobytes() != key:
                    logger.warning("%s has batches of other seeds, sizes or edges; making them anew", self._file)
                    return None
                batch_of = torch.from_numpy(arrays["batch_of"])
            if batch_of.dtype == torch.int64 and torch.bincount(batch_of, minlength=len(sizes)).tolist() == sizes:
                return batch_of
            problem = "the batches have other sizes"
        except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
            problem = f"{type(error).__name__}: {error}"
        logger.warning("%s is damaged (%s); making the batches anew", self._file, problem)
        return None

    def _save(self, key: bytes, batch_of: Tensor) -> None:
        """Write the file, if there is to be one."""
        if self._file is None:
            return
        arrays: dict[str, Any] = {"key": np.frombuffer(key, dtype=np.uint8), "batch_of": batch_of.numpy()}
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(self._file) as file:
                np.savez(file, **arrays)
        except OSError as error:
            raise ConfigError(
                f"The batches cannot be kept in {self._file}: {error}. Name another optimized_batches_cache, or None."
            ) from error


def _assign(reader: Tensor, read: Tensor, num_nodes: int, sizes: Sequence[int]) -> Tensor:
    """The batch of every seed, (S,): exactly `sizes[b]` seeds in batch b."""
    num_seeds, num_batches = sum(sizes), len(sizes)
    parts = seed_parts(read, reader, torch.arange(num_nodes, device="cpu") < num_seeds, num_batches)
    if parts is None:  # no seed is close to another
        return torch.repeat_interleave(torch.tensor(sizes, device="cpu"))
    # The largest parts become the largest batches.
    by_size = torch.bincount(parts[:num_seeds], minlength=num_batches).argsort(descending=True, stable=True)
    batch_of_part = torch.empty(num_batches, dtype=torch.int64, device="cpu")
    batch_of_part[by_size] = torch.tensor(sizes, device="cpu").argsort(descending=True, stable=True)
    batch_of_node = batch_of_part[parts]
    # A seed reads a node as much as the node is read by it: seeds among themselves count both ways.
    between = read < num_seeds
    seed = torch.cat([reader, read[between]])
    neighbour = torch.cat([read, reader[between]])
    return fit(batch_of_node[:num_seeds], seed, batch_of_node[neighbour], sizes)


def seed_parts(src: Tensor, dst: Tensor, is_seed: Tensor, num_parts: int) -> Tensor | None:
    """The part of every node, (N,) int64: few edges between parts, and about as many seeds in each.

    Edges are (E,) int64 each, `is_seed` (N,) bool, and there are two parts at least. None where no edge joins two
    nodes. Raises `PartitionError` where METIS finds no such parts.
    """
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
    lists, node_weights = AdjacencyLists(indptr, neighbours.astype(METIS_INTEGER, copy=False)), is_seed.numpy()[:, None]
    return torch.from_numpy(metis_parts(lists, node_weights, num_parts, imbalance=IMBALANCE, seed=0).astype(np.int64))


def fit(batch_of: Tensor, seed: Tensor, batch: Tensor, sizes: Sequence[int]) -> Tensor:
    """The batch of every seed, (S,), changed from `batch_of` so that each batch has exactly its size.

    Entry e of `seed` and `batch`, (E,) each, says that the seed has a neighbour in the batch. The sizes add up to S.
    """
    num_batches = len(sizes)
    batch_of = batch_of.clone()
    found = torch.bincount(batch_of, minlength=num_batches)
    neighbours_in_own_batch = torch.bincount(seed[batch_of[seed] == batch], minlength=len(batch_of))
    least_first = neighbours_in_own_batch.argsort(stable=True)
    least_first = least_first[batch_of[least_first].argsort(stable=True)]  # batch after batch
    place_in_batch = torch.arange(len(batch_of), device="cpu") - torch.repeat_interleave(found.cumsum(0) - found, found)
    surplus = (found - torch.tensor(sizes, device="cpu")).clamp(min=0)
    waiting = torch.zeros(len(batch_of), dtype=torch.bool, device="cpu")
    waiting[least_first[place_in_batch < surplus[batch_of[least_first]]]] = True
    missing = [max(0, size - there) for size, there in zip(sizes, found.tolist(), strict=True)]

    of_waiting = waiting[seed]
    pairs, counts = (seed[of_waiting] * num_batches + batch[of_waiting]).unique(return_counts=True)
    for pair in pairs[counts.argsort(descending=True, stable=True)].tolist():
        moving, target = divmod(pair, num_batches)
        if waiting[moving] and missing[target]:
            batch_of[moving] = target
            waiting[moving] = False
            missing[target] -= 1
    batch_of[waiting] = torch.repeat_interleave(torch.tensor(missing, device="cpu"))
    return batch_of
