"""How many parts are chosen: each fits, one fewer would not, and what is said of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sar
from sar.adapters.dgl.models import LayerStack
from sar.cli.demo import community_graph
from sar.errors import ConfigError
from sar.partition.assign.assigning import Assigned, AssigningOptions, Choice, assign
from sar.partition.graph_data import write_npz
from sar.partition.graph_source import ArrayEdges, GraphSource
from sar.partition.pipeline import InputOptions, OutputOptions, run_assignment, run_partition
from sar.partition.write.write import write_partitions
from sar.train.footprint import FIRST_EPOCH, plan_training
from sar.train.graph_counts import count_graph, count_source
from sar.train.parts_rule import PartsByReserve, PartsThatFit
from tests.partition.graph_tasks import odd_graphs, source
from tests.partition.test_write import small_types
from tests.partition.written import random_source
from tests.train.test_footprint import CLASSES, Typed

PROCESS = 10**5 - FIRST_EPOCH
"""Code that takes a tenth of a megabyte in all."""
WIDTHS = (16, 64, 4)


@pytest.fixture(autouse=True)
def patched_dgl() -> Iterator[None]:
    sar.patch_dgl()
    yield
    sar.unpatch_dgl()


def rule(workers: int, memory: int, widths: Any = WIDTHS, **given: Any) -> PartsThatFit:
    return PartsThatFit(workers, memory, "a model", lambda info: LayerStack("sage", widths), PROCESS, **given)


@pytest.fixture(scope="module")
def graph() -> GraphSource:
    data = community_graph(2000, 30_000, num_features=16, num_classes=4).with_split()
    return GraphSource({"_N": 2000}, {("_N", "_E", "_N"): ArrayEdges(data.src, data.dst)}, {"_N": data.node_data}, {})


def divide(graph: GraphSource, parts: Any, scratch: Path) -> Assigned:
    return assign(AssigningOptions(parts, "multilevel"), graph, scratch / "method", None, lambda doing, share: None)


def largest(graph: GraphSource, parts: int, scratch: Path) -> int:
    """The memory of the largest part, all of them planned."""
    counts = count_source(graph, divide(graph, parts, scratch).part_of, parts)
    plan = plan_training(counts, lambda info: LayerStack("sage", WIDTHS), process=PROCESS)
    return max(worker.memory.total for worker in plan.workers)


@pytest.mark.parametrize("num_parts", [1, 3, 9])
@pytest.mark.parametrize("typed", [False, True])
def test_counts_before_writing_are_those_of_the_directory(tmp_path: Path, num_parts: int, typed: bool) -> None:
    counts = {"b": 30, "a": 20, "none": 0, "one": 1} if typed else {"_N": 60}
    relations = {("b", "r", "a"): 90, ("a", "s", "a"): 40, ("a", "t", "none"): 0, ("one", "u", "b"): 5}
    if not typed:
        relations = {("_N", "_E", "_N"): 300}
    graph = random_source(0, counts, relations)
    part_of = np.random.default_rng(1).integers(num_parts, size=graph.total_nodes)
    written = write_partitions(graph, part_of, num_parts, tmp_path / "parts", "graph", method="some").json_file
    given = {"in_width": 3, "num_classes": 2}
    assert count_source(graph, part_of, num_parts, **given) == count_graph(written, **given)


def test_widths_and_classes_are_those_of_the_directory(tmp_path: Path, graph: GraphSource) -> None:
    part_of = np.arange(2000) % 2
    written = write_partitions(graph, part_of, 2, tmp_path / "parts", "graph", method="some").json_file
    counts = count_source(graph, part_of, 2)
    assert counts == count_graph(written)
    assert (counts.info.in_widths, counts.info.num_classes) == ({"_N": 16}, 4)


def test_the_fewest_parts_that_fit_are_chosen(tmp_path: Path, graph: GraphSource) -> None:
    """To the byte, though parts that are smaller than others in everything are not planned."""
    five = largest(graph, 5, tmp_path)
    assert divide(graph, rule(2, five - 1), tmp_path).num_parts == 6
    assigned = divide(graph, rule(2, five), tmp_path)
    assert assigned.num_parts == 5
    assert (assigned.part_of == divide(graph, 5, tmp_path).part_of).all()
    asked, many, _, takes, fewer = assigned.choice.why.split("\n")
    assert asked == "asked for"
    assert many.startswith("5 parts: a worker has memory for one at a time, so 2 workers take up to 3 each")
    assert many.endswith("it takes 5 workers")
    assert f"the largest of 5 parts takes {five / 1e6:,.1f} MB: activations" in takes
    assert takes.endswith("; beside code and parameters, activations limit most")
    assert fewer.startswith(("the largest of 4 would take", "4 parts are too few even if equal"))


def test_a_part_for_each_worker_is_the_least(tmp_path: Path, graph: GraphSource) -> None:
    assigned = divide(graph, rule(3, 2**30), tmp_path)
    assert assigned.num_parts == 3
    assert "3 parts: 3 workers hold one each, with all parts in memory at once" in assigned.choice.why
    assert repr(rule(3, 2**30)) == repr(rule(3, 2**30))  # by which a killed run is known
    assert len(assigned.choice.why.split("\n")) == 4  # nothing is said of fewer parts


def test_parts_that_turn_out_larger_than_equal_ones_are_passed(graph: GraphSource) -> None:
    """Here a method gives the first part three times its share, unless there are 12 parts or more."""
    tried = []

    def assign_to(parts: int) -> Assigned:
        tried.append(parts)
        share = 2000 // parts if parts >= 12 else min(2000, 6000 // parts)
        rest = np.arange(2000 - share) % (parts - 1) + 1
        return Assigned(np.concatenate([np.zeros(share, np.int64), rest]), parts, Choice("uneven", ""))

    whole = count_source(graph, np.zeros(2000, np.int64), 1)
    memory = plan_training(whole, lambda info: LayerStack("sage", WIDTHS), process=PROCESS).workers[0].memory
    assigned = rule(2, memory.fixed + (memory.total - memory.fixed) * 2 // 9)(graph, assign_to)
    assert assigned.num_parts == 12
    assert tried[0] < 6
    assert 11 in tried
    assert len(tried) == len(set(tried)) < 8
    assert "the largest of 11 would take" in assigned.choice.why


def test_where_no_number_of_parts_fits(tmp_path: Path, graph: GraphSource) -> None:
    with pytest.raises(ConfigError, match=r"fits 0.1 MB a worker: one of 1024 equal parts takes .* MB: process 0.1"):
        divide(graph, rule(2, 100_000), tmp_path)
    star = source(np.arange(20_000) % 50, np.zeros(20_000, np.int64), 50)
    given = {"in_width": 1, "num_classes": 1}
    whole = plan_training(
        count_source(star, np.zeros(50, np.int64), 1, **given),
        lambda info: LayerStack("sage", (1, 2, 1)),
        process=PROCESS,
    )
    memory = whole.workers[0].memory
    limit = memory.fixed + (memory.total - memory.fixed) // 2
    # One node has all edges: that more parts are of no use is told before there is a part for each of 50 nodes.
    with pytest.raises(ConfigError, match=r"the largest of \d parts takes .* structure .*; the largest of \d+ \d"):
        divide(star, rule(2, limit, (1, 2, 1), **given), tmp_path)


def test_types_and_graphs_without_edges(tmp_path: Path) -> None:
    typed = small_types()
    found = divide(typed, PartsThatFit(2, 22_000, "typed", Typed, -FIRST_EPOCH, num_classes=CLASSES), tmp_path)
    assert found.num_parts == 3
    assert "structure" in found.choice.why
    for name in ("no nodes", "no edges"):
        one = rule(3, 2**30, (1, 2, 1), in_width=1, num_classes=1)
        assert divide(odd_graphs()[name], one, tmp_path).num_parts == 3


@pytest.mark.parametrize("workers, memory", [(0, 10**9), (2, 0)])
def test_workers_without_memory_are_refused(tmp_path: Path, graph: GraphSource, workers: int, memory: int) -> None:
    for one in (rule(workers, memory), PartsByReserve(workers, memory, -1)):
        with pytest.raises(ConfigError, match="expected at least 1 of each"):
            divide(graph, one, tmp_path)


def test_the_number_of_parts_by_a_reserve(tmp_path: Path, graph: GraphSource) -> None:
    """S / (M - T), rounded up, and one for each worker at least: section III-C of SDT-GNN."""
    data = 2000 * (16 * 4 + 8 + 3 + 16 + 4) + 30_000 * 16  # features, label, masks, IDs and type; IDs of edges
    for workers, room, parts in ((1, 10**6, 1), (4, 10**6, 4), (2, 150_000, 6)):
        assigned = divide(graph, PartsByReserve(workers, 10**7, 10**7 - room), tmp_path)
        assert assigned.num_parts == parts
        said = assigned.choice.why.split(" MB, and")[0]
        size = float(said.split()[-1]) * 1e6
        assert data < size < 1.4 * data  # and structure, 8 bytes an edge and some a node
        assert parts == max(workers, -(-size // room))
    with pytest.raises(ConfigError, match=r"10.0 MB of a worker's 10.0 MB are reserved"):
        divide(graph, PartsByReserve(2, 10**7, 10**7), tmp_path)


def test_a_given_assignment_has_its_number(tmp_path: Path, graph: GraphSource) -> None:
    options = AssigningOptions(rule(2, 2**30), assignment=tmp_path)
    with pytest.raises(ConfigError, match="has a number of parts of its own"):
        assign(options, graph, tmp_path / "method", None, lambda doing, share: None)


def test_the_directory_has_the_parts_chosen(tmp_path: Path) -> None:
    data = community_graph(300, 3000, num_features=16, num_classes=4).with_split()
    write_npz(data, tmp_path / "small.npz")
    input_options = InputOptions(str(tmp_path / "small.npz"))
    assigning = AssigningOptions(PartsByReserve(2, 10**6, 970_000), "random", write_assignment=tmp_path / "written")
    outcome = run_partition(input_options, assigning, OutputOptions(tmp_path / "parts"))
    parts = len(outcome.report.parts)
    assert parts > 2
    assert f"\n{parts} parts: a worker has memory for one at a time" in outcome.assigned.choice.why
    again = AssigningOptions(assigning.parts, "random", write_assignment=tmp_path / "alone")
    assert run_assignment(input_options, again)[0] == outcome.assigned.choice
    for name in ("_N.txt", "partition_meta.json"):
        assert (tmp_path / "alone" / name).read_text() == (tmp_path / "written" / name).read_text()
