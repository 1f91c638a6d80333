"""A mini-batch in plain tensors: what all workers sample together, with features, before DGL or PyG has it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sar.comm.group import Group
from sar.comm.rows import FieldFormat, RowFormat
from sar.common_tuples import CanonicalEtype
from sar.sampling.draws import Numbering, copy_rows
from sar.sampling.neighbors import SampledLayer
from sar.sampling.owner_requests import columns_of, message_bytes, respond_to_requests
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
    positive: list[PairsOfType]  # the seeds, with `_ID` and their fields
    negative: list[PairsOfType] | None
    numbers: list[Tensor]  # by type, (S,) int64: `Column.NUMBER` of the seeds


class SamplingMethod(Protocol):
    """How the layers of a batch are drawn."""

    def draw(
        self, group: Group, graph: WorkerGraph, seeds: Tensor, key: int
    ) -> tuple[list[SampledLayer], Pairs | None]:
        """The layers, input layer first, and the pairs of seeds that are edges; `seeds` and `key` as of `sample_batch`.

        Called by all workers together, which have agreed on the batch, inside `group.guard()`.
        """


class FeatureCache(NamedTuple):
    """Input features of remote nodes that this worker's edges read often."""

    rows: dict[str, Numbering]  # numbers the nodes of every type that has input features
    features: Features  # of these nodes, in the order of their numbers


@dataclass(frozen=True)
class SamplingSource:
    """What to sample from, and how."""

    graph: WorkerGraph
    method: SamplingMethod
    cache: FeatureCache | None  # of input features


class Batch(NamedTuple):
    """A sampled mini-batch."""

    layers: list[SampledLayer]  # input layer first
    pairs: Pairs | None  # where seeds are edges
    num_nodes: int  # of the whole graph
    inputs: Features  # of the first layer's sources
    outputs: Features  # of the last layer's destinations
    hits: int  # remote input nodes whose features were in the cache
    misses: int  # and those whose features were fetched


def random_key() -> int:
    """A key drawn from torch's random state."""
    return int(torch.randint(2**63 - 1, (), device="cpu"))


def sample_batch(group: Group, source: SamplingSource, seeds: Tensor, key: int) -> Batch:
    """Sample a batch, by all workers together; their sources have equal settings.

    Seeds are distinct: what the method takes, such as global IDs, (S,) int64, or rows of seed edges, (S, 7), see
    [Note: seed edges]. There may be none. `key` has 63 bits, which belong to this worker and batch.
    """
    with group.guard():
        group.agree(f"{source.graph.signature}: a batch")
        return start_batch(group, source, seeds, key)()


def start_batch(group: Group, source: SamplingSource, seeds: Tensor, key: int) -> Callable[[], Batch]:
    """As `sample_batch`, after the agreement, inside `group.guard()`; what it returns waits for remote features.

    Until then these travel, while the worker does something else. It may be called in the same generation only.
    """
    graph = source.graph
    layers, pairs = source.method.draw(group, graph, seeds, key)
    outputs = {ntype: nodes[: layers[-1].num_dst[ntype]] for ntype, nodes in layers[-1].nodes.items()}
    features = _start_fetching(group, graph, layers[0].nodes, outputs, source.cache)
    return lambda: Batch(layers, pairs, graph.num_nodes, *features())


@dataclass
class _FeatureRequest:
    """Features of one node type that are wanted; by owner, what is still to come from there."""

    ntype: str
    tables: dict[str, Tensor]  # features of this worker's nodes, by name
    count: int  # of the wanted nodes
    nodes: list[Tensor]  # by owner, their global IDs
    positions: list[Tensor]  # by owner, their places among the wanted ones
    cached: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # rows of the cache, and such places


def _start_fetching(
    group: Group,
    graph: WorkerGraph,
    input_nodes: Mapping[str, Tensor],
    output_nodes: Mapping[str, Tensor],
    cache: FeatureCache | None,
) -> Callable[[], tuple[Features, Features, int, int]]:
    """Ask for features of nodes, global IDs of every type, (n,) int64 each; gives what waits for the last four of
    `Batch`.

    Own rows are copied; remote ones come from the cache of input features, or from their owners.
    """
    inputs, outputs = (
        [_wanted(group, graph, ntype, tables, nodes[ntype]) for ntype, tables in features.items()]
        for features, nodes in ((graph.inputs, input_nodes), (graph.outputs, output_nodes))
    )
    others = [worker for worker in range(group.world_size) if worker != group.rank]
    hits = 0
    if cache is not None:
        hits = sum(_find_cached(cache, wanted, worker) for wanted in inputs for worker in others)
    misses = sum(len(wanted.nodes[worker]) for wanted in inputs for worker in others)
    everything = [*inputs, *outputs]
    messages = _ask_owners(group, graph, everything) if everything else list

    def finish() -> tuple[Features, Features, int, int]:
        rows = [_copy_rows_here(graph, group.rank, wanted, cache) for wanted in everything]
        _copy_remote_rows(group.rank, everything, rows, messages())
        found = [(wanted.ntype, out) for wanted, out in zip(everything, rows, strict=True)]
        return dict(found[: len(inputs)]), dict(found[len(inputs) :]), hits, misses

    return finish


def fill_cache(group: Group, graph: WorkerGraph, nbytes: int) -> FeatureCache:
    """A cache of `nbytes` bytes for this worker's most read remote nodes; called by all workers together."""
    nodes = _most_read_nodes(graph, nbytes)
    no_outputs = dict.fromkeys(graph.outputs, torch.empty(0, dtype=torch.int64, device="cpu"))
    group.agree(f"{graph.signature}: filling the cache")
    cache = FeatureCache({}, _start_fetching(group, graph, nodes, no_outputs, None)()[0])
    for ntype, known in nodes.items():
        cache.rows[ntype] = Numbering(len(known), graph.num_nodes)
        cache.rows[ntype].add(known)
    return cache


def _wanted(group: Group, graph: WorkerGraph, ntype: str, tables: dict[str, Tensor], nodes: Tensor) -> _FeatureRequest:
    asked, workers = graph.sort_by_owner(nodes), range(group.world_size)
    by_owner, positions = [asked.of(p) for p in workers], [asked.positions_of(p) for p in workers]
    return _FeatureRequest(ntype, tables, len(nodes), by_owner, positions)


def _find_cached(cache: FeatureCache, wanted: _FeatureRequest, worker: int) -> int:
    """Note what the cache has of one worker's nodes, and leave the rest to be fetched; the number of nodes it has."""
    nodes, positions = wanted.nodes[worker], wanted.positions[worker]
    rows = cache.rows[wanted.ntype].find(nodes)
    known = rows >= 0
    wanted.cached.append((rows[known], positions[known]))
    wanted.nodes[worker] = nodes[~known]
    wanted.positions[worker] = positions[~known]
    return int(known.sum())


def _copy_rows_here(
    graph: WorkerGraph, rank: int, wanted: _FeatureRequest, cache: FeatureCache | None
) -> dict[str, Tensor]:
    """The wanted features by name, (count, ...) each, with the rows in them that are on this worker."""
    own = graph.rows(wanted.ntype, wanted.nodes[rank])
    found = {}
    for name, table in wanted.tables.items():
        out = found[name] = table.new_empty((wanted.count, *table.shape[1:]))
        copy_rows(table, own, out, wanted.positions[rank])
        for rows, positions in wanted.cached:
            assert cache is not None
            copy_rows(cache.features[wanted.ntype][name], rows, out, positions)
    return found


def _ask_owners(group: Group, graph: WorkerGraph, wanted: Sequence[_FeatureRequest]) -> Callable[[], list[Tensor]]:
    """Ask for remote rows: one message with all types' nodes to each owner, and one with all their rows back.

    Gives what waits for the messages of every worker, empty for this one.
    """
    formats = _formats(wanted)

    def respond(request: list[Tensor]) -> Tensor:
        sizes = _lengths(wanted, request)
        message = torch.empty(message_bytes(formats, sizes), dtype=torch.uint8, device="cpu")
        columns = iter(columns_of(message, formats, sizes))
        for w, nodes in zip(wanted, request, strict=True):
            rows = graph.rows(w.ntype, nodes)
            for table in w.tables.values():
                copy_rows(table, rows, next(columns), None)
        return message

    requests = [[w.nodes[worker] for w in wanted] for worker in range(group.world_size)]
    sizes = [message_bytes(formats, _lengths(wanted, nodes)) for nodes in requests]
    sizes[group.rank] = 0
    into = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
    call = f"{graph.signature}: features"
    return group.start_exchange(f"{call}: responses", respond_to_requests(group, call, requests, respond), into)


def _copy_remote_rows(
    rank: int, wanted: Sequence[_FeatureRequest], found: Sequence[dict[str, Tensor]], messages: Sequence[Tensor]
) -> None:
    """Copy the rows of every other worker's message to their places."""
    formats = _formats(wanted)
    for worker, message in enumerate(messages):
        if worker != rank:
            columns = iter(columns_of(message, formats, _lengths(wanted, [w.nodes[worker] for w in wanted])))
            for w, rows in zip(wanted, found, strict=True):
                for out in rows.values():
                    copy_rows(next(columns), None, out, w.positions[worker])


def _formats(wanted: Sequence[_FeatureRequest]) -> list[FieldFormat]:
    """What a message has, table after table."""
    return [FieldFormat.of(table) for w in wanted for table in w.tables.values()]


def _lengths(wanted: Sequence[_FeatureRequest], nodes: Sequence[Tensor]) -> list[int]:
    """Rows of every table for these nodes of every type."""
    return [len(ids) for w, ids in zip(wanted, nodes, strict=True) for _ in w.tables]


def _most_read_nodes(graph: WorkerGraph, nbytes: int) -> dict[str, Tensor]:
    """The remote nodes with input features that have the most edges into this worker, as many as fit; global IDs.

    A node with more out-edges here is drawn more often. Nodes are taken by edges per byte of their features.
    """
    if not graph.inputs:
        return {}
    start, end = graph.node_ranges[graph.part]
    columns = []
    for number, (ntype, tables) in enumerate(graph.inputs.items()):
        row_bytes = RowFormat.of(list(tables.values())).row_bytes
        read = [relation.src.long() for relation in graph.relations if relation.etype[0] == ntype]
        sources = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *read])
        nodes, degrees = sources[(sources < start) | (sources >= end)].unique(return_counts=True)
        edges_per_byte = degrees / max(row_bytes, 1)
        columns.append((edges_per_byte, nodes, torch.full_like(nodes, row_bytes), torch.full_like(nodes, number)))
    edges_per_byte, nodes, sizes, numbers = map(torch.cat, zip(*columns, strict=True))
    order = edges_per_byte.argsort(descending=True, stable=True)
    order = order[sizes[order].cumsum(0) <= nbytes]
    nodes, numbers = nodes[order], numbers[order]
    return {ntype: nodes[numbers == number].sort().values for number, ntype in enumerate(graph.inputs)}
