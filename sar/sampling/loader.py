"""The loader: batches of a worker's seeds, sampled together with all other workers, in the loop or in a thread.

[Note: a thread ahead]
Sampling a batch takes several exchanges among all workers. So the threads of all workers form a second group, with
separate connections: its messages cannot meet those of training. Before each batch the threads agree on it, and on
whether a worker has left its loop. If any worker has, no thread samples this batch, so no thread waits for one that has
stopped; a worker that continues regardless raises an error. An error in a thread stops the second group and reaches all
threads, and each raises it in the loop of its worker.

Kernels and waits release Python's lock, so a thread can use another core.
"""

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, Final, Literal

import torch
from torch import Tensor

from sar.comm import session
from sar.comm.allocator import set_allocator
from sar.comm.group import Group
from sar.comm.transport import LEFT_EARLY
from sar.core.graph.graph import GraphShardManager
from sar.errors import ConfigError, DisagreementError
from sar.logging_setup import logger
from sar.sampling.batch import Batch, SamplingSource, draw_batch
from sar.sampling.draws import derive_key, random_key
from sar.sampling.edge_sampler import EdgePredictionSampler
from sar.sampling.sampler import DistNeighborSampler
from sar.sampling.seeds import SeedBatches

EXIT_SECONDS: Final = 5.0  # how long the interpreter waits for a thread when it exits


class DataLoader:
    """A data loader that samples mini-batches from the distributed graph, as lists of DGL blocks.

    All workers iterate together and yield the same number of batches. With an `EdgePredictionSampler`, seeds are edges,
    and batches are as described there. Batches depend on the seeds, on `seed` and on the number of workers, but not on
    `num_workers`.

    Args:
        full_graph_manager: the graph, from `construct_full_graph`, in any mode.
        seed_nodes: nodes of this worker: global IDs, (S,) integer, row numbers by type, {ntype: (S_type,)}, or bool
            masks. For seed edges: `dgl.EID`, (S,) integer, rows of `graph.edges[etype].data` by type, {etype:
            (S_type,)}, or bool masks. May be empty.
        graph_sampler: the sampler.
        batch_size: maximum number of seeds per batch on each worker. Default 1.
        drop_last: drop incomplete batches; `SeedBatches` describes workers with fewer seeds. Default False.
        shuffle: reshuffle the seeds in every epoch. Default False.
        precompute_optimized_batches: use METIS, once, to put nearby seed nodes into the same batch. `shuffle` then
            permutes the batches, and `drop_last` drops the same seeds in every epoch. Ignored for seed edges.
        optimized_batches_cache: a path has the effect of `precompute_optimized_batches`. No file is written.
        num_workers: number of batches that a background thread prepares in advance; 0 (default) samples in the loop.
            With a thread, graph features must not change during an epoch.
        seed: seed for shuffling and sampling. Default: drawn from torch's random state.
        foreign_seeds: allow nodes of other partitions or edges into them, as `split_seeds` returns them. Default False.
        format: "dgl" for the graphs of the sampler; "pyg" for a `Data` or `HeteroData` of PyTorch Geometric with `n_id`
            and `e_id`, as from `NeighborLoader`, or for seed edges from `LinkNeighborLoader`. Default "dgl".

    Raises:
        GraphError, FieldError, ConfigError, CommunicationError: as in `SeedBatches` and `DistNeighborSampler.sample`.
    """

    def __init__(
        self,
        full_graph_manager: GraphShardManager,
        seed_nodes: Tensor | Mapping[Any, Tensor],
        graph_sampler: DistNeighborSampler | EdgePredictionSampler,
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
            if not isinstance(full_graph_manager, GraphShardManager):
                raise ConfigError(f"The graph is {full_graph_manager!r}; expected a distributed one, as data.graph.")
            if not isinstance(graph_sampler, DistNeighborSampler | EdgePredictionSampler):
                raise ConfigError(f"The sampler is {graph_sampler!r}; expected sar.DistNeighborSampler or the like.")
            source = graph_sampler.prepare(full_graph_manager)
            self._call = f"{source.graph.signature}: a batch"
            seeds, shifts = graph_sampler.find_seeds(
                full_graph_manager, source.graph, seed_nodes, foreign=foreign_seeds
            )
            self._make: Callable[[Batch], Any] = graph_sampler.to_graphs
            if format == "pyg":
                self._make = partial(graph_sampler.to_data, shifts=shifts)
            # Seed edges are rows of a table; their batches have the row numbers.
            self._edges = seeds if isinstance(graph_sampler, EdgePredictionSampler) else None
            optimized = precompute_optimized_batches or optimized_batches_cache is not None
            self._batches = SeedBatches(
                seeds if self._edges is None else torch.arange(len(seeds), device="cpu"),
                batch_size,
                drop_last=drop_last,
                shuffle=shuffle,
                seed=self._seed,
                optimized=full_graph_manager if optimized and isinstance(graph_sampler, DistNeighborSampler) else None,
            )
        if len(session.current_group().local_peers) == 1:  # else the allocator is set up for spilling
            set_allocator(batches=True)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name in signature(DataLoader).parameters:
            raise ConfigError(f"{name} of a sar.DataLoader cannot be changed; make another loader on all workers.")
        super().__setattr__(name, value)

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
        if first and first == len(self):
            logger.warning("epoch %d of the loader was saved after its last batch, so that it has none left", epoch)
        key = derive_key(self._seed, session.rank(), epoch)
        seeds = self._batches.epoch(epoch)
        if self._edges is not None:
            seeds = [self._edges[rows] for rows in seeds]
        batches = [(of_batch, derive_key(key, number)) for number, of_batch in enumerate(seeds)][first:]
        sampled = self._sample_ahead(batches) if self._num_workers and batches else self._sample(batches)
        return self._counted(sampled, self._started)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader for `load_state_dict`: after the last batch that was yielded."""
        graph = self._graph._structure.signature
        return {"seed": self._seed, "epoch": self._epoch, "batch": self._batch, "batches": len(self), "graph": graph}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the `state_dict` of a loader with the same arguments. Not a collective call.

        If the workers' parts of the graph have changed, the epoch starts again.

        Raises:
            ConfigError: the state is inside an epoch with a different number of batches.
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
        """Sample each batch when the loop asks for it, with the fields and settings of that moment."""
        for number, (seeds, key) in enumerate(batches):
            with session.current_group().guard() as group:
                source = self._sampler.prepare(self._graph, f"{self._call}, {number} of epoch {self._epoch}")
                batch = draw_batch(group, source, seeds, key)
            yield batch

    def _sample_ahead(self, batches: list[tuple[Tensor, int]]) -> Iterator[Batch]:
        """Let a thread sample: see [Note: a thread ahead]. It stays for the next epoch."""
        with session.current_group().guard() as group:
            source = self._sampler.prepare(self._graph, self._call)
            thread, self._thread = self._thread, None  # so that a concurrent iteration uses a separate thread
            number = 0 if thread is None or thread.group.failure is not None else thread.number
            if set(group.agree(self._call, number)) != {number} or thread is None or not number:
                thread = SamplingThread(self._num_workers)
                weakref.finalize(self, thread.end).atexit = False
        try:
            yield from thread.sample(source, batches)
        finally:
            self._thread = thread


class SamplingThread(threading.Thread):
    """Samples one epoch after the other, up to `ahead` batches ahead: see [Note: a thread ahead].

    Made by all workers together, inside `group.guard()`; ends after `end`, or an error.
    """

    def __init__(self, ahead: int) -> None:
        super().__init__(name="sar-sampling", daemon=True)
        group, call = session.current_group(), f"starting a thread that samples {ahead} batches ahead"
        if len(group.local_peers) > 1:
            raise ConfigError(
                "Workers that share a process (SAR_RESIDENT) cannot sample batches ahead; leave num_workers at 0."
            )
        group.agree(call)
        name = group.new_name(call)
        self.number = int(name, 16)  # equal on all workers
        self.group = session.group_beside(f"sampling/{name}")
        self._ahead = ahead
        self._epochs: queue.SimpleQueue[_Epoch | None] = queue.SimpleQueue()
        self._sampling: _Epoch | None = None
        self.start()

    def run(self) -> None:
        while self.group.failure is None and (epoch := self._epochs.get()) is not None:
            epoch.make(self.group)
            del epoch  # with its batches
        self.group.close()

    def sample(self, source: SamplingSource, batches: Sequence[tuple[Tensor, int]]) -> Iterator[Batch]:
        """Sample an epoch with batches of these seeds and keys. Raises errors of this thread and of other workers."""
        epoch = self._sampling = _Epoch(source, batches, threading.Semaphore(self._ahead))
        self._epochs.put(epoch)
        try:
            for _ in batches:
                with session.current_group().guard() as group:
                    batch = epoch.made.get()  # the thread's own waits are bounded
                    epoch.allowed.release()
                    if isinstance(batch, BaseException):
                        group.abort(batch)
                        raise batch
                yield batch
        finally:
            epoch.leave()
            self._sampling = None

    def end(self) -> None:
        """Let the thread end at once, or in an unfinished epoch after the other workers have been told."""
        self._epochs.put(None)
        if self._sampling is not None:
            self._sampling.leave()


@dataclass(eq=False)
class _Epoch:
    """The batches of an epoch, passed from the thread to the loop."""

    source: SamplingSource
    batches: Sequence[tuple[Tensor, int]]  # seeds and key of each
    allowed: threading.Semaphore  # batches that the thread may still sample
    made: "queue.SimpleQueue[Batch | BaseException]" = field(default_factory=queue.SimpleQueue)
    left: bool = False  # whether the loop has been left

    def make(self, group: Group) -> None:
        """Sample the batches, in the thread; an error replaces a batch."""
        try:
            for seeds, key in self.batches:
                self.allowed.acquire()
                with group.guard():
                    left = group.agree(f"{self.source.graph.signature}: a batch ahead", self.left)
                    if any(left):
                        workers = [rank for rank, has_left in enumerate(left) if has_left]
                        self.made.put(DisagreementError(f"Workers {workers} have left the loop. {LEFT_EARLY}"))
                        return
                    self.made.put(draw_batch(group, self.source, seeds, key))
        except BaseException as error:
            self.made.put(error)

    def leave(self) -> None:
        """Let the thread tell other workers that no more batches are needed."""
        self.left = True
        self.allowed.release()


@atexit.register
def _end_all() -> None:
    """End all threads before the interpreter does, which would interrupt them anywhere."""
    for thread in threading.enumerate():
        if isinstance(thread, SamplingThread):
            thread.end()
            thread.join(EXIT_SECONDS)
