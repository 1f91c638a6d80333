"""Files that the commands and scripts of the pages find in their folder, by the names that pages ask for."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from sar.cli.demo.community_graph import community_graph
from sar.partition.graph_data import GraphData, write_npz
from sar.partition.in_memory import divide
from tests.workers import REPOSITORY


def small_graph() -> GraphData:
    """300 nodes in four classes, edges both ways and self-loops, a split, and an edge weight."""
    data = community_graph(300, 2400, num_features=12, num_classes=4).with_split()
    data = data.with_reverse_edges().with_self_loops()
    weights = np.random.default_rng(0).random(len(data.src), np.float32)
    return replace(data, edge_data={"w": weights})


def graph(folder: Path) -> None:
    """A partition directory in two parts."""
    divide(small_graph(), folder / "partitions" / "graph", "graph", 2)


def examples(folder: Path) -> None:
    """The scripts of this repository."""
    (folder / "examples").symlink_to(REPOSITORY / "examples")


def csv(folder: Path) -> None:
    """Edges as text, features and labels as arrays."""
    rng = np.random.default_rng(0)
    for number in range(2):
        np.savetxt(folder / f"edges-{number}.csv", rng.integers(0, 400, (1500, 2)), "%d", ",")
    np.save(folder / "features.npy", rng.random((400, 6), dtype=np.float32))
    np.save(folder / "labels.npy", rng.integers(0, 3, 400))


def npz(folder: Path) -> None:
    """A small graph as `.npz`, without loops or reverse edges."""
    write_npz(community_graph(400, 4000, num_features=16, num_classes=4), folder / "cora.npz")


FILES: dict[str, Callable[[Path], None]] = {f.__name__: f for f in (csv, examples, graph, npz)}
