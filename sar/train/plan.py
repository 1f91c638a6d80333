"""Predicts what training a model on a partition directory takes: bytes sent, and memory of every worker."""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from sar.comm.settings import Settings
from sar.errors import ConfigError
from sar.partition.inspect.report import DirectoryReport
from sar.partition.inspect.tables import as_text
from sar.train.memory_plan import PROCESS, MemoryPlan, WorkerSize, memory_plan
from sar.train.model_shape import ModelShape
from sar.train.traffic import EpochTraffic, epoch_traffic, halo_plan

MOST_WORKERS = 4096
_PARTS = ("process", "data", "structure", "activations", "parameters", "buffers")


@dataclass(frozen=True)
class WorkerPlan:
    """What one worker sends in an epoch, and its memory at the peak."""

    traffic: EpochTraffic
    memory: MemoryPlan


@dataclass(frozen=True)
class TrainingPlan:
    """What training takes, worker by worker.

    fewest_workers: that fit the memory asked about, if any was; None where no number does.
    """

    model: ModelShape
    workers: list[WorkerPlan]
    memory: int | None = None
    fewest_workers: int | None = None

    def summary(self) -> dict[str, Any]:
        """Everything here in types that JSON has."""
        found: dict[str, Any] = {
            "model": {"kind": self.model.kind, "widths": list(self.model.widths), "heads": self.model.heads},
            "workers": [
                {
                    "bytes_sent": worker.traffic.sent,
                    "layers": [layer._asdict() for layer in worker.traffic.layers],
                    "parameters_sent": worker.traffic.parameters,
                    "memory": vars(worker.memory) | {"rise": worker.memory.rise, "total": worker.memory.total},
                }
                for worker in self.workers
            ],
        }
        if self.memory is not None:
            found |= {"memory": self.memory, "fewest_workers": self.fewest_workers}
        return found

    def as_text(self) -> str:
        """Tables for people, in MB of a million bytes."""
        depth = len(self.model.layers)
        sent: list[tuple[str, ...]] = [("worker", *(f"layer {k}" for k in range(depth)), "parameters", "MB an epoch")]
        memory: list[tuple[str, ...]] = [("worker", *_PARTS, "MB at peak", "rise in training")]
        for rank, worker in enumerate(self.workers):
            columns = [*map(sum, worker.traffic.layers), worker.traffic.parameters, worker.traffic.sent]
            sent.append((str(rank), *map(_mega, columns)))
            parts = [getattr(worker.memory, part) for part in _PARTS]
            memory.append((str(rank), *map(_mega, (*parts, worker.memory.total, worker.memory.rise))))
        widths = " -> ".join(map(str, self.model.widths))
        blocks = [
            f"{self.model.kind}, widths {widths}, mode 1, allocator as under `sar launch`",
            f"sent, MB an epoch\n{as_text(sent, left=1)}",
            f"memory, MB at the peak of training\n{as_text(memory, left=1)}",
        ]
        if self.memory is not None:
            blocks.append(self._advice(self.memory))
        return "\n\n".join(blocks)

    def _advice(self, memory: int) -> str:
        fits = max(worker.memory.total for worker in self.workers) <= memory
        verdict = f"{len(self.workers)} workers {'fit' if fits else 'do not fit'} {_mega(memory)} MB each"
        if self.fewest_workers is None:
            return f"{verdict}; nor would any number of workers, as code and buffers alone take more."
        return f"{verdict}; by the balance and halo of these parts, {self.fewest_workers} is the fewest that would."


def plan_training(
    report: DirectoryReport, model: ModelShape, *, memory: int | None = None, process: int = PROCESS
) -> TrainingPlan:
    """Predict bytes and memory for a homogeneous graph, one worker for each part, with `Config` as it is.

    Bytes are exact for a training loop with one `gather_grads` an epoch. Memory is that of mode 1; it is within 15 %
    where a worker's tensors are most of it.

    Args:
        report: of the directory.
        model: what to train.
        memory: bytes that each worker may take; None asks nothing.
        process: bytes that code takes before the first epoch.

    Raises:
        ConfigError: the graph is heterogeneous.
    """
    if len(report.num_nodes) != 1 or len(report.num_edges) != 1:
        raise ConfigError(
            f"the graph has {len(report.num_nodes)} node types and {len(report.num_edges)} edge types; plans are for "
            "homogeneous graphs."
        )
    settings = Settings.current()
    workers = []
    for rank, size in enumerate(worker_sizes(report)):
        halo = halo_plan(report.traffic, rank, sum(report.num_nodes.values()))
        traffic = epoch_traffic(halo, model.exchanged(), model.parameter_sizes(), settings)
        workers.append(WorkerPlan(traffic, memory_plan(size, model, halo, settings, process)))
    fewest = None if memory is None else _fewest_workers(report, model, memory, settings, process)
    return TrainingPlan(model, workers, memory, fewest)


def worker_sizes(report: DirectoryReport) -> list[WorkerSize]:
    """What each worker has to do with."""
    return [
        WorkerSize(
            nodes=part.num_nodes,
            train_nodes=part.split.get("train_mask", part.num_nodes),
            edges_from=part.edges_from,
            rows_from=part.rows_from,
            sent_rows=sum(report.traffic[p]),
            data=part.num_nodes * _row_bytes(report, "nodes"),
            edge_data=part.num_edges * _row_bytes(report, "edges"),
        )
        for p, part in enumerate(report.parts)
    ]


def _row_bytes(report: DirectoryReport, of: str) -> int:
    """Bytes that a worker holds of each node or edge: features, `_ID`, of nodes `_TYPE`, and `orig_id` if known."""
    features: int = sum(prod(one.shape) * getattr(torch, one.dtype).itemsize for one in report.features if one.of == of)
    known = report.orig_node_ids if of == "nodes" else report.orig_edge_ids
    return features + 8 + (4 if of == "nodes" else 0) + (8 if known else 0)


def _fewest_workers(
    report: DirectoryReport, model: ModelShape, memory: int, settings: Settings, process: int
) -> int | None:
    """The least number of workers with which the largest fits, by bisection."""

    def fits(workers: int) -> bool:
        return _scaled(report, model, workers, settings, process) <= memory

    if not fits(MOST_WORKERS):
        return None
    low, high = 0, MOST_WORKERS  # `low` does not fit, `high` does
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _scaled(report: DirectoryReport, model: ModelShape, workers: int, settings: Settings, process: int) -> int:
    """Memory of the largest of so many workers, if balance stays and each reads as large a share of other nodes.

    The halo of a part cannot be known before there is one; it weighs in structure only.
    """
    sizes = worker_sizes(report)
    total = sum(report.num_nodes.values())
    shrink = len(sizes) / workers
    largest = max(range(len(sizes)), key=lambda rank: sizes[rank].nodes)
    size = sizes[largest]
    nodes = min(total, round(size.nodes * shrink))
    edges = min(sum(report.num_edges.values()), round(sum(size.edges_from) * shrink))
    remote = [0] + [round(sum(size.rows_from) * shrink / max(1, workers - 1))] * (workers - 1)
    share = 0.0 if workers == 1 else 1 - size.edges_from[largest] / max(1, sum(size.edges_from))
    from_others = round(edges * share / max(1, workers - 1))
    scaled = WorkerSize(
        nodes=nodes,
        train_nodes=round(size.train_nodes * nodes / max(1, size.nodes)),
        edges_from=[edges - from_others * (workers - 1)] + [from_others] * (workers - 1),
        rows_from=remote,
        sent_rows=sum(remote),
        data=round(size.data * nodes / max(1, size.nodes)),
        edge_data=round(size.edge_data * edges / max(1, sum(size.edges_from))),
    )
    counts = [remote] + [[remote[-1]] + [0] * (workers - 1)] * (workers - 1) if workers > 1 else [[0]]
    return memory_plan(scaled, model, halo_plan(counts, 0, total), settings, process).total


def _mega(count: float) -> str:
    return f"{count / 1e6:,.1f}"
