"""Mini-batches of seeds that lie close together, so that fewer nodes are read for them; kept in a file.

[Note: which seeds are close]
Two seeds are close where an edge joins them or where they read the same node. So METIS divides the graph of all edges
into this worker's seeds, remote sources included, between the batches; nodes that one seed alone reads tell nothing and
are left out. METIS balances a few percent at best. `fit` then moves the seeds that have least to do with their batch
from batches that are too large to those that have room, to where most of their neighbours are.
"""

import hashlib
import os
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar.comm import session
from sar.core.graph.graph import GraphShardManager
from sar.core.graph.in_edges import edges_into
from sar.errors import ConfigError
from sar.logging_setup import logger
from sar.sampling.seed_parts import seed_parts


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
        rooms = [*sizes, rest] if rest else list(sizes)
        if max(rooms, default=0) <= 1 or len(rooms) == 1:
            return list(seeds[: sum(sizes)].split(list(sizes)))
        seeds = seeds.sort().values
        reader, read, num_nodes = self._edges_into(seeds)
        key = _digest(seeds, rooms, reader, read)
        batch_of = self._load(key, rooms)
        if batch_of is None:
            batch_of = _assign(reader, read, num_nodes, rooms)
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
        node = torch.searchsorted(seeds, sources).clamp(max=len(seeds) - 1)
        other = seeds[node] != sources
        _, number, counts = sources[other].unique(return_inverse=True, return_counts=True)
        shared = counts > 1
        node[other] = (shared.cumsum(0) - 1 + len(seeds))[number]
        keep = torch.ones_like(other)
        keep[other] = shared[number]
        return reader[keep], node[keep], len(seeds) + int(shared.sum())

    def _load(self, key: bytes, rooms: Sequence[int]) -> Tensor | None:
        """The batch of each seed as it is in the file, where that was made for the same."""
        if self._file is None or not self._file.exists():
            return None
        try:
            with np.load(self._file, allow_pickle=False) as arrays:
                if arrays["key"].tobytes() != key:
                    logger.warning("%s has batches of other seeds, sizes or edges; making them anew", self._file)
                    return None
                batch_of = torch.from_numpy(arrays["batch_of"])
            sound = batch_of.dtype == torch.int64 and torch.bincount(batch_of, minlength=len(rooms)).tolist() == rooms
            problem = "the batches have other sizes"
        except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
            sound, problem = False, f"{type(error).__name__}: {error}"
        if not sound:
            logger.warning("%s is damaged (%s); making the batches anew", self._file, problem)
            return None
        return batch_of

    def _save(self, key: bytes, batch_of: Tensor) -> None:
        """Write the file in one go, so that nobody ever sees half of it."""
        if self._file is None:
            return
        arrays: dict[str, Any] = {"key": np.frombuffer(key, dtype=np.uint8), "batch_of": batch_of.numpy()}
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._file.parent, suffix=".tmp", delete=False) as draft:
                try:
                    np.savez(draft, **arrays)
                    draft.close()
                    os.replace(draft.name, self._file)
                except BaseException:
                    os.unlink(draft.name)
                    raise
        except OSError as error:
            raise ConfigError(
                f"The batches cannot be kept in {self._file}: {error}. Name another optimized_batches_cache, or None."
            ) from error


def _digest(seeds: Tensor, rooms: Sequence[int], reader: Tensor, read: Tensor) -> bytes:
    """Of all that the batches depend on."""
    digest = hashlib.blake2b(f"sar batches 1 {len(seeds)} {list(rooms)}".encode(), digest_size=32)
    for tensor in (seeds, reader, read):
        digest.update(tensor.numpy().tobytes())
    return digest.digest()


def _assign(reader: Tensor, read: Tensor, num_nodes: int, rooms: Sequence[int]) -> Tensor:
    """The batch of every seed, (S,): exactly `rooms[b]` seeds in batch b."""
    num_seeds, num_batches = sum(rooms), len(rooms)
    parts = seed_parts(read, reader, torch.arange(num_nodes) < num_seeds, num_batches) if len(read) else None
    if parts is None:
        return torch.repeat_interleave(torch.tensor(rooms))
    # The largest parts become the largest batches.
    by_size = torch.bincount(parts[:num_seeds], minlength=num_batches).argsort(descending=True, stable=True)
    batch_of_part = torch.empty(num_batches, dtype=torch.int64)
    batch_of_part[by_size] = torch.tensor(rooms).argsort(descending=True, stable=True)
    batch_of_node = batch_of_part[parts]
    # A seed reads a node as much as the node is read by it: seeds among themselves count both ways.
    between = read < num_seeds
    ends = torch.cat([reader, read[between]]), torch.cat([read, reader[between]])
    return fit(batch_of_node[:num_seeds], ends[0], batch_of_node[ends[1]], rooms)


def fit(batch_of: Tensor, seed: Tensor, batch: Tensor, rooms: Sequence[int]) -> Tensor:
    """Make every batch exactly as large as it is to be.

    Args:
        batch_of: the batch of every seed, (S,).
        seed: for every neighbour of a seed, the seed, (E,).
        batch: and the batch that the neighbour is in, (E,).
        rooms: seeds that each batch is to have; they add up to S.

    Returns:
        The batch of every seed, (S,).
    """
    num_batches, batch_of = len(rooms), batch_of.clone()
    own = torch.bincount(seed[batch_of[seed] == batch], minlength=len(batch_of))  # neighbours in a seed's own batch
    least_first = own.argsort(stable=True)
    least_first = least_first[batch_of[least_first].argsort(stable=True)]  # batch after batch
    sizes = torch.bincount(batch_of, minlength=num_batches)
    rank_within = torch.arange(len(batch_of)) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    surplus = (sizes - torch.tensor(rooms)).clamp(min=0)
    moving = least_first[rank_within < surplus[batch_of[least_first]]]
    room = [max(0, r - s) for r, s in zip(rooms, sizes.tolist(), strict=True)]
    waiting = torch.zeros(len(batch_of), dtype=torch.bool)
    waiting[moving] = True
    ties = waiting[seed]
    pairs, counts = (seed[ties] * num_batches + batch[ties]).unique(return_counts=True)
    for pair in pairs[counts.argsort(descending=True, stable=True)].tolist():
        mover, home = divmod(pair, num_batches)
        if waiting[mover] and room[home]:
            batch_of[mover], waiting[mover] = home, False
            room[home] -= 1
    batch_of[waiting] = torch.repeat_interleave(torch.tensor(room))
    return batch_of
