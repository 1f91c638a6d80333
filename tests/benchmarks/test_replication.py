"""The comparison of partition methods as SDT-GNN makes it: factors, clusters, and epochs, on tiny graphs."""

import argparse
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.edge_files import GeneratedEdges, both_ways, graph_of, prepare
from benchmarks.studies import replication
from benchmarks.studies.replication import Clusters, GraphResult
from sar.cli.demo import community_graph
from sar.partition.graph_data import write_npz
from tests.benchmarks.test_benchmarks import benchmark

SIZE = GeneratedEdges(nodes=200, edges=1500, communities=4)


def test_both_ways_has_every_edge_with_its_reverse_once(tmp_path: Path) -> None:
    file, num_nodes = prepare("rmat", SIZE, tmp_path, tmp_path, seed=1)
    directed = {pair for src, dst in graph_of(file, num_nodes).chunks() for pair in zip(src, dst, strict=True)}
    [(src, dst)] = graph_of(both_ways(file, num_nodes), num_nodes).chunks()
    assert list(zip(src, dst, strict=True)) == sorted(directed | {(v, u) for u, v in directed})


def test_a_graph_is_measured_by_all_methods_and_numbers(tmp_path: Path) -> None:
    """Against what random parts of a dense graph, and the sizes of clusters, must add up to."""
    file, num_nodes = prepare("sbm", SIZE, tmp_path, tmp_path, seed=1)
    arguments = argparse.Namespace(methods=["random", "spring", "metis"], parts=[2, 4], seed=0)
    found = replication.measure("sbm", both_ways(file, num_nodes), num_nodes, arguments)
    assert list(found.factors) == ["random", "spring", "metis"]
    for two, four in found.factors.values():
        assert 1 < two < 2
        assert two < four < 4
    assert found.factors["metis"][1] < found.factors["random"][1]
    for clusters in (found.clustered, found.merged):
        assert clusters.count * clusters.mean == pytest.approx(200)
    assert 2 <= found.merged.count < found.clustered.count


def test_clusters_without_nodes_do_not_count() -> None:
    assert Clusters.of(np.array([3, 0, 5, 0])) == Clusters(2, 4.0, 1.0)


def test_what_is_said_of_the_baselines() -> None:
    few = Clusters(1, 2.0, 0.0)
    factors = {"spring": [2.0, 3.0], "dbh": [4.0, 3.0], "random": [9.0, 9.0], "hdrf": [2.0, 4.0]}
    one = GraphResult("a", 5, 6, factors, 1.04, few, few)
    other = GraphResult("b", 5, 6, {"spring": [1.0, 1.0], "dbh": [2.0, 2.0]}, 1.01, few, few)
    assert replication.compare([one, other]) == (
        "SPRING's factor is on average 38 % below `dbh`'s (lower in 3 of 4 cases), "
        "12 % below `hdrf`'s (lower in 1 of 2 cases); 25 % below all of these. "
        "The largest part has 1.04 times the mean number of nodes."
    )
    assert replication.compare([replace(one, factors={"random": [9.0]})]).startswith("The largest part")


def test_from_the_command_line_to_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_npz(community_graph(300, 3000, num_features=1), tmp_path / "small.npz")
    paths = ["--docs", str(tmp_path / "docs"), "--work", str(tmp_path / "work"), "--data", str(tmp_path)]
    replication.main(["--graphs", "small", "--methods", "random", "spring", "dbh", "--parts", "2", "3", *paths])
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    for parts in (2, 3):
        assert re.search(rf"\| *small *\| *300 *\| *[\d,]+ *\| *{parts} *\|( *[12]\.\d\d *\|){{3}}", page)
    assert "below `dbh`'s" in page
    assert "with 2 parts in view" in page
    assert str(tmp_path) not in page
    assert "merged clusters" in capsys.readouterr().out


@pytest.mark.slow
def test_epochs_are_measured_on_parts_of_each_method(tmp_path: Path) -> None:
    paths = ["--docs", str(tmp_path / "docs"), "--work", str(tmp_path / "work"), "--data", str(tmp_path)]
    size = ["--graphs", "rmat", "--nodes", "300", "--edges", "2000", "--workers", "2", "--repeats", "1"]
    chosen = ["--epochs", "1", "--models", "SAGE", "--methods", "random", "spring"]
    done = benchmark("benchmarks.studies", "epochs", *size, *chosen, *paths)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    for method in ("random", "spring"):
        assert re.search(rf"\| *{method} *\| *SAGE *\| *\d+\.\d\d[^|]*, \d+\.\d *\|", page)
