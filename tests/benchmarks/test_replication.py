"""The comparison of partition methods as SDT-GNN makes it: factors and clusters, on tiny graphs."""

import argparse
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.edge_files import GeneratedEdges, both_ways, graph_of, prepare
from benchmarks.studies import replication
from benchmarks.studies.replication import GraphResult
from sar.cli.demo import community_graph
from sar.partition.npz_files import write_npz

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
    assert 2 <= found.merged < found.clustered < 200


def test_what_is_said_of_the_baselines() -> None:
    factors = {"spring": [2.0, 3.0], "dbh": [4.0, 3.0], "random": [9.0, 9.0], "hdrf": [2.0, 4.0]}
    one = GraphResult("a", 5, 6, factors, 1.04, 6, 2)
    other = GraphResult("b", 5, 6, {"spring": [1.0, 1.0], "dbh": [2.0, 2.0]}, 1.01, 5, 5)
    assert replication.compare([one, other]) == (
        "SPRING's factor is on average 38 % below `dbh`'s (lower in 3 of 4 cases), "
        "12 % below `hdrf`'s (lower in 1 of 2 cases); 25 % below all of these. "
        "The largest part has 1.04 times the mean number of nodes."
    )
    assert replication.merging([one, other]) == "Merging leaves 1.0 to 3.0 times fewer clusters."
    assert replication.compare([replace(one, factors={"random": [9.0]})]).startswith("The largest part")


def test_from_the_command_line_to_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_npz(community_graph(300, 3000, num_features=1), tmp_path / "small.npz")
    paths = ["--docs", str(tmp_path / "docs"), "--work", str(tmp_path / "work"), "--data", str(tmp_path)]
    replication.main(["--graphs", "small", "--methods", "random", "spring", "dbh", "--parts", "2", "3", *paths])
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert re.search(r"\| *small *\| *300 *\| *[\d,]+ *\| *2, 3 *\|( *[12]\.\d\d, [12]\.\d\d *\|){3}", page)
    assert "below `dbh`'s" in page
    assert "times fewer clusters" in page
    assert str(tmp_path) not in page
    assert "2, 3" in capsys.readouterr().out
