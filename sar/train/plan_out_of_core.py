"""Plans training of partitions that take turns in one process: memory, and bytes written to and read from disk.

As in other plans, the engine's code runs, with the transport of a process that has all partitions. Tensors that leave
memory and return are counted as described in [Note: leaving memory], and messages as in [Note: rows of the same
process].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sar.comm import session
from sar.comm.allocator import SMALL
from sar.comm.group import Group
from sar.comm.tiles import ExchangeSpec, OwnRows
from sar.comm.transport import Shared, SharedTensor, Transport
from sar.outofcore.process_rows import Done, Letters, rows_of_process
from sar.outofcore.residency import COMPARED
from sar.outofcore.spill import CACHED
from sar.outofcore.workers import AT_HAND
from sar.tensors.spillable import tensor_file
from sar.train.counted_graph import GraphCounts, counted_graph
from sar.train.plan import FIRST_EPOCH, CountedPool, MakeModel, MetaMemory, epochs

PLANNED = 8
"""Maximum number of planned partitions; they are taken as typical for the others."""
LAUNCHER = 190 * 10**6
"""Memory of `sar launch` itself, in bytes."""
WAITING = 10**6
"""Bytes that a waiting partition keeps in memory."""
_aten = torch.ops.aten
_MAKE_ZEROS = {each.default for each in (_aten.zeros, _aten.zeros_like, _aten.new_zeros, _aten.zero_)}
USED = 0.85
"""Fraction of the memory to plan for. The rest is for file pages and unforeseen uses."""


@dataclass(frozen=True)
class OutOfCorePlan:
    """Training of all partitions in one process, with one of them in memory at a time. Sizes are in bytes."""

    written: int  # per epoch
    read: int  # per epoch, tensors and messages
    mapped: int  # per epoch, features and structure read through mappings
    stored: int  # in the files at a time
    fixed: int  # memory that does not depend on the number of partitions
    partition: int  # additional memory of the largest partition
    partitions: int  # the smallest number that fits, assuming constant balance and halo; 0 if none does


def plan_out_of_core(counts: GraphCounts, make_model: MakeModel, code: int, memory: int) -> OutOfCorePlan:
    """Plan full-graph training with one partition in memory at a time, in `memory` bytes.

    `counts` have one worker per partition. `make_model` and `code` are as in `plan_training`, but `code` excludes file
    pages.
    """
    number = counts.num_workers
    fixed = code + LAUNCHER + FIRST_EPOCH + number * WAITING
    room = max(memory - fixed, 1)
    by_size = sorted(range(number), key=lambda worker: -sum(counts.nodes[worker].values()))
    planned = by_size[:: -(-number // PLANNED)]  # includes the largest
    plans = [_Partition.plan(counts, worker, make_model, AT_HAND * room) for worker in planned]
    sizes = "written", "read", "mapped", "stored"
    written, read, mapped, stored = (sum(getattr(plan, of) for plan in plans) * number // len(plans) for of in sizes)
    cached = stored <= CACHED * AT_HAND * room
    fixed += max(plan.parameters for plan in plans)
    partition = max(plan.peak - plan.parameters for plan in plans)
    left = USED * memory - fixed
    return OutOfCorePlan(
        written,
        0 if cached else read,
        0 if cached else mapped,
        stored,
        fixed,
        partition,
        partitions=int(-(-partition * number // left)) if left > 0 else 0,
    )


class _Partition(MetaMemory):
    """While active, counts the bytes that a partition writes and reads; `peak` only counts tensors in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.written = self.read = self.mapped = self.stored = self.parameters = 0
        self.constant: set[int] = set()  # keys of storages that do not change, such as features
        self.zeros: set[int] = set()  # keys of storages that leave memory without being written
        self._in_file: dict[int, int] = {}  # sizes of storages by key
        self._away: set[int] = set()  # keys of storages that are out of memory
        self._structure: set[int] = set()  # keys of earlier storages in memory
        self._out = 0  # bytes of live storages out of memory, minus earlier storages in memory

    @classmethod
    def plan(cls, counts: GraphCounts, worker: int, make_model: MakeModel, at_hand: float) -> "_Partition":
        """Train a partition without values for two epochs and count the second."""
        memory = cls()
        group = Group(_Turns(worker, counts, memory), pool=CountedPool(memory))
        group.has_summed = True  # as for a loss divided by a global count
        file: Any = SimpleNamespace(device="cpu", at_hand=at_hand, empty=torch.empty, moved=Tensor.detach, use=id)
        with session.standing_in(group), tensor_file.set_to(file):
            graph, structure = counted_graph(counts, worker, group)
            training = epochs(counts, worker, make_model, graph, memory)
            model = next(training)
            memory.constant = {*memory.sizes} - {p.untyped_storage()._cdata for p in model.parameters()}
            next(training)
            memory.written = memory.read = memory.mapped = memory.stored = memory.peak = 0
            for _ in training:
                pass
        memory.parameters = 4 * sum(parameter.nbytes for parameter in model.parameters())
        memory.stored += counts.data_bytes(worker) + structure.nbytes
        return memory

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, Tensor) and tensor.is_meta:
                    self._use(tensor.untyped_storage())
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                self._in_file.pop(value.untyped_storage()._cdata, None)
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if func in _MAKE_ZEROS and made.is_meta and made.nbytes >= COMPARED:
            self.zeros.add(made.untyped_storage()._cdata)
        return made

    @property
    def in_memory(self) -> int:
        return self.live - self._out

    def _use(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        is_new = key not in self.sizes and size >= SMALL and key not in self._structure
        if is_new or key in self._away:
            (self._structure.add if is_new else self._away.discard)(key)
            self._out -= size
            if is_new or key in self.constant:
                self.mapped += size
            elif key not in self.zeros:
                self.read += size
        self.zeros.discard(key)

    def leave(self) -> None:
        """Move all tensors out of memory; those that are not in the file are written."""
        for key, size in self.sizes.items():
            if size >= SMALL and key not in self._away and key not in self.of_buffers:
                if key not in self._in_file and key not in self.zeros:
                    self._in_file[key] = size
                    self.written += size
                self._away.add(key)
        self._structure.clear()
        self._out = sum(self.sizes[key] for key in self._away)
        self.stored = max(self.stored, sum(self._in_file.values()))

    def _forget(self, key: int, in_buffers: bool) -> None:
        self._out -= self.sizes[key] if key in self._away else 0
        super()._forget(key, in_buffers)
        self._away.discard(key)
        self.zeros.discard(key)
        self._in_file.pop(key, None)


class _Turns(Transport):
    """The transport of one partition of a process; all other partitions are assumed to do the same."""

    def __init__(self, rank: int, counts: GraphCounts, memory: _Partition) -> None:
        super().__init__(rank, counts.num_workers)
        self.local_peers = range(counts.num_workers)
        self._memory = memory

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._memory.leave()
        return super().all_gather(tensor)

    def all_reduce(self, *_: Any) -> None:
        self._memory.leave()

    def swap(self, brought: Any, *, in_order: bool) -> list[Any]:
        self._memory.leave()
        return [brought] * self.world_size

    def shared(self, read: Sequence[Tensor], added_to: Sequence[Tensor]) -> Shared:
        self._memory.zeros -= {tensor.untyped_storage()._cdata for tensor in (*read, *added_to)}
        return Shared(*([_CountedRows(tensor, self._memory) for tensor in tensors] for tensors in (read, added_to)))

    def rows_of_process(self, spec: ExchangeSpec) -> OwnRows:
        return rows_of_process(spec, partial(_CountedLetters, memory=self._memory), self._contents_of)

    def _contents_of(self, tensors: Sequence[Tensor]) -> Any:
        keys = [tensor.untyped_storage()._cdata for tensor in tensors]
        return keys if self._memory.constant.issuperset(keys) else None


@dataclass(eq=False)
class _CountedRows(SharedTensor):
    """Rows of another partition, which are read in place."""

    memory: _Partition

    def will_need(self, rows: Tensor | None = None) -> None:
        number = len(self.rows) if rows is None else len(rows)
        self.memory.read += number * self.rows.nbytes // max(len(self.rows), 1)


class _CountedLetters(Letters):
    """Messages of slices of halo lists, with rows of the same size for all partitions."""

    on_disk = True

    def __init__(self, sizes: Mapping[Any, int], memory: _Partition) -> None:
        self._row_bytes = sum(sizes.values()) / max(sum(halo.end - halo.begin for halo in sizes), 1)
        self._memory = memory

    def write(self, key: Any, message: Tensor) -> Done:
        self._memory.written += round(self._row_bytes * (key.end - key.begin))
        return Done()

    def read(self, key: Any, message: Tensor) -> Done:
        self._memory.read += round(self._row_bytes * (key.end - key.begin))
        return Done()
