"""The benchmark of partition methods: its graphs, what it measures, and its table and picture, on tiny graphs."""

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from benchmarks import partitioning
from benchmarks.edge_files import GeneratedEdges, graph_of, prepare
from benchmarks.npz import write_npz
from benchmarks.partitioning import DGL, READING, Job, measure
from benchmarks.quality import measure_quality
from sar.cli.demo import community_graph
from sar.errors import ConfigError

SIZE = GeneratedEdges(nodes=800, edges=9000, communities=4, homophily=0.8)


@pytest.mark.parametrize("name", ["rmat", "sbm"])
def test_generated_graphs_have_their_size_and_depend_on_the_seed(tmp_path: Path, name: str) -> None:
    (tmp_path / "again").mkdir()
    file, num_nodes = prepare(name, SIZE, tmp_path, tmp_path, seed=1)
    again, _ = prepare(name, SIZE, tmp_path, tmp_path / "again", seed=1)
    other, _ = prepare(name, SIZE, tmp_path, tmp_path, seed=2)
    graph = graph_of(file, num_nodes)
    assert (num_nodes, graph.total_edges) == (800, 9000)
    assert file.read_bytes() == again.read_bytes() != other.read_bytes()
    chunks = list(graph.chunks(1000))
    assert [len(src) for src, _ in chunks] == [1000] * 9
    src, dst = (np.concatenate(ends) for ends in zip(*chunks, strict=True))
    assert 0 <= min(src.min(), dst.min()) <= max(src.max(), dst.max()) < 800
    assert (src != dst).all()
    degrees = np.bincount(dst, minlength=800)
    assert degrees.max() > 4 * degrees.mean(), "the tail of degrees is not heavy"
    forward, back = (sorted(zip(*ends, strict=True)) for ends in ((src, dst), (dst, src)))
    assert (forward == back) == (name == "sbm")


def test_pieces_make_no_other_number_of_edges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.edge_files.PIECE", 1000)
    for name in ("rmat", "sbm"):
        file, num_nodes = prepare(name, SIZE, tmp_path, tmp_path, seed=1)
        assert graph_of(file, num_nodes).total_edges == 9000


@pytest.mark.parametrize("method", [READING, DGL, "ldg", "multilevel"])
def test_a_run_measures_what_quality_measures(tmp_path: Path, method: str) -> None:
    file, num_nodes = prepare("sbm", SIZE, tmp_path, tmp_path, seed=1)
    row = measure(lambda _: None, Job("sbm", file, num_nodes, method, "edges", 4, 0))
    assert len(row.seconds) == len(row.peaks) == 1
    assert (row.edge_cut is None) == (method == READING)
    if row.edge_cut is not None:
        random = measure_quality(graph_of(file, num_nodes), np.arange(num_nodes) % 4, 4)
        assert row.edge_cut < 0.6 * random.edge_cut
        assert row.in_edges is not None
        assert row.in_edges < 1.2


def test_from_the_command_line_to_the_page_and_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitioning, "run_workers", lambda target, job, **_: [target(print, job)])  # in this process
    data = community_graph(300, 3000, num_features=1)
    write_npz(data, tmp_path / "small.npz")
    paths = ["--docs", str(tmp_path / "docs"), "--work", str(tmp_path / "work"), "--data", str(tmp_path)]
    partitioning.main(
        ["--graphs", "small", "--methods", "reading", "ldg", "--balance", "nodes", "--parts", "2", *paths]
    )
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert re.search(r"\| method *\| balanced *\| *small: s, MB, cut *\|", page)
    assert re.search(r"\| reading *\| *\| *\d\.\d\d, \d+ *\| *\|", page)
    assert re.search(r"\| ldg *\| *nodes *\| *\d\.\d\d, \d+, \d\d\.\d % *\| *1\.\d\d *\|", page)
    assert str(tmp_path) not in page
    assert imread(tmp_path / "docs" / partitioning.PICTURE).std() > 0
    (tmp_path / "docs" / "benchmarks.md").unlink()
    partitioning.main(["--from", str(tmp_path / "work" / "partitioning.json"), "--docs", str(tmp_path / "docs")])
    assert (tmp_path / "docs" / "benchmarks.md").read_text() == page
    assert "edge cut" in capsys.readouterr().out


def test_unknown_methods_and_damaged_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are no methods"):
        partitioning.main(["--methods", "best", "--work", str(tmp_path), "--docs", str(tmp_path)])
    (tmp_path / "partitioning.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no results"):
        partitioning.main(["--from", str(tmp_path / "partitioning.json"), "--docs", str(tmp_path)])
