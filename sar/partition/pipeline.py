"""The whole job of `sar partition`: open a graph, assign its nodes to parts, write the parts, report.

Under a launcher with several processes, the first one assigns; all of them write.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Literal

import numpy as np

from sar.errors import ConfigError
from sar.partition.assign.assigning import Assigned, AssigningOptions, Choice, assign, write_once
from sar.partition.graph_data import Array
from sar.partition.graph_source import GraphSource, Progress
from sar.partition.ingest.cleanup import clean_up, with_split
from sar.partition.ingest.files import Files, find_files
from sar.partition.ingest.open import open_graph
from sar.partition.inspect.directory_report import DirectoryReport
from sar.partition.write.staging import Staging, staged
from sar.partition.write.write import Written, write_parts, written_report
from sar.partition.write.write_job import WriteJob, check_hops, check_writable
from sar.partition.write.writers import Writers


@dataclass(frozen=True)
class InputOptions:
    """What to read, and how: as in `open_graph` and `clean_up`; `split` has the shares of `with_split`, if any."""

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
    undirected: bool = False
    remove_duplicates: bool = False
    self_loops: Literal["keep", "remove", "add"] = "keep"
    split: tuple[float, ...] | None = None


@dataclass(frozen=True)
class OutputOptions:
    """What to make.

    directory: as in `sar.partition.write.write.write_partitions`.
    name: as there; empty: the graph's own, else `graph`.
    memory: bytes that each step may use beyond what the process has when it starts.
    num_hops: as there.
    resume: as there; a run that was killed can be resumed even if it did not have this option.
    overwrite, local_output: as there.
    """

    directory: Path
    name: str = ""
    memory: int | None = None
    num_hops: int | None = None
    resume: bool = False
    overwrite: bool = False
    local_output: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    json_file: what `sar.load_dgl_partition_data` takes.
    assigned: by what, and why by that.
    report: what is in the directory, which has it as `report.json` too.
    """

    json_file: Path
    assigned: Choice
    report: DirectoryReport


def run_partition(
    source: InputOptions,
    assigning: AssigningOptions,
    output: OutputOptions,
    progress: Progress = lambda doing, share: None,
) -> Outcome:
    """Divide a graph into parts and write them; all workers call it together where there are several.

    Raises:
        ConfigError: options do not fit each other or the graph, or the directory is taken.
        PartitionError: the input is damaged, or the disk is full.
    """
    if isinstance(assigning.parts, int) and assigning.parts < 1:
        raise ConfigError(f"{assigning.parts} parts were asked for; expected at least 1.")
    team = Writers.here()
    with team.guard():
        check_hops(output.num_hops, team, output.local_output)
        digest = _digest(source, assigning, output, team)
        with staged(
            output.directory,
            team,
            digest,
            resume=output.resume,
            overwrite=output.overwrite,
            local=output.local_output,
        ) as staging:
            scratch = staging.scratch / f"input-{team.rank}"
            shutil.rmtree(scratch, ignore_errors=True)  # copies that an earlier run has left
            progress("reading the input", 0.0)
            graph = open_input(source, scratch, output.memory, assigning.seed)
            name = output.name or graph.name or "graph"
            check_writable(graph, name)
            part_of, num_parts, choice = assignment(assigning, staging, graph, output.memory, progress)
            method = choice.method or "custom"
            job = WriteJob.of(staging, graph, part_of, num_parts, output.memory, progress, output.num_hops)
            report = write_with_report(job, name, method)[1]
    return Outcome(staging.target / f"{name}.json", choice, report)


def run_assignment(
    source: InputOptions,
    assigning: AssigningOptions,
    memory: int | None = None,
    progress: Progress = lambda doing, share: None,
) -> Choice:
    """Divide a graph into parts and write nothing but the assignment; on one process.

    Raises:
        ConfigError: options do not fit each other or the graph, or no directory for the assignment was named.
        PartitionError: the input is damaged, or the disk is full.
    """
    if assigning.write_assignment is None:
        raise ConfigError("the assignment alone was asked for; name a directory for it: --write-assignment DIR.")
    folder = assigning.write_assignment.absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sar-assignment-", dir=folder) as scratch:
        progress("reading the input", 0.0)
        graph = open_input(source, Path(scratch), memory, assigning.seed)
        assigned = assign(assigning, graph, Path(scratch) / "method", memory, progress)
        write_once(assigning.write_assignment, graph, assigned)
    return assigned.choice


def open_input(source: InputOptions, scratch: Path, memory: int | None, seed: int) -> GraphSource:
    """The graph as options say; `seed` is that of the split."""
    reading = {option.name: getattr(source, option.name) for option in fields(source)}
    cleaning = {name: reading.pop(name) for name in ("undirected", "remove_duplicates", "self_loops")}
    split = reading.pop("split")
    graph = clean_up(open_graph(**reading, scratch=scratch), scratch, **cleaning, memory=memory)
    return graph if split is None else with_split(graph, split, seed)


def write_with_report(job: WriteJob, name: str, method: str) -> tuple[Written, DirectoryReport]:
    """Write the parts into a directory in the making, and `report.json`; `name` and `method` as in `write_parts`."""
    written = write_parts(job, name, method)
    report = written_report(job.graph, job.numbering.part_of, written, name, method)
    if job.staging.leads:
        report.save(job.staging.path)
    return written, report


def assignment(
    options: AssigningOptions,
    staging: Staging,
    graph: GraphSource,
    memory: int | None,
    progress: Progress,
    more: Mapping[str, Array] | None = None,
) -> Assigned:
    """As `assign`, by the first process, and kept for a run that resumes this one."""
    file, team = staging.assignment, staging.team

    def first_assigns() -> list[str]:
        if team.rank:
            return []
        part_of, num_parts, choice = assign(options, graph, staging.scratch / "method", memory, progress, more)
        with file.open("wb") as opened:
            opened.write(part_of.astype(np.min_scalar_type(num_parts - 1)).data)
        return [str(num_parts), *choice]

    parts, method, why = team.broadcast_strings(staging.step("assignment", first_assigns))
    dtype = np.min_scalar_type(int(parts) - 1)
    part_of = np.fromfile(file, dtype) if team.rank == 0 else np.empty(graph.total_nodes, dtype)
    assigned = Assigned(team.broadcast(part_of), int(parts), Choice(method, why))
    if options.write_assignment is not None and team.rank == 0:
        write_once(options.write_assignment, graph, assigned)
    return assigned


def _digest(source: InputOptions, assigning: AssigningOptions, output: OutputOptions, team: Writers) -> str:
    """Of all that decides about the result: options, the number of processes, and size and time of input files."""
    said = [repr(source), repr(assigning), output.name, output.memory, output.num_hops, team.size]
    named = source.path.values() if isinstance(source.path, Mapping) else [source.path]
    files = [*named, *source.node_features.values(), *source.edge_features.values()]
    if assigning.assignment is not None:
        files.append(assigning.assignment)
    stamps = sorted({stamp for some in files for stamp in _stamps(some)})
    return hashlib.blake2b(repr((said, stamps)).encode(), digest_size=16).hexdigest()


def _stamps(files: Files) -> Iterator[tuple[str, int, int]]:
    """Name, size and time of change of every file meant; of a JSON file, which names others, of all files beside it."""
    if isinstance(files, str | PathLike) and not Path(files).exists():
        files = str(files).partition("#")[0]  # which names columns in the file
    for path in [Path(files)] if isinstance(files, str | PathLike) and Path(files).is_dir() else find_files(files):
        folder = path.parent if path.suffix == ".json" else path
        for file in folder.rglob("*") if folder.is_dir() else [folder]:
            if file.is_file():
                status = file.stat()
                yield str(file.absolute()), status.st_size, status.st_mtime_ns
