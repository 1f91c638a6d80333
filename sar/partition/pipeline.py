"""The whole job of `sar partition`: open a graph, assign its nodes to parts, write the parts, report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from sar.data.arrays import Array
from sar.errors import ConfigError
from sar.host.memory import machine_memory
from sar.partition.assign.assigning import Assigned, AssigningOptions, assign
from sar.partition.assign.assignment_files import write_assignment
from sar.partition.graph_source import GraphSource, Progress
from sar.partition.ingest.cleanup import clean_up, with_split
from sar.partition.ingest.files import ADVICE, Files
from sar.partition.ingest.open import open_graph
from sar.partition.inspect.directory_report import DirectoryReport
from sar.partition.new_directory import check_replaceable, new_directory
from sar.partition.write.write import write_parts
from sar.partition.write.write_job import check_hops, check_writable

_TRAINER = "trainer_id"
_LEAST_BYTES = 9  # of a node, as `partition.write.write_job` needs them


@dataclass(frozen=True)
class InputOptions:
    """The options of reading, as in `open_graph` and `clean_up`; `split` has the shares of `with_split`, if any."""

    path: Files | Mapping[str, Files]
    format: str | None = None
    num_nodes: int | Mapping[str, int] | None = None
    node_features: Mapping[str, Files] = field(default_factory=dict)
    edge_features: Mapping[str, Files] = field(default_factory=dict)
    delimiter: str | None = None
    header: bool | None = None
    columns: tuple[str | int, str | int] | None = None
    dtype: str | None = None
    allow_nan: bool = False
    allow_outside: bool = False
    ids: Literal["map"] | None = None
    comment: str | None = None
    train_nodes: Files | Mapping[str, Files] | None = None
    val_nodes: Files | Mapping[str, Files] | None = None
    test_nodes: Files | Mapping[str, Files] | None = None
    mask_column: int | None = None
    allow_empty: bool = False
    undirected: bool = False
    remove_duplicates: bool = False
    self_loops: Literal["keep", "remove", "add"] = "keep"
    split: tuple[float, ...] | None = None


@dataclass(frozen=True)
class OutputOptions:
    """The options of writing, as in `write_partitions`."""

    directory: Path
    name: str = ""  # the graph's own, else `graph`
    memory: int | None = None  # bytes that each step may add to the process
    num_hops: int | None = None
    overwrite: bool = False


class Outcome(NamedTuple):
    """The result of `run_partition`."""

    json_file: Path  # for `sar.load_dgl_partition_data`
    assigned: Assigned
    report: DirectoryReport  # in the directory too, as `report.json`
    notes: Sequence[str]  # remarks on the input, as in `GraphSource`


def run_partition(
    source: InputOptions | GraphSource,
    assigning: AssigningOptions,
    output: OutputOptions,
    progress: Progress = lambda doing, share: None,
    *,
    more_weights: Mapping[str, Array] | None = None,
    trainers: int = 1,
) -> Outcome:
    """Divide a graph into parts and write them.

    `more_weights` are further weights to balance, (N,) each; `trainers` as `num_trainers_per_machine` of
    `partition_graph`. `ConfigError` if options do not fit each other or the graph, or the directory is taken,
    `PartitionError` if the input is damaged, or the disk is full.
    """
    if isinstance(assigning.parts, int) and assigning.parts < 1:
        raise ConfigError(f"{assigning.parts} parts were asked for; expected at least 1.")
    check_hops(output.num_hops)
    if assigning.write_assignment is not None:
        check_replaceable(assigning.write_assignment)
    with new_directory(output.directory, overwrite=output.overwrite) as directory:
        if isinstance(source, GraphSource):
            graph = source
        else:
            progress("reading the input", 0.0)
            graph = open_input(source, directory.scratch / "input", output.memory, assigning.seed)
        name = output.name or graph.name or "graph"
        check_writable(graph, name, output.memory)
        assigned = assign(assigning, graph, directory.scratch / "method", output.memory, progress, more_weights)
        if assigning.write_assignment is not None:
            with new_directory(assigning.write_assignment) as made:
                write_assignment(made.path, graph.num_nodes, *assigned[:3])
        if trainers > 1:
            graph = _with_trainers(graph, assigned.part_of)
            parts, num_parts = assigned.part_of // trainers, assigned.num_parts // trainers
            assigned = assigned._replace(part_of=parts, num_parts=num_parts)
        method = assigned.method or "custom"
        report = write_parts(
            directory,
            graph,
            assigned.part_of,
            assigned.num_parts,
            name,
            method,
            output.memory,
            output.num_hops,
            progress,
        )
        report.save(directory.path)
    return Outcome(directory.target / f"{name}.json", assigned, report, graph.notes)


def run_assignment(
    source: InputOptions,
    assigning: AssigningOptions,
    memory: int | None = None,
    progress: Progress = lambda doing, share: None,
) -> tuple[Assigned, Sequence[str]]:
    """Divide a graph, write the assignment alone, and return it with remarks on the input.

    Errors are those of `run_partition`.
    """
    if assigning.write_assignment is None:
        raise ConfigError("the assignment alone was asked for; name a directory for it: --write-assignment DIR.")
    with new_directory(assigning.write_assignment) as directory:
        progress("reading the input", 0.0)
        graph = open_input(source, directory.scratch / "input", memory, assigning.seed)
        assigned = assign(assigning, graph, directory.scratch / "method", memory, progress)
        write_assignment(directory.path, graph.num_nodes, *assigned[:3])
    return assigned, graph.notes


def open_input(source: InputOptions, scratch: Path, memory: int | None, seed: int) -> GraphSource:
    """The graph as options say; `seed` is that of the split."""
    reading = {option.name: getattr(source, option.name) for option in fields(source)}
    cleaning = {name: reading.pop(name) for name in ("undirected", "remove_duplicates", "self_loops")}
    split = reading.pop("split")
    graph = open_graph(**reading, scratch=scratch)
    _check_number_of_nodes(graph)
    graph = clean_up(graph, scratch, **cleaning, memory=memory)
    return graph if split is None else with_split(graph, split, seed)


def _check_number_of_nodes(graph: GraphSource) -> None:
    """`ConfigError` if numbers of nodes alone do not fit into this machine's memory, as with gaps in the IDs."""
    memory = machine_memory()
    if _LEAST_BYTES * graph.total_nodes > memory:
        raise ConfigError(
            f"the graph has {graph.total_nodes:,} nodes and {graph.total_edges:,} edges, and the nodes alone take "
            f"{_LEAST_BYTES} bytes each, more than the {memory:,} of this machine. The number of nodes is the greatest "
            f"ID plus one, unless it is given.{ADVICE}"
        )


def _with_trainers(graph: GraphSource, trainer_of: Array) -> GraphSource:
    """The graph with the trainer of every node and of every edge, which is its destination's, as `trainer_id`."""
    for columns in (*graph.node_data.values(), *graph.edge_data.values()):
        if _TRAINER in columns:
            raise ConfigError(f"the graph has a field '{_TRAINER}', which is to hold trainers; choose another name.")
    trainer_of = trainer_of.astype(np.int64)
    nodes, edges = graph.by_type(trainer_of), graph.by_destination(trainer_of)
    node_data = {ntype: {**graph.node_data.get(ntype, {}), _TRAINER: rows} for ntype, rows in nodes.items()}
    edge_data = {etype: {**graph.edge_data.get(etype, {}), _TRAINER: rows} for etype, rows in edges.items()}
    return replace(graph, node_data=node_data, edge_data=edge_data)
