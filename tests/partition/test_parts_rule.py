"""How many parts `--parts auto` makes, and the reason that it gives."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sar.cli.demo import community_graph
from sar.comm.group import Group
from sar.comm.transport import Transport
from sar.errors import ConfigError
from sar.partition.assign.assigning import Assigned, AssigningOptions, PartsByMemory, assign
from sar.partition.graph_source import GraphSource
from sar.partition.ingest.masks import with_split
from sar.partition.pipeline import run_partition
from sar.partition.write.write_job import OutputOptions
from sar.train.counted_graph import count_graph, counted_graph
from tests.partition.tasks import odd_graphs


@pytest.fixture(scope="module")
def graph() -> GraphSource:
    return with_split(community_graph(2000, 30_000, num_features=16, num_classes=4))


def divide(graph: GraphSource, parts: Any, scratch: Path) -> Assigned:
    return assign(AssigningOptions(parts, "random"), graph, scratch / "method", None, lambda doing, share: None)


@pytest.mark.parametrize("workers, memory", [(0, 10**9), (2, 0)])
def test_workers_without_memory_are_refused(tmp_path: Path, graph: GraphSource, workers: int, memory: int) -> None:
    with pytest.raises(ConfigError, match="expected at least 1 of each"):
        divide(graph, PartsByMemory(workers, memory, -1), tmp_path)


def test_the_number_of_parts_by_a_reserve(tmp_path: Path, graph: GraphSource) -> None:
    """S / (M - T), rounded up, and one for each worker at least: section III-C of SDT-GNN."""
    data = 2000 * (16 * 4 + 8 + 3 + 16 + 4) + 30_000 * 16  # features, label, masks, IDs and type; IDs of edges
    for workers, room, parts in ((1, 10**6, 1), (4, 10**6, 4), (2, 150_000, 6)):
        assigned = divide(graph, PartsByMemory(workers, 10**7, 10**7 - room), tmp_path)
        assert assigned.num_parts == parts
        assert len(np.unique(assigned.part_of)) == parts
        said = assigned.why.split(" MB, and")[0]
        size = float(said.split()[-1]) * 1e6
        assert data < size < 1.4 * data  # and structure, 4 bytes an edge and some a node
        assert parts == max(workers, -(-size // room))
    with pytest.raises(ConfigError, match=r"10.0 MB of a worker's 10.0 MB are reserved"):
        divide(graph, PartsByMemory(2, 10**7, 10**7), tmp_path)


def test_graph_and_features_are_those_that_a_worker_holds(graph: GraphSource, tmp_path: Path) -> None:
    found = run_partition(graph, AssigningOptions(1, "random"), OutputOptions(tmp_path / "parts"))
    counts = count_graph(found.json_file)
    _, structure = counted_graph(counts, 0, Group(Transport(0, 1)))
    said = divide(graph, PartsByMemory(1, 10**9, 0), tmp_path).why
    size = float(said.split(" MB, and")[0].split()[-1]) * 1e6
    assert size == pytest.approx(counts.data_bytes(0) + structure.nbytes, rel=0.1)


@pytest.mark.parametrize("name", ["no nodes", "no edges"])
def test_graphs_without_edges(tmp_path: Path, name: str) -> None:
    assert divide(odd_graphs()[name], PartsByMemory(3, 2**30, 0), tmp_path).num_parts == 3


def test_a_given_assignment_has_its_number(tmp_path: Path, graph: GraphSource) -> None:
    options = AssigningOptions(PartsByMemory(2, 2**30, 0), assignment=tmp_path)
    with pytest.raises(ConfigError, match="has a fixed number of parts"):
        assign(options, graph, tmp_path / "method", None, lambda doing, share: None)
