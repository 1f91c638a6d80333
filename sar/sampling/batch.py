"""A mini-batch in plain tensors, sampled by all workers together, with features, before DGL or PyG gets it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sar.comm.group import Group
from sar.comm.rows import FieldFormat
from sar.common_tuples import CanonicalEtype
from sar.sampling.draws import copy_rows
from sar.sampling.neighbors import SampledLayer
from sar.sampling.owner_requests import NodesByOwner, Rows, send_requests
from sar.sampling.worker_graph import Features, WorkerGraph


class PairsOfType(NamedTuple):
    """Pairs of one type, by positions among the nodes of a batch."""

    etype: CanonicalEtype
    src: Tensor  # (S,) int64
    dst: Tensor  # (S,) int64
    features: dict[str, Tensor]  # (S, ...) each


class Pairs(NamedTuple):
    """The pairs of nodes that the seed edges of a batch join, and negative ones."""

    nodes: dict[str, Tensor]  # global IDs of every type, (N,) int64, as they come up
    positive: list[PairsOfType]  # the seeds, with `_ID` and their features
    negative: list[PairsOfType] | None
    numbers: list[Tensor]  # by type, (S,) int64: `SeedColumn.NUMBER` of the seeds


# Draws the layers of a batch, input layer first, and the pairs of seeds that are edges. Seeds and key are those of
# `start_batch`. All workers call it together, once they have agreed on the batch.
Draw = Callable[[Group, WorkerGraph, Tensor, int], tuple[list[SampledLayer], Pairs | None]]


@dataclass(frozen=True)
class SamplingSource:
    """The graph, features and settings to sample with."""

    graph: WorkerGraph
    draw: Draw


class Batch(NamedTuple):
    """A sampled mini-batch."""

    layers: list[SampledLayer]  # input layer first
    pairs: Pairs | None  # if seeds are edges
    num_nodes: int  # of the whole graph
    inputs: Features  # of the first layer's sources
    outputs: Features  # of the last layer's destinations


def start_batch(group: Group, source: SamplingSource, seeds: Tensor, key: int) -> Callable[[], Batch]:
    """Draw a batch and send for its remote features; the function that is returned waits for them.

    Until then these travel, while the worker does something else. It may be called in the same generation only. All
    workers start the batch together, once they have agreed on it, inside `group.guard()`; their sources have equal
    settings.

    Args:
        group: the workers.
        source: the graph, features and settings.
        seeds: distinct, as the sampler takes them: global IDs, (S,) int64, or rows of seed edges, (S, 7), see
            [Note: seed edges]; may be empty.
        key: 63 bits, which belong to this worker and batch.
    """
    graph = source.graph
    layers, pairs = source.draw(group, graph, seeds, key)
    outputs = {ntype: nodes[: layers[-1].num_dst[ntype]] for ntype, nodes in layers[-1].nodes.items()}
    features = _start_fetching(group, graph, layers[0].nodes, outputs)
    return lambda: Batch(layers, pairs, graph.num_nodes, *features())


@dataclass
class _FeatureRequest:
    """Nodes of one type whose features are wanted."""

    ntype: str
    tables: dict[str, Tensor]  # features of this worker's nodes, by name
    count: int  # of the wanted nodes
    nodes: list[Tensor]  # by owner, global IDs of the nodes to get from there
    positions: list[Tensor]  # by owner, their places among the wanted ones


def _start_fetching(
    group: Group,
    graph: WorkerGraph,
    input_nodes: Mapping[str, Tensor],
    output_nodes: Mapping[str, Tensor],
) -> Callable[[], tuple[Features, Features]]:
    """Ask for features of nodes, global IDs of every type, (n,) int64 each.

    Own rows are copied; remote ones come from their owners, with one message to each owner and one back. The function
    that is returned waits for these, and returns the last two fields of `Batch`.
    """
    own_rank, workers = group.rank, range(group.world_size)
    wanted = []
    for features, nodes in ((graph.inputs, input_nodes), (graph.outputs, output_nodes)):
        for ntype, tables in features.items():
            asked = NodesByOwner.sort(nodes[ntype], graph.node_ranges)
            wanted.append(_FeatureRequest(ntype, tables, len(nodes[ntype]), list(asked.nodes), list(asked.positions)))
    if not wanted:
        return lambda: ({}, {})

    def respond(nodes: list[Tensor]) -> list[Rows]:
        columns = []
        for request, ids in zip(wanted, nodes, strict=True):
            rows = graph.rows(request.ntype, ids)
            columns += [Rows(table, rows) for table in request.tables.values()]
        return columns

    none = torch.empty(0, dtype=torch.int64, device="cpu")
    requests = [[none if p == own_rank else request.nodes[p] for request in wanted] for p in workers]
    formats = [FieldFormat.of(table) for request in wanted for table in request.tables.values()]
    lengths = [[len(request.nodes[p]) for request in wanted for _ in request.tables] for p in workers]
    arrive = send_requests(group, f"{graph.signature}: features", requests, respond, formats, lengths)

    def finish() -> tuple[Features, Features]:
        batch: list[tuple[str, dict[str, Tensor]]] = []
        for request in wanted:
            own, features = graph.rows(request.ntype, request.nodes[own_rank]), {}
            for name, table in request.tables.items():
                out = features[name] = table.new_empty((request.count, *table.shape[1:]))
                copy_rows(table, own, out, request.positions[own_rank])
            batch.append((request.ntype, features))
        for p, response in enumerate(arrive()):
            if p != own_rank:
                columns = iter(response)
                for request, (_, features) in zip(wanted, batch, strict=True):
                    for out in features.values():
                        copy_rows(next(columns), None, out, request.positions[p])
        return dict(batch[: len(graph.inputs)]), dict(batch[len(graph.inputs) :])

    return finish
