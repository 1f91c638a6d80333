"""The whole job of `sar partition`: every input, balance, and assignments from files."""

import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from sar.data.arrays import Array
from sar.errors import ConfigError
from sar.partition.assign import assigning
from sar.partition.assign.assigning import AssigningOptions
from sar.partition.assign.assignment_files import read_assignment
from sar.partition.assign.task import AssignmentTask
from sar.partition.graph_source import ArrayEdges, GraphSource
from sar.partition.ingest.open import open_graph
from sar.partition.inspect.inspection import inspect_directory
from sar.partition.pipeline import read_input, run_partition
from sar.partition.write.write_job import OutputOptions
from tests.partition.written import content_of

EDGES = np.random.default_rng(0).integers(0, 40, (2, 150))


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[AssignmentTask]:
    """What a method is asked for; it deals nodes out one after the other."""
    asked: list[AssignmentTask] = []

    def method(task: AssignmentTask) -> Array:
        asked.append(task)
        (task.scratch / "mine").write_text("")
        return np.arange(task.graph.total_nodes) % task.num_parts

    monkeypatch.setattr(assigning, "method_named", lambda name: method)
    return asked


def test_the_report_says_what_inspection_finds(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    counts = {"b": 30, "a": 20, "none": 0}
    edges = {
        (u, r, v): ArrayEdges(rng.integers(0, counts[u], 90), rng.integers(0, counts[v], 90))
        for u, r, v in (("b", "r", "a"), ("a", "s", "a"), ("a", "t", "b"))
    }
    masks = {ntype: rng.random(counts[ntype]) < 0.4 for ntype in "ba"}
    node_data = {"a": {"feat": rng.random((20, 4)), "train_mask": masks["a"]}, "b": {"train_mask": masks["b"]}}
    graph = GraphSource(counts, edges, node_data, {})
    outcome = run_partition(graph, AssigningOptions(4, "random"), OutputOptions(tmp_path / "parts"))
    found = inspect_directory(outcome.json_file)
    assert found.problems == []
    assert outcome.report == found
    assert np.array_equal(outcome.report.counts, found.counts)
    assert json.loads((tmp_path / "parts" / "report.json").read_text()) == json.loads(json.dumps(found.summary()))


def test_an_assignment_goes_out_and_comes_in(tmp_path: Path, tasks: list[AssignmentTask]) -> None:
    np.save(tmp_path / "edges.npy", EDGES)
    source, folder = partial(open_graph, tmp_path / "edges.npy"), tmp_path / "assignment"
    dealt, output = AssigningOptions(3, "dealt", write_assignment=folder), OutputOptions(tmp_path / "parts", "some")
    made = run_partition(source, dealt, output)
    assert json.loads(made.json_file.read_text())["part_method"] == "dealt"
    assert read_assignment(folder, {"_N": 40}).parts.tolist() == (np.arange(40) % 3).tolist()
    again = OutputOptions(tmp_path / "again", "some")
    outcome = run_partition(source, AssigningOptions(3, assignment=folder), again)
    assert outcome.assigned[2:4] == ("dealt", f"read from {folder}")
    assert content_of(tmp_path / "again") == content_of(tmp_path / "parts")
    [task] = tasks
    assert (task.num_parts, task.seed, task.imbalance) == (3, 0, 0.05)
    with pytest.raises(ConfigError, match=r"holds _N\.txt, partition_meta\.json, and nothing is overwritten"):
        run_partition(source, dealt, OutputOptions(tmp_path / "third"))
    assert sorted(os.listdir(tmp_path)) == ["again", "assignment", "edges.npy", "parts"]


@pytest.mark.parametrize("largest", [2**31 + 5, 2**40, 2**62])
def test_one_large_id_is_told_before_it_takes_all_memory(tmp_path: Path, largest: int) -> None:
    (tmp_path / "edges.csv").write_text(f"0,1\n1,2\n2,{largest}\n")
    how = {"path": tmp_path / "edges.csv", "scratch": tmp_path / "scratch", "cleaning": {}}
    with pytest.raises(ConfigError, match=f"has {largest + 1:,} nodes and 3 edges.*--ids map.*--num-nodes"):
        read_input(**how)
    assert read_input(**how, ids="map").total_nodes == 4
    assert read_input(**how, num_nodes=largest + 1).total_nodes == largest + 1
