"""Plans memory and traffic of training, by running the user's model on each worker's graph without values.

Bytes sent are exact for a training loop with one `gather_grads` per epoch. Memory is within 15 % if most of it is
tensors.

[Note: assumptions of plans]
Adam, cross-entropy on the nodes of `train_mask`, and `PartitionData` deleted after `construct_full_graph`. The
allocator returns freed memory, as `initialize_comms` configures it (`docs/memory.md`), so resident memory is live
memory. The memory of code before the first epoch differs between installations: `sar plan` measures it.

[Note: which epoch]
The second epoch is counted. The first one creates permanent data: edges grouped by source, tiles, and the optimizer
state.

[Note: sums of gradients]
If a tensor is read twice, autograd adds the second gradient to the first in place, except while a dispatch mode is
active, which temporarily needs three tensors instead of two. So we do not update the peak at sums in a backward; memory
that is still in use at the next operation counts.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sar.comm import session
from sar.comm.collectives import gather_grads
from sar.comm.group import Group
from sar.comm.rows import BufferPool
from sar.comm.statistics import BACKWARD, listeners, statistics
from sar.comm.transport import Transport
from sar.core.graph.graph import GraphShardManager
from sar.errors import ConfigError, SarError
from sar.host.ranges import running_module
from sar.train.counted_graph import META, GraphCounts, GraphInfo, counted_graph
from sar.train.model_call import call_model

MakeModel = Callable[[GraphInfo], nn.Module]

FIRST_EPOCH = 12 * 10**6  # bytes of the first epoch apart from tensors: mostly code and heap fragmentation

_aten = torch.ops.aten


@dataclass
class CallPlan:
    """Bytes that a worker sends for one distributed call of the model in an epoch, including alignment."""

    layer: str  # name of the calling module in the model
    operation: str
    forward: int  # rows that the worker sends to their readers
    backward: int = 0  # gradients of fetched rows, and its rows again if the backward reads them


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of resident memory at the peak of training, by use."""

    code: int
    data: int  # features, labels, masks and IDs
    structure: int  # the graph, with its copies for the backward and for tiles
    activations: int  # tensors of layers, for own nodes
    parameters: int  # with gradients and optimizer state
    buffers: int  # message buffers at the peak

    @property
    def total(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True)
class WorkerPlan:
    """One worker's traffic in an epoch with one step of the optimizer, and its memory, in bytes."""

    bytes_sent: int  # total, including agreements before calls, as counted by `sar.comm.statistics()`
    calls: list[CallPlan]
    parameters_sent: int  # gradients of the parameters in `gather_grads`
    memory: MemoryPlan
    above_baseline: int  # peak above the level before the first epoch, as benchmarks measure it


def plan_training(counts: GraphCounts, make_model: MakeModel, code: int) -> list[WorkerPlan]:
    """Plan full-graph training of a model for each worker, with the current `Config`.

    Args:
        counts: counts of the graph.
        make_model: called with the `GraphInfo`; returns the model, which is called as `model(graph, x)`, with features
            x of this worker's nodes, (N_i, F), or a dictionary by node type if there are several.
        code: memory of code before the first epoch, in bytes.

    Raises:
        ConfigError: the model cannot be run without values.
    """
    return [_plan_worker(counts, worker, make_model, code) for worker in range(counts.num_workers)]


def _plan_worker(counts: GraphCounts, worker: int, make_model: MakeModel, code: int) -> WorkerPlan:
    """Train for two epochs without values and count the second: see [Note: which epoch]."""
    memory = MetaMemory()
    group = Group(Transport(worker, counts.num_workers), pool=CountedPool(memory))
    with session.standing_in(group):
        graph, structure = counted_graph(counts, worker, group)
        structure_before = structure.nbytes
        training = epochs(counts, worker, make_model, graph, memory)
        model = next(training)
        before = memory.live
        next(training)
        traffic = _Traffic(group)
        sent = statistics().bytes_sent
        memory.peak, memory.peak_buffers = memory.live, memory.buffers
        listeners.append(traffic)
        try:
            next(training, None)
        finally:
            listeners.remove(traffic)
        sent = statistics().bytes_sent - sent
    model_bytes = sum(parameter.nbytes for parameter in model.parameters())
    above = memory.peak - before
    planned = MemoryPlan(
        code=code + FIRST_EPOCH,
        data=counts.data_bytes(worker),
        structure=structure.nbytes,
        activations=max(0, above - (structure.nbytes - structure_before) - 3 * model_bytes - memory.peak_buffers),
        parameters=4 * model_bytes,  # parameters, gradients, and two moments of Adam
        buffers=memory.peak_buffers,
    )
    baseline = code + planned.data + structure_before + model_bytes
    calls = [call for _, call in traffic.calls]
    return WorkerPlan(sent, calls, traffic.of_parameters, planned, planned.total - baseline)


def epochs(
    counts: GraphCounts, worker: int, make_model: MakeModel, graph: GraphShardManager, memory: "MetaMemory"
) -> Iterator[nn.Module]:
    """Train a worker's graph without values for two epochs, while `memory` counts. Yields the model before each."""
    with memory:
        with META:
            model = make_model(counts.info)
        if not isinstance(model, nn.Module):
            found = type(model).__name__
            raise ConfigError(f"the function that makes the model returned a {found}; expected a Module.")
        model.to(META)
        nodes = counts.nodes[worker]
        features = {
            f"{ntype}/x": torch.empty(nodes[ntype], width, device=META)
            for ntype, width in counts.info.in_widths.items()
        }
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            yield model
            _train(model, graph, features, optimizer, counts.train_nodes[worker])


class _Traffic:
    """Records distributed calls: the calling module, and the bytes sent."""

    def __init__(self, group: Group) -> None:
        self.calls: list[tuple[str, CallPlan]] = []  # with the calls' texts, without graph and settings
        self.of_parameters = 0  # bytes of gradients
        self._begins: list[int] = []  # bytes sent before each active call
        before = statistics().bytes_sent
        with group.guard():
            group.agree("counting the bytes of an agreement")
        self._agreement = statistics().bytes_sent - before

    def begins(self, call: str) -> None:
        """Called when a call begins. Its agreement is not counted."""
        self._begins.append(statistics().bytes_sent + self._agreement)

    def ends(self, call: str) -> None:
        """Called when the call ends."""
        sent = statistics().bytes_sent - self._begins.pop()
        text = call.removeprefix(BACKWARD).partition(";")[0]
        if text.startswith("gather_grads"):
            self.of_parameters += sent
        elif call.startswith(BACKWARD):
            # Autograd processes the last call first, so among equal calls this is the last one.
            next(made for of, made in reversed(self.calls) if of == text and not made.backward).backward = sent
        else:
            name, kind = running_module()
            self.calls.append((text, CallPlan(name or kind, text.partition(":")[0].partition(" of ")[0], sent)))


def _train(
    model: nn.Module, graph: GraphShardManager, features: dict[str, Tensor], optimizer: Optimizer, train_nodes: int
) -> None:
    """An epoch of a training script: cross-entropy of outputs (N_i, C), and the sum of outputs of other shapes."""
    try:
        losses = []
        for output in tree_leaves(call_model(model, graph, features)):
            if output.dim() == 2:
                chosen = torch.empty(min(train_nodes, len(output)), dtype=torch.int64, device=META)
                labels = torch.empty(len(output), dtype=torch.int64, device=META)
                losses.append(functional.cross_entropy(output[chosen], labels[chosen], reduction="sum"))
            else:
                losses.append(output.sum())
        loss = torch.stack(losses).sum() if len(losses) > 1 else losses[0]
        optimizer.zero_grad()
        loss.backward()
        session.current_group().has_summed = True  # the loss is a sum
        gather_grads(model)
        optimizer.step()
    except SarError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"the model cannot be run on tensors that have sizes and no values: {error} Operations whose results "
            "have a size that depends on values (masks, unique, Python reduce functions) cannot be planned."
        ) from error


class MetaMemory(TorchDispatchMode):
    """While active, counts the bytes of all live tensors on "meta" that operations have created.

    `any` of values, for example to test for nodes without in-edges, is False, and `all` is True. Values copied to the
    CPU are 1.

    live: current bytes.
    buffers: current bytes in message buffers.
    peak, peak_buffers: the maximum of `live`, and `buffers` at that moment.
    in_buffers: whether new tensors are message buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.buffers = self.peak_buffers = 0
        self.in_buffers = False
        self.sizes: dict[int, int] = {}  # sizes of live storages by their key, `_cdata`
        self.of_buffers: set[int] = set()  # keys of message buffers

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, because skipping torch's compiler would take a third of the time, and nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            if func is _aten._local_scalar_dense.default:
                if args[0].dtype != torch.bool:
                    raise ConfigError(
                        "the model reads the number that is in a tensor, but a plan has sizes and no values. Compute "
                        "it on the device, or give the model a constant while it is planned."
                    )
                return False
            if func is _aten.all.default:
                return torch.ones((), dtype=torch.bool, device="cpu")
            if func is _aten._to_copy.default and torch.device(kwargs.get("device") or "meta").type != "meta":
                return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device="cpu")
        made = func(*args, **kwargs)
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self._count(tensor.untyped_storage())
        is_sum = func is _aten.add.Tensor and torch._C._current_graph_task_id() != -1
        if self.in_memory > self.peak and not is_sum:
            self.peak, self.peak_buffers = self.in_memory, self.buffers
        return made

    @property
    def in_memory(self) -> int:
        """Bytes of live tensors in memory."""
        return self.live

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that may be new or may have changed its size."""
        key, size = storage._cdata, storage.nbytes()
        if key not in self.sizes:
            weakref.finalize(storage, self._forget, key, self.in_buffers)
            self.of_buffers |= {key} if self.in_buffers else set()
        grown = size - self.sizes.get(key, 0)
        self.sizes[key] = size
        self.live += grown
        self.buffers += grown if self.in_buffers else 0

    def _forget(self, key: int, in_buffers: bool) -> None:
        size = self.sizes.pop(key)
        self.live -= size
        self.buffers -= size if in_buffers else 0
        self.of_buffers.discard(key)


class CountedPool(BufferPool):
    """Message buffers on "meta", counted as such."""

    def __init__(self, memory: MetaMemory) -> None:
        super().__init__(META)
        self._memory = memory

    def take(self, size: int) -> Tensor:
        self._memory.in_buffers = True
        try:
            return super().take(size)
        finally:
            self._memory.in_buffers = False
