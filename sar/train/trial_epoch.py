"""Runs a user's model on one worker's graph without values, forward, backward and optimiser, and counts.

[Note: what is assumed]
Adam, cross-entropy on the nodes of `train_mask`, and `PartitionData` let go of after `construct_full_graph`. The
allocator gives freed memory back, as `initialize_comms` sets it (`docs/memory.md`): then resident memory is what is
live. What code takes before the first epoch differs between installations: `sar plan` measures it.

[Note: which epoch]
The second one is counted. By then there is all that the first one makes for good: edges grouped by source, tiles, and
the optimiser's state.

[Note: counted turns]
With one partition in memory at a time, tensors leave memory at distributed calls. So for each worker it is enough to
note at which calls a tensor is there, and between which it is used: what is made between two calls and lives on is
written, what is used after a later call is read again. Tensors that lie in the file from the first (features, the
structure of the graph, totals of gradients) are neither, and never in memory as a whole.

[Note: sums of gradients]
Where a tensor is read twice, autograd adds the second gradient to the first in place, but not while a dispatch mode is
active: then there are three tensors in place of two for a moment. So the peak is not looked for at a sum in a backward;
what is still there at the next operation counts.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sar.comm import session
from sar.comm.allocator import SMALL
from sar.comm.collectives import gather_grads
from sar.comm.rows import BufferPool
from sar.comm.statistics import BACKWARD, statistics
from sar.core.graph.graph import GraphShardManager
from sar.errors import ConfigError, SarError
from sar.spillable import empty_spillable, tensor_file
from sar.train.counted_graph import META, CallTraffic, CountingGroup, counted_graph
from sar.train.graph_counts import GraphCounts, GraphInfo

MakeModel = Callable[[GraphInfo], nn.Module]

_aten = torch.ops.aten


@dataclass
class TurnBytes:
    """What leaves memory in an epoch with one partition in memory at a time: see [Note: counted turns]."""

    peak: int = 0  # the most that is made between two calls and there at once
    written: int = 0  # made between two calls, and there at the second one
    read: int = 0  # made before a call and used after it


@dataclass(frozen=True)
class TrialEpoch:
    """What one worker takes in an epoch."""

    calls: list[CallTraffic]  # its distributed calls
    sent: int  # all bytes sent, as `sar.comm.statistics()` counts them
    parameters: int  # bytes of the model's parameters
    structure_before: int  # bytes of the graph as constructed
    structure: int  # bytes of it in training
    above_baseline: int  # bytes of tensors at the peak, beyond the graph as constructed, data and parameters
    buffers: int  # of which in message buffers
    turns: TurnBytes  # with one partition in memory at a time


def try_epoch(counts: GraphCounts, worker: int, make_model: MakeModel, *, resident: bool = False) -> TrialEpoch:
    """Train for two epochs without values and count the second: see [Note: which epoch].

    Args:
        worker: the one to look at, of all that `counts` has.
        make_model: called with the `GraphInfo`; its model is called as `model(graph, x)`, with x (N_i, F) features of
            this worker's nodes, or a dictionary of them by node type where there are several.
        resident: whether one partition is in memory at a time, and the tensors of others in a file.

    Raises:
        ConfigError: the model cannot be run without values.
    """
    memory = MetaMemory()
    group = CountingGroup(worker, counts.num_workers, memory.end_turn)
    with session.standing_in(group, _CountedPool(memory, group)), tensor_file.set_to(memory if resident else None):
        graph, structure = counted_graph(counts, worker, group)
        structure_before = structure.nbytes
        with memory:
            model = _on_meta(make_model, counts.info)
            nodes = counts.nodes[worker]
            features = {
                ntype: empty_spillable((nodes[ntype], width), torch.float32, META)
                for ntype, width in counts.info.in_widths.items()
            }
            x = features if len(nodes) > 1 else features[counts.info.ntypes[0]]
            optimizer = torch.optim.Adam(model.parameters())
            before = memory.live
            _train(model, graph, x, optimizer, counts.train_nodes[worker])
            group.calls_made.clear()
            sent = statistics().bytes_sent
            memory.restart()
            _train(model, graph, x, optimizer, counts.train_nodes[worker])
        group.count_messages()
        return TrialEpoch(
            calls=group.calls_made,
            sent=statistics().bytes_sent - sent,
            parameters=sum(parameter.nbytes for parameter in model.parameters()),
            structure_before=structure_before,
            structure=structure.nbytes,
            above_baseline=memory.peak - before,
            buffers=memory.peak_buffers,
            turns=memory.turns,
        )


def _train(model: nn.Module, graph: GraphShardManager, x: Any, optimizer: Optimizer, train_nodes: int) -> None:
    """An epoch of a training script."""
    try:
        loss = _loss(model(graph, x), train_nodes)
        optimizer.zero_grad()
        loss.backward()
        gather_grads(model)
        optimizer.step()
    except SarError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"the model cannot be run on tensors that have sizes and no values: {error} Operations whose results "
            "have a size that depends on values (masks, unique, Python reduce functions) cannot be planned."
        ) from error


def _loss(outputs: Any, train_nodes: int) -> Tensor:
    """Cross-entropy of outputs (N_i, C) on the training nodes; the sum of those of other shapes."""
    losses = []
    for output in tree_leaves(outputs):
        if output.dim() == 2:
            chosen = torch.empty(min(train_nodes, len(output)), dtype=torch.int64, device=META)
            labels = torch.empty(len(output), dtype=torch.int64, device=META)
            losses.append(functional.cross_entropy(output[chosen], labels[chosen], reduction="sum"))
        else:
            losses.append(output.sum())
    return torch.stack(losses).sum() if len(losses) > 1 else losses[0]


class MetaMemory(TorchDispatchMode):
    """While active, counts the bytes of all tensors on "meta" that operations make, as long as they live.

    Where code asks whether values have a property, such as "does any node have no in-edge?", the answer is no, and
    yes if it asks whether all have it. What is copied to the CPU is 1.

    As `sar.spillable.tensor_file` it is the file of [Note: counted turns].

    live: bytes now.
    peak: the most since `restart`.
    peak_buffers: of which in message buffers.
    turns: since `restart`.
    in_buffers: whether what is made now is a message buffer, which stays in memory.
    """

    device = "meta"
    at_hand = float("inf")

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.buffers = self.peak_buffers = 0
        self.turns = TurnBytes()
        self.in_buffers = False
        self._sizes: dict[int, int] = {}  # of the storages that live, by `_cdata`
        self._new: dict[int, int] = {}  # of those made in this turn, which leave memory at its end
        self._new_live = 0
        self._left: dict[int, int] = {}  # of those that have left memory
        self._back: set[int] = set()  # of which this turn has used

    def restart(self) -> None:
        """Forget the peak, and what has left memory."""
        self.peak, self.peak_buffers, self.turns = self.live, self.buffers, TurnBytes()

    def end_turn(self) -> None:
        """Take out of memory what has been made since the last turn, but for small tensors."""
        leaving = {key: size for key, size in self._new.items() if size >= SMALL}
        self.turns.written += sum(leaving.values())
        self._left.update(leaving)
        self._new.clear()
        self._new_live = 0
        self._back.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        on_meta = bool(args) and isinstance(args[0], Tensor) and args[0].is_meta
        if on_meta and func is _aten._local_scalar_dense.default:
            if args[0].dtype != torch.bool:
                raise ConfigError(
                    "the model reads the number that is in a tensor, but a plan has sizes and no values. Compute it on "
                    "the device, or give the model a constant while it is planned."
                )
            return False
        if on_meta and func is _aten.all.default:
            return torch.ones((), dtype=torch.bool, device="cpu")
        if on_meta and func is _aten._to_copy.default and torch.device(kwargs.get("device") or "meta").type != "meta":
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device="cpu")
        for storage in _storages_on_meta((args, kwargs)):
            key = storage._cdata
            if key in self._left and key not in self._back:
                self._back.add(key)
                self.turns.read += self._left[key]
        made = func(*args, **kwargs)
        for storage in _storages_on_meta(made):
            self._count(storage)
        if self.live > self.peak and not (func is _aten.add.Tensor and torch._C._current_graph_task_id() != -1):
            self.peak, self.peak_buffers = self.live, self.buffers
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that may be new, or have another size than when it was last counted."""
        key, size = storage._cdata, storage.nbytes()
        before = self._sizes.get(key, 0)
        if size == before:
            return
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key, self.in_buffers)
        self._sizes[key] = size
        self.live += size - before
        self.buffers += size if self.in_buffers else 0
        if not self.in_buffers:
            self._new[key] = size
            self._new_live += size - before
            self.turns.peak = max(self.turns.peak, self._new_live)

    def _forget(self, key: int, in_buffers: bool) -> None:
        size = self._sizes.pop(key)
        self.live -= size
        self.buffers -= size if in_buffers else 0
        self._new_live -= self._new.pop(key, 0)
        self._left.pop(key, None)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As `TensorFile.empty`."""
        return self.moved(torch.empty(shape, dtype=dtype, device=META))

    def moved(self, tensor: Tensor) -> Tensor:
        """As `TensorFile.moved`: it is not in memory."""
        self._new_live -= self._new.pop(tensor.untyped_storage()._cdata, 0)
        return tensor

    def use(self, tensor: Tensor) -> None:
        """As `TensorFile.use`: kernels have nothing to do on this device."""


class _CountedPool(BufferPool):
    """Message buffers on "meta", counted as such."""

    def __init__(self, memory: MetaMemory, group: CountingGroup) -> None:
        super().__init__(META)
        self._memory = memory
        self._group = group

    def take(self, size: int) -> Tensor:
        self._memory.in_buffers = True
        try:
            return super().take(size)
        finally:
            self._memory.in_buffers = False

    def clear(self) -> None:
        """The end of an exchange; workers wait there for each other's gradients."""
        super().clear()
        if self._group.calls_made[-1].call.startswith(BACKWARD):
            self._memory.end_turn()


def _on_meta(make_model: MakeModel, info: GraphInfo) -> nn.Module:
    """The model, without values."""
    with META:
        model = make_model(info)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the function that makes the model returned a {type(model).__name__}; expected a Module.")
    return model.to(META)


def _storages_on_meta(given: Any) -> Iterator[torch.UntypedStorage]:
    return (one.untyped_storage() for one in tree_leaves(given) if isinstance(one, Tensor) and one.is_meta)
