"""The graphs to measure on, generated or real, and their METIS partitions in a work directory."""

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.npz import load_graph, read_npz, write_npz
from sar.data.arrays import Array
from sar.errors import ConfigError
from sar.partition.graph_source import GraphSource
from sar.partition.in_memory import divide, training_graph

QUADRANTS = 0.57, 0.19, 0.19
"""Probabilities a, b, c of R-MAT, those of Graph500."""

NUM_CLASSES = 16
"""Of random labels."""

DATA = Path(os.environ.get("SAR_TEST_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")
"""Where real graphs lie as `.npz` files."""


@dataclass(frozen=True)
class GeneratedSize:
    """Nodes, edges (before self-loops) and features of a generated graph."""

    nodes: int = 100_000
    edges: int = 2_000_000
    features: int = 128


@dataclass(frozen=True)
class Prepared:
    """A graph on disk, with self-loops, features, labels and a split; partitions are made when asked for."""

    name: str
    data: GraphSource
    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "graph.npz"

    @property
    def num_features(self) -> int:
        return int(self.data.node_data["_N"]["feat"].shape[1])

    @property
    def num_classes(self) -> int:
        return int(self.data.node_data["_N"]["label"][:].max()) + 1

    def partitions(self, num_parts: int) -> Path:
        """The partition file of METIS parts balanced by edges, made if it is not there."""
        folder = self.folder / f"parts-{num_parts}"
        if not folder.exists():
            unfinished = self.folder / f"unfinished-{num_parts}"
            shutil.rmtree(unfinished, ignore_errors=True)
            divide(self.data, unfinished, "graph", num_parts)
            unfinished.rename(folder)
        return folder / "graph.json"


def prepare(name: str, size: GeneratedSize, data: Path, work: Path, seed: int) -> Prepared:
    """Generate or load a graph and write it to the work directory, unless it is there.

    Args:
        name: "rmat", or a data set as `sar demo --dataset` takes it.
        size: of the generated graph; its features are also the width of random features of real graphs.
        data: folder of `.npz` files.
        work: the directory to use.
        seed: of all that is random.

    Raises:
        ConfigError: the graph cannot be generated or loaded.
    """
    sizes = f"-{size.nodes}-{size.edges}" if name == "rmat" else ""
    folder = work / f"{Path(name).stem}{sizes}-{size.features}-{seed}"
    file = folder / "graph.npz"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        graph = rmat_graph(size.nodes, size.edges, seed) if name == "rmat" else _real_graph(name, data)
        graph = training_graph(with_fields(graph, size.features, seed), seed, undirected=False)
        write_npz(graph, folder / "unfinished.npz")
        (folder / "unfinished.npz").rename(file)
    return Prepared(Path(name).stem, read_npz(file), folder)


def rmat_graph(num_nodes: int, num_edges: int, seed: int = 0) -> GraphSource:
    """A recursive-matrix graph (Chakrabarti et al., 2004): distinct directed edges, no loops, nodes in random order.

    Args:
        num_nodes: N; edges that end beyond it, up to the next power of two, are drawn again.
        num_edges: E.
        seed: the same seed gives the same graph.

    Raises:
        ConfigError: so many edges cannot be drawn between so few nodes.
    """
    if num_nodes < 2 or not 0 < num_edges <= num_nodes**2 // 10:
        raise ConfigError(
            f"cannot draw {num_edges} edges between {num_nodes} nodes; expected 1 to {num_nodes**2 // 10} edges."
        )
    rng = np.random.default_rng(seed)
    codes = np.empty(0, dtype=np.int64)
    for _ in range(1000):
        src, dst = draw_rmat_edges(rng, num_nodes, 2 * (num_edges - len(codes)) + 100)
        codes = np.unique(np.concatenate([codes, src * num_nodes + dst]))
        if len(codes) >= num_edges:
            codes = rng.choice(codes, num_edges, replace=False)
            shuffled = rng.permutation(num_nodes)
            return GraphSource.homogeneous(shuffled[codes // num_nodes], shuffled[codes % num_nodes], num_nodes, {})
    raise ConfigError(f"found only {len(codes)} of {num_edges} distinct edges; ask for fewer edges or more nodes.")


def draw_rmat_edges(rng: np.random.Generator, num_nodes: int, count: int) -> tuple[Array, Array]:
    """Ends of at most `count` edges of `rmat_graph` without loops, not distinct."""
    a, b, c = QUADRANTS
    src, dst = np.zeros((2, count), dtype=np.int64)
    for _ in range((num_nodes - 1).bit_length()):
        draw = rng.random(count)
        src = 2 * src + (draw >= a + b)
        dst = 2 * dst + ((draw >= a) & (draw < a + b) | (draw >= a + b + c))
    fits = (src < num_nodes) & (dst < num_nodes) & (src != dst)
    return src[fits], dst[fits]


def with_fields(graph: GraphSource, num_features: int, seed: int) -> GraphSource:
    """The graph with random features and labels in place of those that it lacks."""
    rng = np.random.default_rng(seed)
    drawn: dict[str, Array] = {
        "feat": rng.standard_normal((graph.total_nodes, num_features), dtype=np.float32),
        "label": rng.integers(NUM_CLASSES, size=graph.total_nodes),
    }
    (fields,) = graph.node_data.values()
    return replace(graph, node_data={"_N": {**drawn, **fields}})


def featured_graph(name: str, data: Path) -> GraphSource:
    """A real graph with features of its own, split, in both directions and with self-loops."""
    graph = _real_graph(name, data)
    if "feat" not in graph.node_data["_N"]:
        raise ConfigError(f"'{name}' has no features; expected a graph that has.")
    return training_graph(graph)


def _real_graph(name: str, data: Path) -> GraphSource:
    graph = load_graph(name, data)
    if not graph.is_homogeneous:
        raise ConfigError(f"'{name}' is heterogeneous; the models measured need one node type and one edge type.")
    return graph
