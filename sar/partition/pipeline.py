"""The whole job of `sar partition`: open a graph, assign its nodes to parts, write the parts, report.

Under a launcher with several processes, the first one assigns; all of them write.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np

from sar.adapters.dgl.metis import metis_of_edges
from sar.errors import ConfigError
from sar.partition.assignment import AssignmentTask, Method
from sar.partition.graph_data import Array, GraphData
from sar.partition.graph_source import ArrayEdges, GraphSource
from sar.partition.hetero_data import HeteroGraphData, read_any_npz
from sar.partition.staging import Staging, staged
from sar.partition.team import Team
from sar.partition.write import PartitionReport, write_parts
from sar.partition.write_job import Progress, check_writable

IN_EDGES = "in_edges"
"""What to balance that is no field: the number of edges into a part."""

_NOT_IN_DIGEST = ("resume", "out")


@dataclass(frozen=True)
class PartitionOptions:
    """What to do.

    input: a file or directory, of any format that `sar.partition.readers.open_graph` knows.
    out: directory to make.
    parts: P.
    method: what assigns nodes to parts.
    name: of the graph and of the JSON file.
    memory: bytes that assigning and writing may each use beyond what the process has when it starts.
    seed: of the method.
    balance: node fields of which each part is to have about an equal sum, or `IN_EDGES`.
    imbalance: how much larger than the mean a part may be.
    assignment: directory of an assignment to take instead of a method's.
    write_assignment: directory to write the assignment to.
    node_features, edge_features: files of more fields, by name.
    resume: see `sar.partition.write.write_partitions`; a run can be resumed even if it was not asked to be resumable.
    local_output: see there.
    """

    input: str
    out: Path
    parts: int
    method: str = "auto"
    name: str = "graph"
    memory: int | None = None
    seed: int = 0
    balance: tuple[str, ...] = ()
    imbalance: float = 0.05
    assignment: Path | None = None
    write_assignment: Path | None = None
    node_features: Mapping[str, str] = field(default_factory=dict)
    edge_features: Mapping[str, str] = field(default_factory=dict)
    resume: bool = False
    local_output: bool = False


def run_partition(options: PartitionOptions, progress: Progress = lambda doing, share: None) -> PartitionReport:
    """Divide a graph into parts and write them; all workers call it together where there are several.

    Raises:
        ConfigError: options do not fit each other or the graph, or the directory is taken.
        PartitionError: the input is damaged, or the disk is full.
    """
    if options.parts < 1:
        raise ConfigError(f"{options.parts} parts were asked for; expected at least 1.")
    team = Team.here()
    with (
        team.guard(),
        staged(options.out, team, _digest(options, team), resume=options.resume, local=options.local_output) as staging,
    ):
        graph = _open(options, staging.scratch / f"input-{team.rank}")
        check_writable(graph, options.name)
        part_of = _assignment(options, staging, graph, progress)
        method = options.method if options.assignment is None else "custom"
        written = write_parts(staging, graph, part_of, options.parts, options.name, method, options.memory, progress)
        report = written.report(staging.target / f"{options.name}.json")
        if staging.leads:
            content = {"method": method, "nodes": report.nodes, "edges": report.edges, "edge_cut": report.edge_cut}
            (staging.path / "report.json").write_text(json.dumps(content, indent=1))
    return report


def _open(options: PartitionOptions, scratch: Path) -> GraphSource:
    data = read_any_npz(options.input)
    if isinstance(data, GraphData):
        data = HeteroGraphData(
            {"_N": data.num_nodes}, {("_N", "_E", "_N"): (data.src, data.dst)}, {"_N": data.node_data}
        )
    return GraphSource(data.num_nodes, {e: ArrayEdges(*ends) for e, ends in data.edges.items()}, data.node_data, {})


def _method(name: str) -> Method:
    def metis(task: AssignmentTask) -> Array:
        import torch

        src, dst = (torch.from_numpy(np.concatenate(ends)) for ends in zip(*task.graph.chunks(), strict=True))
        return metis_of_edges(src, dst, task.graph.total_nodes, task.num_parts).numpy()

    def random(task: AssignmentTask) -> Array:
        return np.random.default_rng(task.seed).integers(0, task.num_parts, task.graph.total_nodes)

    return {"auto": metis, "metis": metis, "random": random}[name]


def _assignment(options: PartitionOptions, staging: Staging, graph: GraphSource, progress: Progress) -> Array:
    """The part of every node, (N,), made by the first process and kept for a run that resumes this one."""
    file = staging.scratch / "assignment.npy"
    dtype = np.min_scalar_type(options.parts - 1)

    def assign() -> None:
        if staging.team.rank == 0:
            with file.open("wb") as opened:
                opened.write(_assign(options, staging.scratch / "method", graph, progress).astype(dtype).data)

    staging.step("assignment", assign)
    part_of = np.empty(graph.total_nodes, dtype)
    if staging.team.rank == 0:
        part_of[:] = np.fromfile(file, dtype)
    return staging.team.from_first(part_of)


def _assign(options: PartitionOptions, scratch: Path, graph: GraphSource, progress: Progress) -> Array:
    scratch.mkdir(exist_ok=True)
    weights = {name: _weight(graph, name) for name in options.balance}
    task = AssignmentTask(
        graph, options.parts, scratch, options.seed, weights, options.imbalance, options.memory, progress
    )
    return _method(options.method)(task)


def _weight(graph: GraphSource, name: str) -> Array:
    """What each node adds to the sum to balance, (N,); 0 where nodes of its type do not have the field.

    Raises:
        ConfigError: no type has the field, or it is not one number for each node, at least 0.
    """
    weight = np.zeros(graph.total_nodes)
    if name == IN_EDGES:
        for _, dst in graph.chunks():
            weight += np.bincount(dst, minlength=len(weight))
        return weight
    columns = {ntype: columns[name] for ntype, columns in graph.node_data.items() if name in columns}
    if not columns:
        there = sorted({key for columns in graph.node_data.values() for key in columns})
        raise ConfigError(f"--balance {name}: expected {IN_EDGES}, or one of the node fields {', '.join(there)}.")
    for ntype, column in columns.items():
        if len(column.shape) != 1 or column.dtype.kind not in "biuf":
            raise ConfigError(f"--balance {name}: '{ntype}/{name}' has shape {column.shape}; expected a number a node.")
        first = graph.first_node[ntype]
        weight[first : first + graph.num_nodes[ntype]] = column[:]
    if not (weight >= 0).all():
        raise ConfigError(f"--balance {name}: node {int(np.argmin(weight >= 0))} has less than 0, or NaN.")
    return weight


def _digest(options: PartitionOptions, team: Team) -> str:
    """Of all that decides about the result: options, the number of processes, and size and time of input files."""
    said = [f"{f.name}={getattr(options, f.name)!r}" for f in fields(options) if f.name not in _NOT_IN_DIGEST]
    files = [options.input, *options.node_features.values(), *options.edge_features.values(), options.assignment]
    found = sorted(stamp for file in files if file is not None for stamp in _stamps(Path(file)))
    return hashlib.blake2b(repr((said, team.size, found)).encode(), digest_size=16).hexdigest()


def _stamps(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, size and time of change of a file, or of all files in a directory."""
    if path.suffix == ".json":  # which names files beside it
        path = path.parent
    for file in path.rglob("*") if path.is_dir() else path.parent.glob(path.name):
        if file.is_file():
            status = os.stat(file)
            yield str(file.absolute()), status.st_size, status.st_mtime_ns
