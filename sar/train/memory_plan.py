"""Predicts a worker's peak memory while it trains, in bytes, part by part.

[Note: what is assumed]
float32, mode 1, no dropout, Adam, cross-entropy on the nodes of train_mask, and `PartitionData` let go of after
`construct_full_graph`. The allocator gives freed memory back, as under `sar launch` (`docs/memory.md`): then resident
memory is what is live. What code takes before the first epoch differs between installations: `sar plan` measures it.
"""

import math
from dataclasses import dataclass

import torch

from sar.comm.buffers import BufferPool
from sar.comm.plan import HaloPlan
from sar.comm.settings import Settings
from sar.train.model_shape import ModelShape
from sar.train.traffic import message_sizes, tile_rows

FLOAT = 4
PROCESS = 480 * 10**6
"""Bytes of Python, torch, DGL, sar and the compiler of the kernels, before the first epoch, with DGL 1.1.3 on a CPU."""
FIRST_EPOCH = 12 * 10**6
"""Bytes that the first epoch brings beside tensors: code above all, and holes in the heap."""


@dataclass(frozen=True)
class WorkerSize:
    """What a worker has to do with.

    nodes, train_nodes: its own.
    edges_from: (W,) in-edges by the worker of their source.
    rows_from: (W,) halo rows by their worker; 0 at its own place.
    sent_rows: halo rows of others that are this worker's, over all of them.
    data: bytes of its node features and IDs.
    edge_data: bytes of its edge features and IDs.
    """

    nodes: int
    train_nodes: int
    edges_from: list[int]
    rows_from: list[int]
    sent_rows: int
    data: int
    edge_data: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes at the peak of training.

    process: code.
    data: features, labels, masks and IDs.
    structure: the graph, and what it makes for the backward and for tiles.
    activations: what layers keep and compute with, own nodes only.
    parameters: with gradients and the optimiser's state.
    buffers: of the exchange.
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
    def rise(self) -> int:
        """How far training rises above the level just before its first epoch, which is what benchmarks measure."""
        return self.total - self.before

    @property
    def total(self) -> int:
        """Resident memory at the peak."""
        return self.process + self.data + self.structure + self.activations + self.parameters + self.buffers


def memory_plan(
    size: WorkerSize, model: ModelShape, plan: HaloPlan, settings: Settings, process: int = PROCESS
) -> MemoryPlan:
    """Predict the peak of a worker: see [Note: what is assumed].

    Args:
        size: of the worker.
        model: what it trains.
        plan: its exchange, from `traffic.halo_plan`.
        settings: of the engine.
        process: bytes of code before the first epoch.
    """
    data, structure, values = size.data + size.edge_data, _structure(size), FLOAT * sum(model.parameter_sizes())
    return MemoryPlan(
        process=process + FIRST_EPOCH,
        data=data,
        structure=structure + _structure_for_training(size, model, plan, settings),
        activations=_activations(size, model),
        parameters=4 * values,  # themselves, gradients, and two moments of Adam
        buffers=_buffers(model, plan, settings),
        before=process + data + structure + values,
    )


def _activations(size: WorkerSize, model: ModelShape) -> int:
    """The most that is live at once: a layer's worst moment, on top of what the layers before it have saved."""
    classes, kept, peak = model.widths[-1], 0, 0
    for layer in model.rows():
        peak = max(peak, kept + layer.forward, kept + layer.backward)
        kept += layer.saved
    # Positions of the training nodes, their logits, logarithms of probabilities, and the gradients of both.
    loss = size.train_nodes * (8 + 4 * classes * FLOAT) + size.nodes * classes * FLOAT
    return max(size.nodes * peak * FLOAT, size.nodes * kept * FLOAT + loss)


def _structure(size: WorkerSize) -> int:
    """Of the graph as constructed: sources of edges, their destinations' offsets, degrees, IDs, and halo lists."""
    offsets = sum(8 * _distinct(edges, size.nodes) for edges in size.edges_from)
    return 4 * sum(size.edges_from) + offsets + 32 * size.nodes + 4 * (sum(size.rows_from) + size.sent_rows)


def _structure_for_training(size: WorkerSize, model: ModelShape, plan: HaloPlan, settings: Settings) -> int:
    """What the first epoch adds: edges grouped by source for the backward, and edges of tiles."""
    layers = model.exchanged()
    backward = [layer for layer in layers if not layer.constant]
    total = 4 * size.edges_from[plan.rank] + 4 * size.nodes if backward else 0
    tiles = {tile_rows(plan, layer, settings) for layer in layers}
    walked_back = {tile_rows(plan, layer, settings) for layer in backward}
    for rows, edges in zip(size.rows_from, size.edges_from, strict=True):
        if not rows:
            continue
        if any(length >= rows for length in walked_back):  # the whole block, shared by all layers that do not cut it
            total += 4 * edges + 4 * rows
        for length in (length for length in tiles if length < rows):
            count = -(-rows // length)
            total += 4 * edges + 8 * count * _distinct(edges // count, size.nodes)
            if length in walked_back:
                total += 4 * edges + 4 * rows
    return total


def _distinct(edges: int, nodes: int) -> int:
    """Expected number of different destinations of edges drawn at random."""
    return round(nodes * -math.expm1(-edges / nodes)) if nodes else 0


def _buffers(model: ModelShape, plan: HaloPlan, settings: Settings) -> int:
    """Bytes of message buffers in the largest sweep of an epoch, played through with buffers that have no memory."""
    pool = BufferPool(torch.device("meta"))
    layers = model.exchanged()
    peak = 0
    for layer, back in [(layer, False) for layer in layers] + [(layer, True) for layer in reversed(layers)]:
        if back and layer.constant:
            continue
        sizes = message_sizes(plan, layer, settings)
        at_once = min(settings.depth + 1, len(sizes))
        wanted = sorted(sizes, reverse=True)[:at_once] * (2 if back and layer.values_read else 1)
        taken = [pool.take(size) for pair in wanted for size in pair if size]
        peak = max(peak, sum(buffer.nbytes for buffer in taken))
    return peak
