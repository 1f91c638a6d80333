"""The benchmark of averaged models: its table from made-up curves, and the whole path on a tiny graph."""

import re
from pathlib import Path

import pytest

from benchmarks.npz import write_npz
from benchmarks.studies import averaging
from benchmarks.studies.averaging import AVERAGED, EXACT, METHODS, Curve, Part
from sar.cli.demo import community_graph
from tests.benchmarks.test_benchmarks import benchmark


def made_up() -> list[Part]:
    curves = [
        Curve(EXACT, 0, [1, 2, 3], [0.5, 1.0, 1.5], [0.5, 0.8, 0.7]),
        Curve(EXACT, 1, [1, 2, 3], [1.0, 2.0, 3.0], [0.6, 0.7, 0.8]),
        Curve(AVERAGED, 0, [2, 4], [1.0, 2.0], [0.5, 0.79]),
        Curve(AVERAGED, 1, [2, 4], [1.0, 2.0], [0.7, 0.75]),
    ]
    return [Part("cora", curves)]


def test_table() -> None:
    header, first, second = averaging.table(made_up())
    assert header == ("trained", "cora: best; epochs, s to 98% of exact")
    assert first == (EXACT, "0.8000 ± 0.0000; 2, 2.0")  # 0.784 after 2 and 3 epochs, of 1 and 3 s
    assert second == (AVERAGED, "0.7700 ± 0.0283; -"), "one does not reach it"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_path(tmp_path: Path) -> None:
    write_npz(community_graph(300, 3000, num_features=8, num_classes=3), tmp_path / "mine.npz")
    paths = "--work", tmp_path / "work", "--docs", tmp_path / "docs"
    sizes = "--seeds", "1", "--epochs", "40", "--batch-epochs", "8", "--batch-size", "20"
    done = benchmark("benchmarks.studies", "averaging", *sizes, "--graphs", tmp_path / "mine.npz", *paths, timeout=500)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "docs" / "benchmarks.md").read_text()
    accuracies = re.findall(rf"\| ({'|'.join(METHODS)}) *\| *(0\.\d+)", text)
    assert [method for method, _ in accuracies] == list(METHODS)
    for method, accuracy in accuracies:
        # Parts are communities, and so classes: averaged models fall behind, but know more than the share of a class.
        assert float(accuracy) > (0.6 if method.startswith("exact") else 0.4)
    assert "| averaged, mini-batches" in text
    assert (tmp_path / "docs" / averaging.PICTURE).stat().st_size > 10_000
