"""Assigns each node to a part, by a method or from assignment files."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sar.data.arrays import Array
from sar.errors import ConfigError
from sar.host.memory import available_memory
from sar.partition.assign.assignment_files import read_assignment
from sar.partition.assign.ldg import ldg
from sar.partition.assign.multilevel import multilevel
from sar.partition.assign.random import random
from sar.partition.assign.spring import spring
from sar.partition.assign.task import VOLUME_BOUND, AssignmentTask, Method
from sar.partition.graph_source import CHUNK_ROWS, Column, GraphSource, Progress, check_parts
from sar.partition.inspect.text_tables import mega, of_limit
from sar.tensors.id_arrays import pieces

MULTILEVEL, SPRING = "multilevel", "spring"
ORDERS = "clusters", "ids"
"""Of the nodes within a part: clusters that the method finds are consecutive; or by their IDs in the input."""
IN_EDGES = "in_edges"
"""The name in `balance` for the edges into a part, by type; `in_edges/NAME` is the sum of an edge field, such as
`train_mask`."""
_GRAPH_NODE_BYTES = 60  # new and input IDs, type, degrees, and position in the list of destinations
_GRAPH_EDGE_BYTES = 20  # new and input IDs, and source


class Assigned(NamedTuple):
    """An assignment of nodes to parts."""

    part_of: Array  # of every node, (N,)
    num_parts: int
    method: str  # empty if assignment files do not name it
    why: str = ""  # where the assignment or the number of parts comes from, if not from a method and the user
    place: Array | None = None  # (N,) integers by which to order the nodes in a part; None: by ID


@dataclass(frozen=True)
class PartsByMemory:
    """The number of parts for workers with a given memory, by the rule of SDT-GNN (Huang et al., section III-C).

    With S bytes of graph and features, it is S / (M - T) rounded up, and at least q.
    """

    workers: int  # q
    memory: int  # M, bytes per worker
    reserve: int  # T, bytes per worker for code and computations

    def __call__(self, graph: GraphSource) -> tuple[int, str]:
        """Return the number of parts for a graph, and an explanation.

        Raises:
            ConfigError: no memory is left for graph and features.
        """
        if self.workers < 1 or self.memory < 1:
            raise ConfigError(f"{self.workers} workers of {self.memory} bytes were named; expected at least 1 of each.")
        room = self.memory - self.reserve
        if room <= 0:
            raise ConfigError(
                f"{of_limit(self.reserve)} of a worker's {of_limit(self.memory)} are reserved; expected less than all."
            )
        fields = (*graph.node_data.values(), *graph.edge_data.values())
        size = sum(prod(column.shape) * column.dtype.itemsize for columns in fields for column in columns.values())
        size += _GRAPH_NODE_BYTES * graph.total_nodes + _GRAPH_EDGE_BYTES * graph.total_edges
        parts = max(self.workers, -(-size // room))
        if parts == self.workers:
            meaning = f"{parts} parts: {parts} workers hold one each, with all parts in memory at once"
        else:
            meaning = (
                f"{parts} parts: a worker has memory for one at a time, so {self.workers} workers take up to "
                f"{-(-parts // self.workers)} each in turns (sar launch --resident 1); with all parts in memory at "
                f"once, it takes {parts} workers"
            )
        return parts, (
            f"{meaning}: graph and features take {mega(size)} MB, and a worker has {mega(room)} of "
            f"{mega(self.memory)} MB for them"
        )


@dataclass(frozen=True)
class AssigningOptions:
    """The options of an assignment."""

    parts: int | PartsByMemory  # P, or the rule for it
    method: str = MULTILEVEL  # one of `METHODS`
    seed: int = 0
    balance: tuple[str, ...] = ()  # node fields, or as in `IN_EDGES`, to balance in addition to nodes of each type
    weights: Mapping[str, Array] = field(default_factory=dict)  # further weights to balance, (N,) numbers each
    imbalance: float = 0.05  # allowed excess over the mean
    volume_bound: float | None = None  # as in `AssignmentTask`; None: `VOLUME_BOUND`
    order: str = ORDERS[0]  # of the nodes in a part
    assignment: Path | None = None  # directory of an assignment to read instead of running the method
    write_assignment: Path | None = None  # directory to write the assignment to


def assign(
    options: AssigningOptions,
    graph: GraphSource,
    scratch: Path,
    memory: int | None,
    progress: Progress,
) -> Assigned:
    """Assign every node to a part; `ConfigError` if options or assignment files do not fit the graph.

    `scratch` is a temporary directory for the method, which is created and removed. `memory` is the number of bytes
    that the method may use in addition to the current memory.
    """
    if options.order not in ORDERS:
        raise ConfigError(f"the order of nodes is '{options.order}'; expected one of {', '.join(ORDERS)}.")
    if not isinstance(options.parts, int):
        if options.assignment is not None:
            raise ConfigError(f"'{options.assignment}' has a fixed number of parts; pass this number.")
        parts, why = options.parts(graph)
        assigned = assign(replace(options, parts=parts), graph, scratch, memory, progress)
        return assigned._replace(why=why)
    if options.assignment is not None:
        part_of, num_parts, method = read_assignment(options.assignment, graph.num_nodes, options.parts)
        return Assigned(part_of, num_parts, method, f"read from {options.assignment}")
    bound = options.volume_bound
    if bound is not None and options.method != SPRING:
        raise ConfigError(f"a volume bound is for the method '{SPRING}'; the method is '{options.method}'.")
    if bound is not None and not 0 < bound < np.inf:
        raise ConfigError(f"the volume bound is {bound}; expected a number above 0, such as {VOLUME_BOUND}.")
    _check_memory(options.method, graph, memory)
    weights = {**balance_weights(graph, options.balance), **options.weights}
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    task = AssignmentTask(
        graph,
        options.parts,
        scratch,
        options.seed,
        weights,
        options.imbalance,
        memory,
        progress,
        VOLUME_BOUND if bound is None else bound,
        [] if options.order == "clusters" else None,
    )
    part_of = np.asarray(method_named(options.method)(task))
    check_parts(part_of, graph.total_nodes, options.parts, f"the assignment of method '{options.method}'")
    shutil.rmtree(scratch)
    return Assigned(part_of, options.parts, options.method, place=_place(task.clusters) if task.clusters else None)


def _place(clusters: Sequence[Array]) -> Array:
    """Numbers by which to order nodes, (N,): the same within a cluster, and close by in one larger cluster."""
    place = np.arange(clusters[-1].max(initial=-1) + 1, dtype=clusters[-1].dtype)
    for larger in reversed(clusters[1:]):
        order = place[larger].argsort(kind="stable")
        place = np.empty_like(larger)
        place[order] = np.arange(len(larger))
    return place[clusters[0]]


def balance_weights(graph: GraphSource, balance: Sequence[str]) -> dict[str, Array]:
    """Return the node weights to balance over parts, (N,) each.

    With several node types there is one weight per type; `balance` names further weights, as in `AssigningOptions`.
    `ConfigError` if a field is missing, or does not have one number per node.
    """
    weights: dict[str, Array] = {}
    if len(graph.num_nodes) > 1:
        for ntype in graph.num_nodes:
            mine = weights[f"nodes of type {ntype}"] = np.zeros(graph.total_nodes, np.bool_)
            mine[graph.nodes_of(ntype)] = True
    for name in balance:
        if name == IN_EDGES:
            weights |= in_degrees(graph)
        elif name.startswith(f"{IN_EDGES}/"):
            weights |= in_degrees(graph, name.removeprefix(f"{IN_EDGES}/"))
        else:
            weights[name] = _field(graph, name)
    return weights


def in_degrees(graph: GraphSource, field: str | None = None) -> dict[str, Array]:
    """Count the in-edges of every node by edge type; with a field, sum it over the types that have it."""
    columns = None if field is None else _columns(f"{IN_EDGES}/{field}", field, "edge", graph.edge_data)
    what = IN_EDGES if field is None else f"{IN_EDGES}/{field}"
    degrees = {}
    for etype, edges in graph.edges.items():
        if columns is not None and etype not in columns:
            continue
        column = None if columns is None else columns[etype]
        name = what if len(graph.edges) == 1 else f"{what} of type {':'.join(etype)}"
        is_real = column is not None and column.dtype.kind == "f"
        one = degrees[name] = np.zeros(graph.total_nodes, np.float64 if is_real else np.int64)
        for rows in pieces(edges.num_edges, CHUNK_ROWS):
            _, dst = edges.read(rows.start, rows.stop)
            np.add.at(one, dst + graph.first_node[etype[2]], 1 if column is None else column[rows])
    return degrees


def _field(graph: GraphSource, name: str) -> Array:
    """A node field as weights; 0 for nodes of types without it."""
    columns = _columns(name, name, "node", graph.node_data)
    # Whole numbers stay whole, because their limits are rounded up.
    weight = np.zeros(graph.total_nodes, np.result_type(*(column.dtype for column in columns.values())))
    for ntype, column in columns.items():
        for chunk in pieces(column.shape[0], CHUNK_ROWS):
            weight[graph.nodes_of(ntype)][chunk] = column[chunk]
    return weight


def _columns(balance: str, name: str, of: str, data: Mapping[Any, Mapping[str, Column]]) -> dict[Any, Column]:
    """The field of each type that has it, one number per node or edge; `ConfigError` if no type does."""
    columns = {kind: columns[name] for kind, columns in data.items() if name in columns}
    if not columns:
        there = ", ".join(sorted({key for columns in data.values() for key in columns}))
        others = f"or one of the {of} fields {there}" if there else f"as there are no {of} fields"
        raise ConfigError(f"balance of '{balance}': expected {IN_EDGES}, {others}.")
    for kind, column in columns.items():
        if len(column.shape) != 1 or column.dtype.kind not in "biuf":
            where = kind if isinstance(kind, str) else ":".join(kind)
            form = f"shape {tuple(column.shape)} and type {column.dtype}"
            raise ConfigError(f"balance of '{balance}': '{where}/{name}' has {form}; expected a number for each {of}.")
    return columns


def _check_memory(method: str, graph: GraphSource, memory: int | None) -> None:
    """Raise `ConfigError` if a method needs more memory than available just for its nodes."""
    room = available_memory() if memory is None else min(memory, available_memory())
    needed = NODE_BYTES.get(method, 0) * graph.total_nodes
    if needed > room:
        sizes = ", ".join(f"{name} {size}" for name, size in NODE_BYTES.items())
        raise ConfigError(
            f"method '{method}' takes {needed:,} bytes for {graph.total_nodes:,} nodes, and there are {room:,}. Bytes "
            f"a node by method: {sizes}. Nodes that no edge names, from gaps in IDs, are left out with --ids map "
            "(ids='map')."
        )


METHODS: dict[str, Method] = {
    "random": random,
    SPRING: spring,
    "ldg": ldg,
    MULTILEVEL: multilevel,
    "metis": multilevel,  # DGL's name for partitioning with METIS
}
NODE_BYTES = {"random": 30, "ldg": 30, SPRING: 60, MULTILEVEL: 70, "metis": 70}
"""Minimum memory of a method in bytes per node, measured on graphs with few edges."""


def method_named(name: str) -> Method:
    """Look up a method in `METHODS`; `ConfigError` for unknown names."""
    if name not in METHODS:
        raise ConfigError(f"there is no partition method '{name}'; expected one of {', '.join(METHODS)}.")
    return METHODS[name]
