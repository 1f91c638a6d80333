"""The loader: batches of a worker's seeds, in step with all other workers.

[Note: one batch ahead]
Before a batch is given out, the next one is drawn and its remote features are sent for: they travel while the worker
computes, without a thread. If the loop changes features, which torch notes, the workers sample the batch once more,
with the same draws, and no further ones ahead in this epoch. Messages that nobody will look at, because a loop was
left, are waited for all the same: their memory has to live as long.
"""

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from sar.comm import session
from sar.comm.allocator import set_allocator
from sar.comm.group import Group
from sar.core.graph.graph import GraphShardManager
from sar.errors import CommunicationError, ConfigError
from sar.sampling.batch import Batch, SamplingSource, random_key, start_batch
from sar.sampling.draws import derive_key
from sar.sampling.edge_sampler import EdgePredictionSampler
from sar.sampling.sampler import DistNeighborSampler, GraphSampler
from sar.sampling.sampling_thread import SamplingThread
from sar.sampling.seed_batches import SeedBatches


@dataclass(frozen=True)
class _Ahead:
    """A batch whose remote features are on their way."""

    source: SamplingSource
    generation: int  # of the group when it was started
    wait: Callable[[], Batch]

    def arrived(self, group: Group) -> Batch | None:
        """Wait for it; None if the connections it came over are closed."""
        return self.wait() if group.generation == self.generation and group.stopped is None else None


class DataLoader:
    """A data loader that samples mini-batches from the distributed graph, as lists of DGL blocks.

    All workers iterate together, and get the same number of batches.

    With an `EdgePredictionSampler` seeds are edges, and batches are those of that sampler.

    With equal seeds, `seed` and number of workers the same batches come out, whatever `num_workers` is.

    Args:
        full_graph_manager: the graph, from `construct_full_graph`, in any mode.
        seed_nodes: this worker's nodes: global IDs, (S,) integer; rows by type, {ntype: (S_type,)}; or masks over its
            nodes. May be empty. Seed edges likewise: `dgl.EID`, (S,) integer; rows of `graph.edges[etype].data` by
            type, {etype: (S_type,)}; or masks over these.
        graph_sampler: makes the blocks.
        batch_size: seeds in a batch at most, on each worker.
        drop_last: only whole batches; see `SeedBatches` for what workers with fewer seeds do.
        shuffle: another order in every epoch.
        precompute_optimized_batches: let METIS put seed nodes that lie close together into one batch, once; `shuffle`
            then changes the order of the batches alone, and `drop_last` leaves out the same seeds in every epoch. Seed
            edges are taken as they come.
        optimized_batches_cache: a path asks for such batches, too. No file is written: they are made in every run.
        num_workers: number of batches that a thread prepares ahead; 0 samples in the loop itself. Fields must not
            change during an epoch that a thread prepares.
        seed: of shuffling and sampling; default: drawn from torch's random state.
        foreign_seeds: allow nodes of other partitions, such as `split_seeds` returns, or edges into them.
        format: "dgl" for the graphs of the sampler; "pyg" for a `Data` or `HeteroData` of PyTorch Geometric with `n_id`
            and `e_id`, as its loaders make it: `NeighborLoader` with `batch_size`, `LinkNeighborLoader` from seeds that
            are edges, `ClusterLoader` and `GraphSAINTSampler` for samplers of subgraphs. Default "dgl".

    Raises:
        GraphError, FieldError, ConfigError, CommunicationError: as `SeedBatches` and `DistNeighborSampler.sample`.
    """

    def __init__(
        self,
        full_graph_manager: GraphShardManager,
        seed_nodes: Tensor | Mapping[Any, Tensor],
        graph_sampler: GraphSampler | EdgePredictionSampler,
        batch_size: int = 1,
        drop_last: bool = False,
        shuffle: bool = False,
        precompute_optimized_batches: bool = False,
        optimized_batches_cache: str | os.PathLike[str] | None = None,
        num_workers: int = 0,
        *,
        seed: int | None = None,
        foreign_seeds: bool = False,
        format: Literal["dgl", "pyg"] = "dgl",
    ) -> None:
        self._graph = full_graph_manager
        self._sampler = graph_sampler
        self._num_workers = num_workers
        self._thread: SamplingThread | None = None  # between epochs
        self._epoch = self._batch = 0  # of the next batch
        self._begun = False  # whether somebody iterates there, so that others begin with the next epoch
        self._started = 0  # epochs, to tell a running one from those before it
        self._seed = random_key() if seed is None else seed
        with session.current_group().guard():
            if num_workers < 0:
                raise ConfigError(f"num_workers is {num_workers}; expected at least 0.")
            if format not in ("dgl", "pyg"):
                raise ConfigError(f"format is {format!r}; expected 'dgl' or 'pyg'.")
            optimized, self._edges = None, None
            self._make: Callable[[Batch], Any] = graph_sampler.to_graphs
            if isinstance(graph_sampler, EdgePredictionSampler):
                self._edges, shifts = graph_sampler.find_seeds(full_graph_manager, seed_nodes, foreign=foreign_seeds)
                seeds = torch.arange(len(self._edges), device="cpu")
                if format == "pyg":
                    self._make = partial(graph_sampler.to_data, shifts=shifts)
            else:
                if format == "pyg":
                    self._make = graph_sampler.to_data
                seeds = graph_sampler.checked_seeds(full_graph_manager, seed_nodes, foreign=foreign_seeds)
                asked = precompute_optimized_batches or optimized_batches_cache is not None
                if asked and isinstance(graph_sampler, DistNeighborSampler):
                    optimized = full_graph_manager
            self._batches = SeedBatches(
                seeds, batch_size, drop_last=drop_last, shuffle=shuffle, seed=self._seed, optimized=optimized
            )
            source = graph_sampler.prepare(full_graph_manager)
            self._call = f"{source.graph.signature}: a batch"
        if len(session.current_group().local_peers) == 1:  # else the allocator is set up for spilling
            set_allocator(batches=True)

    def __len__(self) -> int:
        """The number of batches in an epoch, the same on every worker."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        """The batches of the next epoch; after `load_state_dict` those that were left of the saved one."""
        if self._begun:
            self._epoch, self._batch = self._epoch + 1, 0
        self._begun = True
        self._started += 1
        epoch, first = self._epoch, self._batch
        key = derive_key(self._seed, session.rank(), epoch)
        seeds = self._batches.epoch(epoch)
        if self._edges is not None:
            seeds = [self._edges[rows] for rows in seeds]
        batches = [(of_batch, derive_key(key, number)) for number, of_batch in enumerate(seeds)][first:]
        sampled = self._sample_ahead(batches) if self._num_workers and batches else self._sample(batches)
        return self._counted(sampled, self._started)

    def state_dict(self) -> dict[str, Any]:
        """The position of the loader, for `load_state_dict`: after the last batch, also if a loop was left
        before the end of the epoch, or before an epoch.
        """
        graph = self._graph._structure.signature
        return {"seed": self._seed, "epoch": self._epoch, "batch": self._batch, "batches": len(self), "graph": graph}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the `state_dict` of a loader that was made alike, or begin its epoch again if workers have
        other parts of the graph now; not a collective call.

        Raises:
            ConfigError: if the state is of the middle of an epoch with another number of batches.
        """
        batch = state["batch"] if state.get("graph") == self._graph._structure.signature else 0
        if batch and state["batches"] != len(self):
            raise ConfigError(
                f"The loader stopped at batch {batch} of {state['batches']}, but has {len(self)} now; make it with the "
                "same seeds and batch size."
            )
        self._started += 1
        self._seed, self._epoch, self._batch, self._begun = state["seed"], state["epoch"], batch, False
        self._batches.seed = self._seed

    def _counted(self, sampled: Iterator[Batch], started: int) -> Iterator[Any]:
        """The batches as blocks; as long as this epoch is the latest, the loader stands after the last of them."""
        try:
            for batch in sampled:
                if started == self._started:
                    self._batch += 1
                yield self._make(batch)
        finally:
            if started == self._started and self._batch == len(self):
                self._epoch, self._batch, self._begun = self._epoch + 1, 0, False

    def _sample(self, batches: list[tuple[Tensor, int]]) -> Iterator[Batch]:
        """Sample batches one ahead: see [Note: one batch ahead]."""
        group, ahead, changed = session.current_group(), None, False
        try:
            for number, (seeds, key) in enumerate(batches):
                with group.guard():
                    source = self._sampler.prepare(self._graph, self._call)
                    batch = None if ahead is None else ahead.arrived(group)
                    changed |= ahead is not None and (batch is None or ahead.source is not source)
                    if batch is None or changed:
                        batch = start_batch(group, source, seeds, key)()
                    ahead = None
                    if number + 1 < len(batches) and not changed:
                        following = start_batch(group, source, *batches[number + 1])
                        ahead = _Ahead(source, group.generation, following)
                yield batch
        finally:
            if ahead is not None:
                with suppress(CommunicationError):  # which the next call raises
                    ahead.arrived(group)

    def _sample_ahead(self, batches: list[tuple[Tensor, int]]) -> Iterator[Batch]:
        """Let a thread sample: see [Note: a thread ahead]. It stays for the next epoch."""
        with session.current_group().guard() as group:
            source = self._sampler.prepare(self._graph, self._call)
            thread, self._thread = self._thread, None  # so that another iteration meanwhile has a thread of its own
            number = 0 if thread is None or thread.group.stopped is not None else thread.number
            if set(group.agree(self._call, number)) != {number} or thread is None or not number:
                thread = SamplingThread(self._num_workers)
                weakref.finalize(self, thread.end).atexit = False
        try:
            yield from thread.sample(source, batches)
        finally:
            self._thread = thread
