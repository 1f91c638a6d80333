"""The pipeline of `sar partition`: open a graph, assign its nodes to parts, write the parts, report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sar.data.arrays import Array
from sar.errors import ConfigError
from sar.partition.assign.assigning import Assigned, AssigningOptions, assign
from sar.partition.assign.assignment_files import write_assignment
from sar.partition.graph_source import GraphSource, Progress
from sar.partition.ingest.cleanup import clean_up
from sar.partition.ingest.masks import with_split
from sar.partition.ingest.open import open_graph
from sar.partition.ingest.sources import ADVICE, Files
from sar.partition.inspect.report import DirectoryReport
from sar.partition.new_directory import check_free, new_directory
from sar.partition.write.write import write_parts
from sar.partition.write.write_job import OutputOptions, check_writable

_TRAINER = "trainer_id"
_MANY_NODES, _MANY_FOR_AN_EDGE = 10**7, 1000
"""More nodes than this, and more than this many per edge, indicate gaps: public lists have at most 10 per edge."""


class Outcome(NamedTuple):
    """The result of `run_partition`."""

    json_file: Path  # for `sar.load_dgl_partition_data`
    assigned: Assigned
    report: DirectoryReport  # also in the directory, as `report.json`
    notes: Sequence[str]  # remarks on the input, as in `GraphSource`


def run_partition(
    source: Callable[[Path], GraphSource] | GraphSource,
    assigning: AssigningOptions,
    output: OutputOptions,
    progress: Progress = lambda doing, share: None,
    *,
    trainers: int = 1,
) -> Outcome:
    """Partition a graph and write the parts.

    `source` is the graph, or a function that reads it, given a directory for copies; `trainers` is
    `num_trainers_per_machine` of `partition_graph`. `ConfigError` if options are inconsistent or do not fit the graph,
    or the directory is not empty; `PartitionError` if the input is damaged or the disk is full.
    """
    if isinstance(assigning.parts, int) and not 1 <= assigning.parts < 2**31:
        least = "at least 1" if assigning.parts < 1 else "at most 2**31 - 1"
        raise ConfigError(f"{assigning.parts} parts were asked for; expected {least}.")
    if assigning.write_assignment is not None:
        check_free(assigning.write_assignment)
    with new_directory(output.directory) as directory:
        if isinstance(source, GraphSource):
            graph = source
        else:
            progress("reading the input", 0.0)
            graph = source(directory.scratch / "input")
        output = replace(output, name=output.name or graph.name or "graph")
        check_writable(graph, output)
        assigned = assign(assigning, graph, directory.scratch / "method", output.memory, progress)
        if assigning.write_assignment is not None:
            with new_directory(assigning.write_assignment) as made:
                write_assignment(made.path, graph.num_nodes, *assigned[:3])
        if trainers > 1:
            graph = _with_trainers(graph, assigned.part_of)
            parts, num_parts = assigned.part_of // trainers, assigned.num_parts // trainers
            assigned = assigned._replace(part_of=parts, num_parts=num_parts)
        part_of, num_parts, method = assigned.part_of, assigned.num_parts, assigned.method or "custom"
        report = write_parts(directory, graph, part_of, num_parts, method, output, progress, assigned.place)
        report.save(directory.path)
    return Outcome(directory.target / f"{output.name}.json", assigned, report, graph.notes)


def run_assignment(
    source: Callable[[Path], GraphSource],
    assigning: AssigningOptions,
    memory: int | None = None,
    progress: Progress = lambda doing, share: None,
) -> tuple[Assigned, Sequence[str]]:
    """Partition a graph, write only the assignment, and return it with remarks on the input.

    Raises the errors of `run_partition`.
    """
    if assigning.write_assignment is None:
        raise ConfigError("only the assignment was requested; name a directory for it: --write-assignment DIR.")
    with new_directory(assigning.write_assignment) as directory:
        progress("reading the input", 0.0)
        graph = source(directory.scratch / "input")
        unordered = replace(assigning, order="ids")  # files of assignments have no order
        assigned = assign(unordered, graph, directory.scratch / "method", memory, progress)
        write_assignment(directory.path, graph.num_nodes, *assigned[:3])
    return assigned, graph.notes


def read_input(
    path: Files | Mapping[str, Files],
    scratch: Path,
    *,
    cleaning: Mapping[str, Any],
    split: Sequence[float] | None = None,
    seed: int = 0,
    memory: int | None = None,
    **reading: Any,
) -> GraphSource:
    """Open a graph with the arguments of `open_graph`, clean it up with those of `clean_up`, and split its nodes.

    `split` and `seed` are those of `with_split`. `ConfigError` also if the number of nodes is not given and far
    exceeds the number of edges, for example because of one large ID.
    """
    graph = open_graph(path, scratch, **reading)
    implied = reading.get("num_nodes") is None and not any(graph.node_data.values())
    if implied and graph.total_nodes > max(_MANY_NODES, _MANY_FOR_AN_EDGE * graph.total_edges):
        raise ConfigError(
            f"the graph has {graph.total_nodes:,} nodes and {graph.total_edges:,} edges. The number of nodes is the "
            f"greatest ID plus one, unless it is given.{ADVICE} If they are meant, give their number: --num-nodes N."
        )
    graph = clean_up(graph, scratch, **cleaning, memory=memory)
    return graph if split is None else with_split(graph, split, seed)


def _with_trainers(graph: GraphSource, trainer_of: Array) -> GraphSource:
    """Add the field `trainer_id` with the trainer of every node, and for edges that of the destination."""
    for columns in (*graph.node_data.values(), *graph.edge_data.values()):
        if _TRAINER in columns:
            raise ConfigError(f"the graph has a field '{_TRAINER}', which is to hold trainers; choose another name.")
    trainer_of = trainer_of.astype(np.int64)
    nodes, edges = graph.by_type(trainer_of), graph.by_destination(trainer_of)
    node_data = {ntype: {**graph.node_data.get(ntype, {}), _TRAINER: rows} for ntype, rows in nodes.items()}
    edge_data = {etype: {**graph.edge_data.get(etype, {}), _TRAINER: rows} for etype, rows in edges.items()}
    return replace(graph, node_data=node_data, edge_data=edge_data)
