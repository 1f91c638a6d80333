"""Predicts what training a model on a partition directory takes: bytes sent, and memory of every worker."""

from dataclasses import asdict, dataclass
from typing import Any

from sar.comm.statistics import BACKWARD
from sar.partition.inspect.text_tables import as_text
from sar.train.graph_counts import GraphCounts
from sar.train.trial_epoch import MakeModel, TrialEpoch, try_epoch

PROCESS = 480 * 10**6
"""Bytes of Python, torch, DGL, sar and the compiler of the kernels, before the first epoch, with DGL 1.1.3 on a CPU."""
FIRST_EPOCH = 12 * 10**6
"""Bytes that the first epoch brings beside tensors: code above all, and holes in the heap."""
PARTS = ("process", "data", "structure", "activations", "parameters", "buffers")
"""What a `MemoryPlan` adds up."""
_GATHERING = "gather_grads"


@dataclass
class LayerTraffic:
    """Bytes that a worker sends for one distributed call of a model in an epoch: messages with their alignment.

    call: what it computes.
    forward: its rows to their readers.
    backward: gradients of the rows of others, and its rows again where the backward reads them.
    """

    call: str
    forward: int
    backward: int = 0


@dataclass(frozen=True)
class EpochTraffic:
    """Bytes that a worker sends in an epoch with one step of the optimiser.

    parameters: gradients of the parameters in `gather_grads`.
    sent: all together and with the agreements before each call, as `sar.comm.statistics()` counts it.
    """

    layers: list[LayerTraffic]
    parameters: int
    sent: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes at the peak of training.

    process: code.
    data: features, labels, masks and IDs.
    structure: the graph, and what it makes for the backward and for tiles.
    activations: what layers keep and compute with, own nodes only.
    parameters: with gradients and the optimiser's state.
    buffers: of messages, at that moment.
    before: what of all this is there just before the first epoch.
    """

    process: int
    data: int
    structure: int
    activations: int
    parameters: int
    buffers: int
    before: int

    @property
    def total(self) -> int:
        """Resident memory at the peak."""
        return self.process + self.data + self.structure + self.activations + self.parameters + self.buffers

    @property
    def rise(self) -> int:
        """How far training rises above the level just before its first epoch, which is what benchmarks measure."""
        return self.total - self.before

    @property
    def fixed(self) -> int:
        """What does not fall with the number of workers."""
        return self.process + self.parameters + self.buffers

    def workers_to_fit(self, workers: int, memory: int) -> int | None:
        """Where this is one of so many workers, the number of which one takes `memory` bytes, by proportion."""
        room = memory - self.fixed
        return -(-(self.total - self.fixed) * workers // room) if room > 0 else None


@dataclass(frozen=True)
class WorkerPlan:
    """What one worker sends in an epoch, and its memory at the peak."""

    traffic: EpochTraffic
    memory: MemoryPlan


@dataclass(frozen=True)
class TrainingPlan:
    """What training takes, worker by worker."""

    workers: list[WorkerPlan]

    def fewest_workers(self, memory: int) -> int | None:
        """The least number of workers of which each needs at most `memory` bytes; None where no number does.

        By proportion: balance stays, and each reads as large a share of the others' nodes.
        """
        fewest = 1
        for worker in self.workers:
            of_worker = worker.memory.workers_to_fit(len(self.workers), memory)
            if of_worker is None:
                return None
            fewest = max(fewest, of_worker)
        return fewest

    def summary(self) -> dict[str, Any]:
        """Everything here in types that JSON has."""
        workers = [
            {
                "bytes_sent": worker.traffic.sent,
                "layers": [asdict(layer) for layer in worker.traffic.layers],
                "parameters_sent": worker.traffic.parameters,
                "memory": asdict(worker.memory) | {"rise": worker.memory.rise, "total": worker.memory.total},
            }
            for worker in self.workers
        ]
        return {"workers": workers}

    def as_text(self) -> str:
        """Tables for people, in MB of a million bytes."""
        calls = self.workers[0].traffic.layers
        sent: list[tuple[str, ...]] = [
            ("worker", *(f"call {k}" for k in range(len(calls))), "parameters", "MB an epoch")
        ]
        memory: list[tuple[str, ...]] = [("worker", *PARTS, "MB at peak", "rise in training")]
        for rank, worker in enumerate(self.workers):
            layers = [layer.forward + layer.backward for layer in worker.traffic.layers]
            sent.append((str(rank), *map(mega, (*layers, worker.traffic.parameters, worker.traffic.sent))))
            parts = [getattr(worker.memory, part) for part in PARTS]
            memory.append((str(rank), *map(mega, (*parts, worker.memory.total, worker.memory.rise))))
        blocks = [
            "\n".join(f"call {k}: {layer.call}" for k, layer in enumerate(calls)),
            f"sent, MB an epoch\n{as_text(sent, left=1)}",
            f"memory, MB at the peak of training\n{as_text(memory, left=1)}",
        ]
        return "\n\n".join(block for block in blocks if block)

    def advice(self, memory: int) -> str:
        """Whether `memory` bytes for each worker are enough, and how many workers would be."""
        largest = max(worker.memory.total for worker in self.workers)
        verdict = f"{len(self.workers)} workers {'fit' if largest <= memory else 'do not fit'} {mega(memory)} MB each"
        fewest = self.fewest_workers(memory)
        if fewest is None:
            return f"{verdict}; nor would any number of workers, as code and buffers alone take more."
        return f"{verdict}; by the balance and halo of these parts, {fewest} is the fewest that would."


def plan_training(counts: GraphCounts, make_model: MakeModel, *, process: int = PROCESS) -> TrainingPlan:
    """Predict bytes and memory of full-graph training with `Config` as it is.

    Bytes are exact for a training loop with one `gather_grads` an epoch. Memory is within 15 % where a worker's tensors
    are most of it. For what is assumed, see [Note: what is assumed] in `trial_epoch.py`.

    Args:
        counts: the graph, from `count_graph`.
        make_model: makes the model, see `try_epoch`.
        process: bytes that code takes before the first epoch.

    Raises:
        ConfigError: the model cannot be run without values.
    """
    return TrainingPlan([plan_worker(counts, worker, make_model, process) for worker in range(counts.num_workers)])


def plan_worker(counts: GraphCounts, worker: int, make_model: MakeModel, process: int) -> WorkerPlan:
    """What one worker takes, as in `plan_training`."""
    trial = try_epoch(counts, worker, make_model)
    return WorkerPlan(_traffic(trial), _memory(trial, counts.data_bytes(worker), process))


def _traffic(trial: TrialEpoch) -> EpochTraffic:
    layers: list[LayerTraffic] = []
    parameters = 0
    for traffic in trial.calls:
        if traffic.call.startswith(_GATHERING):
            parameters += traffic.messages
        elif traffic.call.startswith(BACKWARD):
            # Autograd goes back from the last call, so of calls that are alike the last is the one.
            call = _name(traffic.call.removeprefix(BACKWARD))
            next(
                layer for layer in reversed(layers) if layer.call == call and not layer.backward
            ).backward = traffic.messages
        else:
            layers.append(LayerTraffic(_name(traffic.call), traffic.messages))
    return EpochTraffic(layers, parameters, trial.sent)


def _name(call: str) -> str:
    """What a call computes, without graph and settings."""
    return call.partition(";")[0]


def _memory(trial: TrialEpoch, data: int, process: int) -> MemoryPlan:
    parameters = 4 * trial.parameters  # themselves, gradients, and two moments of Adam
    structure_made = trial.structure - trial.structure_before
    return MemoryPlan(
        process=process + FIRST_EPOCH,
        data=data,
        structure=trial.structure,
        activations=max(0, trial.rise - structure_made - (parameters - trial.parameters) - trial.buffers),
        parameters=parameters,
        buffers=trial.buffers,
        before=process + data + trial.structure_before + trial.parameters,
    )


def mega(count: float) -> str:
    """Millions of bytes."""
    return f"{count / 1e6:,.1f}"
