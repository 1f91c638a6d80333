"""The benchmark of partition methods: its graphs, what it measures, and its table and picture, on tiny graphs."""

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

import sar
from benchmarks import partitioning
from benchmarks.edge_files import GeneratedEdges, prepare
from benchmarks.partitioning import DGL, READING, Job, measure
from benchmarks.quality import measure_quality

SIZE = GeneratedEdges(nodes=800, edges=9000, communities=4, homophily=0.8)


@pytest.mark.parametrize("name", ["rmat", "sbm"])
def test_generated_graphs_have_their_size_and_depend_on_the_seed(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "again").mkdir()
    file, num_nodes = prepare(name, SIZE, tmp_path, tmp_path, seed=1)
    again, _ = prepare(name, SIZE, tmp_path, tmp_path / "again", seed=1)
    other, _ = prepare(name, SIZE, tmp_path, tmp_path, seed=2)
    assert file.read_bytes() == again.read_bytes() != other.read_bytes()
    src, dst = np.load(file).T
    assert (num_nodes, len(src)) == (800, 9000)
    assert 0 <= min(src.min(), dst.min()) <= max(src.max(), dst.max()) < 800
    assert (src != dst).all()
    degrees = np.bincount(dst, minlength=800)
    assert degrees.max() > 4 * degrees.mean(), "the tail of degrees is not heavy"
    forward, back = (sorted(zip(*ends, strict=True)) for ends in ((src, dst), (dst, src)))
    assert (forward == back) == (name == "sbm")
    monkeypatch.setattr("benchmarks.edge_files.PIECE", 1000)
    in_pieces, _ = prepare(name, SIZE, tmp_path, tmp_path, seed=3)
    assert len(np.load(in_pieces)) == 9000


@pytest.mark.parametrize("method", [READING, DGL, "ldg", "multilevel"])
def test_a_run_measures_what_quality_measures(tmp_path: Path, method: str) -> None:
    file, num_nodes = prepare("sbm", SIZE, tmp_path, tmp_path, seed=1)
    row = measure(lambda _: None, Job(file, num_nodes, method, "edges", 4, 0))
    assert row.seconds > 0
    assert (row.edge_cut is None) == (row.largest is None) == (method == READING)
    if row.edge_cut is not None and row.largest is not None:
        random = measure_quality(sar.open_graph(file, tmp_path, num_nodes=num_nodes), np.arange(num_nodes) % 4, 4)
        assert row.edge_cut < 0.6 * random.edge_cut
        assert row.largest < 1.2


def test_from_the_command_line_to_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioning, "run_workers", lambda target, job, **_: [target(print, job)])  # in this process
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "small.npz", src=rng.integers(300, size=3000), dst=rng.integers(300, size=3000), num_nodes=300)
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
