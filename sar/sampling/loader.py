"""The loader: batches of a worker's seeds, in step with all other workers."""

import os
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from sar.comm import session
from sar.core.graph.graph import GraphShardManager
from sar.core.graph.mfg import Seeds
from sar.errors import ConfigError
from sar.kernels.neighbor_sampling import derive_key
from sar.sampling.background import Processes
from sar.sampling.batch import Batch, random_key, sample_batch
from sar.sampling.optimized_batches import OptimizedBatches
from sar.sampling.sampler import DistNeighborSampler
from sar.sampling.seed_batches import SeedBatches
from sar.sampling.seeds import global_ids


class DataLoader:
    """Mini-batches of a worker's seeds as lists of DGL blocks; as many on every worker, which iterate together.

    With equal seeds, `seed` and number of workers the same batches come out, whatever `num_workers` is.

    Args:
        full_graph_manager: the graph, from `construct_full_graph`, in any mode.
        seed_nodes: this worker's nodes: global IDs, (S,) integer; rows by type, {ntype: (S_type,)}; or masks over its
            nodes. May be empty.
        graph_sampler: makes the blocks.
        batch_size: seeds in a batch at most, on each worker.
        drop_last: only whole batches; see `SeedBatches` for what workers with fewer seeds do.
        shuffle: another order in every epoch.
        precompute_optimized_batches: let METIS put seeds that lie close together into one batch, once.
        optimized_batches_cache: path of the files to keep these batches in; see `OptimizedBatches`.
        num_workers: background processes that sample ahead on each worker; 0 samples when a batch is asked for. They
            work on a copy, in shared memory, of the worker's structure and features, made when an epoch starts and
            these have changed. They live until the loader is dropped, or an epoch that is not finished.
        seed: of shuffling and sampling; default: drawn from torch's random state.
        foreign_seeds: allow nodes of other partitions, such as `split_seeds` returns.
        prefetch_factor: batches that each background process keeps ready.

    Raises:
        GraphError, FieldError, ConfigError, CommunicationError: as `SeedBatches` and `DistNeighborSampler.sample`.
    """

    def __init__(
        self,
        full_graph_manager: GraphShardManager,
        seed_nodes: Seeds,
        graph_sampler: DistNeighborSampler,
        batch_size: int = 1,
        drop_last: bool = False,
        shuffle: bool = False,
        precompute_optimized_batches: bool = True,
        optimized_batches_cache: str | os.PathLike[str] | None = None,
        num_workers: int = 0,
        *,
        seed: int | None = None,
        foreign_seeds: bool = False,
        prefetch_factor: int = 2,
    ) -> None:
        self._graph = full_graph_manager
        self._sampler = graph_sampler
        self._num_workers = num_workers
        self._ahead = prefetch_factor
        self._idle: Processes | None = None  # between epochs
        self._epoch = 0
        self._seed = random_key() if seed is None else seed
        with session.current_group().guard():
            for name, value, least in (("num_workers", num_workers, 0), ("prefetch_factor", prefetch_factor, 1)):
                if value < least:
                    raise ConfigError(f"{name} is {value}; expected at least {least}.")
            optimized = None
            if precompute_optimized_batches:
                optimized = OptimizedBatches(full_graph_manager, optimized_batches_cache)
            self._batches = SeedBatches(
                global_ids(full_graph_manager, seed_nodes),
                batch_size,
                drop_last=drop_last,
                shuffle=shuffle,
                seed=self._seed,
                optimized=optimized,
                node_ranges=full_graph_manager.node_ranges,
                foreign=foreign_seeds,
            )
            graph_sampler.prepare(full_graph_manager)

    def __len__(self) -> int:
        """The number of batches in an epoch, the same on every worker."""
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Any]]:
        """The batches of the next epoch."""
        epoch, self._epoch = self._epoch, self._epoch + 1
        key = derive_key(self._seed, session.rank(), epoch)
        batches = [(seeds, derive_key(key, number)) for number, seeds in enumerate(self._batches.epoch(epoch))]
        sampled = self._sample_ahead(batches) if self._num_workers and batches else self._sample(batches)
        return map(self._sampler.to_blocks, sampled)

    def _sample(self, batches: list[tuple[Tensor, int]]) -> Iterator[Batch]:
        for seeds, key in batches:
            yield sample_batch(session.current_group(), self._sampler.prepare(self._graph), seeds, key)

    def _sample_ahead(self, batches: list[tuple[Tensor, int]]) -> Iterator[Batch]:
        group = session.current_group()
        with group.guard():
            source = self._sampler.prepare(self._graph)
            processes, self._idle = self._idle, None
            if processes is None or processes.source is not source:
                processes = Processes(source, self._num_workers, self._ahead)
        finished = False
        try:
            sampled = processes.sample(batches)
            for _ in batches:
                with group.guard():
                    batch = next(sampled)
                yield batch
            finished = True
        finally:
            # Processes in the middle of an epoch are not in step for another.
            if finished:
                self._idle = processes
            else:
                processes.close()
