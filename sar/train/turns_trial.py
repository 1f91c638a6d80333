"""One of the virtual workers of a process, without values: what it writes, reads and holds in an epoch.

[Note: planned turns]
Nothing of [Note: leaving memory] is restated here. The model runs as in `trial_epoch.py`, with the group, the exchange
and the `Residency` of a virtual worker, on tensors of torch's device "meta" and with a spill file that only counts. The
other workers are there in so far as their meetings end: they bring what this one brings. A worker leaves memory at each
meeting but those to which it comes last: who does goes on first, and so comes first to the next one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from sar.comm import session
from sar.comm.virtual.group import VirtualGroup
from sar.comm.virtual.in_files import TensorsInFiles
from sar.comm.virtual.residency import LEAST_BYTES, Residency, memory_is_watched
from sar.comm.virtual.spill import LEAST_MAPPED, Published, Slot, SpillFile
from sar.comm.virtual.turns import Turns
from sar.train.counted_graph import counted_graph
from sar.train.counting_group import CountingGroup
from sar.train.graph_counts import GraphCounts
from sar.train.meta_memory import CountedPool, MetaMemory
from sar.train.trial_epoch import MakeModel, Trainer, on_meta


class CountedFile(SpillFile):
    """A spill file that is not there.

    written_in_place, read_in_place: bytes of what is mapped, at most.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin to count."""
        self.written = self.read = self.written_in_place = self.read_in_place = 0

    def slot(self, nbytes: int) -> "_CountedSlot":
        return _CountedSlot(self, 0, nbytes, 0)

    def free(self, begin: int, room: int) -> None:
        """Nothing is kept of slots."""


class _CountedSlot(Slot):
    file: CountedFile

    def write(self, address: int) -> None:
        self.file.written += self.nbytes

    def read(self, address: int, begin: int = 0, end: int | None = None) -> None:
        self.file.read += self.nbytes

    def fill(self, address: int) -> bool:
        self.read(address)
        return self.nbytes >= LEAST_MAPPED

    def mapped(self, shape: Sequence[int], dtype: torch.dtype, begin: int = 0) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")


class _CountedInFiles(TensorsInFiles):
    def __init__(self, residency: "CountedResidency") -> None:
        super().__init__(residency.file)
        self._residency = residency

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._residency.settle(torch.empty(shape, dtype=dtype, device="meta"))

    def settled(self, tensor: Tensor) -> Tensor:
        return self._residency.settle(tensor)


class CountedResidency(Residency):
    """What a virtual worker has in memory, in numbers.

    Args:
        memory: told of what leaves and comes back.
        others: V - 1, which read all that is published, at most.
    """

    device = "meta"
    file: CountedFile

    def __init__(self, memory: MetaMemory, rank: int, others: int) -> None:
        super().__init__(CountedFile(), rank)
        self.memory = memory
        self.others = others
        self.in_files = _CountedInFiles(self)
        self.settled: dict[int, Tensor] = {}  # by storage; kept, so that no other storage can be taken for it

    def leave(self) -> None:
        known = [storage for entry in self._entries.values() if (storage := entry.storage()) is not None]
        super().leave()
        for storage in known:
            self.memory.count(storage)

    def _bring_back(self, entry: Any, storage: torch.UntypedStorage) -> None:
        super()._bring_back(entry, storage)
        self.memory.count(storage, 0 if entry.under is not None else entry.nbytes)

    def _unpack(self, handle: Any) -> Tensor:
        tensor = super()._unpack(handle)
        if handle.gone:
            self.memory.count(tensor.untyped_storage(), 0 if handle.entry.under is not None else None)
        return tensor

    def written(self, tensor: Tensor) -> None:
        super().written(tensor)
        if tensor.is_meta and tensor.untyped_storage()._cdata in self._entries:
            self.memory.count(tensor.untyped_storage(), tensor.untyped_storage().nbytes())

    def settle(self, tensor: Tensor) -> Tensor:
        """Take a tensor to be one of those of [Note: tensors in files]."""
        storage = tensor.untyped_storage()
        self._entries.pop(storage._cdata, None)
        self.settled[storage._cdata] = tensor
        self.memory.count(storage, 0)
        return tensor

    def _use(self, tensor: Tensor) -> int:
        self._look_at(tensor)
        return super()._use(tensor)

    def ensure(self, tensor: Tensor) -> None:
        self._look_at(tensor)
        super().ensure(tensor)

    def _look_at(self, tensor: Tensor) -> None:
        if tensor.untyped_storage()._cdata in self.settled:
            self.file.read_in_place += tensor.nbytes

    def publish(self, tensor: Tensor) -> Published:
        self.file.read_in_place += self.others * tensor.nbytes
        if tensor.untyped_storage()._cdata in self.settled:
            return Published(tensor.detach())
        if tensor.is_meta:
            return super().publish(tensor)._replace(slot=None)
        if tensor.nbytes >= LEAST_BYTES:  # copied to the CPU to travel, in a plan only
            self.file.written += tensor.nbytes
        return Published(tensor.detach().clone())

    def open_to_others(self, total: Tensor) -> Published:
        self.file.written_in_place += self.others * total.nbytes
        self.file.read_in_place += self.others * total.nbytes
        return super().open_to_others(total)


class _OthersAlike(Turns):
    """Turns of which one worker sees its own, as others bring what it brings."""

    def __init__(self, size: int, first: int) -> None:
        super().__init__(size, first)
        self._last = size - 1

    def meet(
        self,
        who: int,
        kind: str,
        brought: Any,
        finish: Callable[[list[Any]], Any],
        leave: Callable[[], None],
        *,
        afresh: bool = False,
    ) -> Any:
        if self._last != who or (afresh and who != 0):
            leave()
        self._last = ((self.size if afresh else self._last) - 1) % self.size
        return finish([brought] * self.size)


@dataclass(frozen=True)
class TurnsTrial:
    """What one virtual worker takes in an epoch, in bytes.

    written, read: as its `SpillFile` counts them.
    written_in_place, read_in_place: of what is mapped from there, at most: features, what is published for the others
        of its process, and the gradients that come back.
    peak: of tensors in memory, while it has the turn.
    """

    written: int
    read: int
    written_in_place: int
    read_in_place: int
    peak: int


def try_turns(counts: GraphCounts, worker: int, size: int, make_model: MakeModel) -> TurnsTrial:
    """Train for two epochs as one of the virtual workers of a process, and count the second: see [Note: planned turns].

    Args:
        counts: of all p workers.
        worker: the one to look at.
        size: V, the workers of a process.
        make_model: as in `try_epoch`.

    Raises:
        ConfigError: the model cannot be run without values.
    """
    memory = MetaMemory(sums_in_place=False)
    process, place = divmod(worker, size)
    residency = CountedResidency(memory, worker, size - 1)
    group = VirtualGroup(
        CountingGroup(process, counts.num_workers // size), _OthersAlike(size, process * size), place, residency
    )
    with session.standing_in(group, CountedPool(memory)), memory_is_watched(), residency.in_thread(), memory:
        with group.guard():
            graph, _ = counted_graph(counts, worker, group)
        model = on_meta(make_model, counts.info)
        with _disable_current_modes():
            trainer = Trainer(counts, worker, graph, model)
        for features in tree_leaves(trainer.x):
            residency.settle(features)
        trainer.epoch()
        file = residency.file
        file.restart()
        memory.restart()
        trainer.epoch()
        return TurnsTrial(file.written, file.read, file.written_in_place, file.read_in_place, memory.peak)
