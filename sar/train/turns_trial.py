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
from sar.comm.allocator import SMALL
from sar.comm.group import Group
from sar.outofcore.in_files import TensorsInFiles
from sar.outofcore.residency import LEAST_BYTES, Residency
from sar.outofcore.spill import Pages, Published, Slot, SpillFile
from sar.outofcore.transport import InProcessTransport
from sar.outofcore.turns import Turns
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

    def write(self, address: int, *, pages: bool = False) -> None:
        self.file.written += self.nbytes

    def mapped(self, shape: Sequence[int], dtype: torch.dtype, begin: int = 0) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")


class _CountedPages(Pages):
    """written: whether an operation has written here since others may read the slot."""

    written = False

    def move(self) -> None:
        self.slot.write(self.address)
        self.frozen = self.written = False

    def freeze(self) -> None:
        self.renew()
        self.frozen = True

    def changed(self) -> bool:
        return self.written

    def populate(self) -> None:
        self.slot.file.read += self.slot.nbytes


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
        memory: told of what leaves.
        others: V - 1, which read all that is published, at most.
    """

    device = "meta"
    file: CountedFile

    def __init__(self, memory: MetaMemory, others: int) -> None:
        super().__init__(CountedFile())
        self.memory = memory
        self.others = others
        self.in_files = _CountedInFiles(self)
        self.settled: dict[int, Tensor] = {}  # by storage; kept, so that no other storage can be taken for it

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for i, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                target = args[i] if i < len(args) else (kwargs or {}).get(argument.name)
                for tensor in tree_leaves(target):
                    self._written(tensor)
        return result

    def _written(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        entry = self._entries.get(storage._cdata)
        if entry is not None and isinstance(entry.pages, _CountedPages) and entry.pages.frozen:
            entry.pages.written = True
            self.memory.count(storage, storage.nbytes())

    def leave(self) -> None:
        super().leave()
        for entry in self._entries.values():
            storage = entry.storage()
            if storage is not None and entry.pages is not None:
                self.memory.count(storage, 0)

    def _pages_for(self, storage: torch.UntypedStorage) -> Pages | None:
        if storage.nbytes() < SMALL:
            return None
        return _CountedPages(0, self.file.slot(storage.nbytes()))

    def settle(self, tensor: Tensor) -> Tensor:
        """Take a tensor to be one of those of [Note: tensors in files]."""
        storage = tensor.untyped_storage()
        self._entries.pop(storage._cdata, None)
        self.settled[storage._cdata] = tensor
        self.memory.count(storage, 0)
        return tensor

    def _use(self, tensor: Tensor) -> int:
        if tensor.untyped_storage()._cdata in self.settled:
            self.file.read_in_place += tensor.nbytes
        return super()._use(tensor)

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
    residency = CountedResidency(memory, size - 1)
    processes, turns = CountingGroup(process, counts.num_workers // size), _OthersAlike(size, process * size)
    group = Group(InProcessTransport(processes, turns, place, residency))
    with session.standing_in(group, CountedPool(memory)), residency.in_thread(), memory:
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
