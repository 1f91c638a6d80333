"""Generated and real graphs for benchmarks, and their partitions in a work directory."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import sar
from sar.adapters.dgl.models import dgl_graph
from sar.data.arrays import Array
from sar.errors import ConfigError

QUADRANTS = 0.57, 0.19, 0.19
"""Probabilities a, b, c of R-MAT, those of Graph500."""
NUM_COMMUNITIES, WITHIN = 1024, 0.8
"""Of the graph `communities`, and the share of its edges that are within one."""
GENERATED = "rmat", "communities"
NUM_CLASSES = 16
"""Of random labels."""
DATA = Path(os.environ.get("SAR_TEST_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")
"""The folder of real graphs: .npz files with src, dst and num_nodes, and features and labels if they have any."""


@dataclass(frozen=True)
class GeneratedSize:
    """Nodes, edges (before self-loops) and features of a generated graph."""

    nodes: int = 100_000
    edges: int = 2_000_000
    features: int = 128


class Graph(NamedTuple):
    """Sources and destinations, (E,) int64 each, features (N, F), labels (N,) and the training mask (N,)."""

    src: Array
    dst: Array
    feat: Array
    label: Array
    train_mask: Array

    @classmethod
    def load(cls, file: Path) -> "Graph":
        return cls(**np.load(file))

    def to_dgl(self) -> Any:
        """A `DGLGraph` with the node fields."""
        graph = dgl_graph(self.src, self.dst, len(self.feat))
        graph.ndata.update({name: torch.from_numpy(getattr(self, name)) for name in ("feat", "label", "train_mask")})
        return graph


@dataclass(frozen=True)
class Prepared:
    """A graph on disk, with self-loops; partitions are made on demand."""

    name: str
    graph: Graph
    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "graph.npz"

    @property
    def num_classes(self) -> int:
        return int(self.graph.label.max()) + 1

    def partitions(self, num_parts: int, order: str = "clusters") -> Path:
        """The JSON file of METIS partitions balanced by edges, made on first use."""
        folder = self.folder / f"parts-{num_parts}-{order}"
        if not folder.exists():
            unfinished = self.folder / f"unfinished-{num_parts}"
            shutil.rmtree(unfinished, ignore_errors=True)
            sar.partition_graph(self.graph.to_dgl(), "graph", num_parts, unfinished, balance_edges=True, order=order)
            unfinished.rename(folder)
        return folder / "graph.json"

    def words(self) -> str:
        """One line for the page."""
        return (
            f"**{self.name}**: {len(self.graph.feat):,} nodes, {len(self.graph.src):,} edges with self-loops, "
            f"{self.graph.feat.shape[1]:,} features, {self.num_classes} classes."
        )


def prepare(name: str, size: GeneratedSize, data: Path, work: Path, seed: int) -> Prepared:
    """Generate or read a graph and write it to the work directory, unless the file exists.

    Args:
        name: one of `GENERATED`, or a file in `data`, or a path that ends in .npz.
        size: of the generated graph. Random features of real graphs have the same width.
        data: folder of real graphs.
        work: the directory to use.
        seed: of all random numbers.
    """
    sizes = f"-{size.nodes}-{size.edges}" if name in GENERATED else ""
    prepared = work / f"{Path(name).stem}{sizes}-{size.features}-{seed}"
    file = prepared / "graph.npz"
    if not file.exists():
        prepared.mkdir(parents=True, exist_ok=True)
        if name in GENERATED:
            src, dst = (rmat_edges if name == "rmat" else community_edges)(size.nodes, size.edges, seed)
            arrays: dict[str, Array] = {"num_nodes": np.array(size.nodes)}
        else:
            arrays = read_arrays(name, data)
            src, dst = arrays["src"], arrays["dst"]
        count = int(arrays["num_nodes"])
        rng, other = np.random.default_rng(seed), src != dst
        loops = np.arange(count)
        drawn: dict[str, Array] = {
            "feat": rng.standard_normal((count, size.features), dtype=np.float32),
            "label": rng.integers(NUM_CLASSES, size=count),
            "train_mask": rng.random(count) < 0.6,
        }
        ends = (np.append(ids[other], loops).astype(np.int64) for ids in (src, dst))
        fields = drawn | {key: arrays[key] for key in ("feat", "label") if key in arrays}
        np.savez(prepared / "unfinished.npz", **Graph(*ends, **fields)._asdict())
        (prepared / "unfinished.npz").rename(file)
    return Prepared(Path(name).stem, Graph.load(file), prepared)


def read_arrays(name: str, data: Path) -> dict[str, Array]:
    """The arrays of a real graph, with dense features."""
    file = Path(name) if name.endswith(".npz") else data / f"{name}.npz"
    if not file.exists():
        raise ConfigError(
            f"there is no graph '{file}'; expected one of {', '.join(GENERATED)}, or an .npz file with src, dst and "
            "num_nodes."
        )
    arrays = dict(np.load(file))
    if "src" not in arrays:
        raise ConfigError(f"'{file}' has no array src; the models measured need one node type and one edge type.")
    if "feat_data" in arrays:  # sparse rows
        rows = np.repeat(np.arange(int(arrays["num_nodes"])), np.diff(arrays["feat_indptr"]))
        arrays["feat"] = np.zeros(tuple(arrays["feat_shape"]), np.float32)
        arrays["feat"][rows, arrays["feat_indices"]] = arrays["feat_data"]
    return arrays


def community_edges(num_nodes: int, num_edges: int, seed: int = 0) -> tuple[Array, Array]:
    """Edges of a graph of equal communities with skewed out-degrees; nodes are in random order."""
    rng = np.random.default_rng(seed)
    size = max(1, num_nodes // NUM_COMMUNITIES)
    src = (num_nodes * rng.random(num_edges) ** 1.5).astype(np.int64)
    near = src // size * size + rng.integers(size, size=num_edges)
    is_near = (rng.random(num_edges) < WITHIN) & (near < num_nodes)
    shuffled = rng.permutation(num_nodes)
    return shuffled[src], shuffled[np.where(is_near, near, rng.integers(num_nodes, size=num_edges))]


def rmat_edges(num_nodes: int, num_edges: int, seed: int = 0) -> tuple[Array, Array]:
    """Distinct directed edges, without self-loops, of a recursive-matrix graph (Chakrabarti et al., 2004).

    Nodes are in random order. Edges to numbers above the last node are redrawn.
    """
    if num_nodes < 2 or not 0 < num_edges <= num_nodes**2 // 10:
        expected = f"expected 1 to {num_nodes**2 // 10} edges"
        raise ConfigError(f"cannot draw {num_edges} edges between {num_nodes} nodes; {expected}.")
    rng = np.random.default_rng(seed)
    codes = np.empty(0, dtype=np.int64)
    for _ in range(1000):
        src, dst = draw_rmat_edges(rng, num_nodes, 2 * (num_edges - len(codes)) + 100)
        codes = np.unique(np.concatenate([codes, src * num_nodes + dst]))
        if len(codes) >= num_edges:
            codes = rng.choice(codes, num_edges, replace=False)
            shuffled = rng.permutation(num_nodes)
            return shuffled[codes // num_nodes], shuffled[codes % num_nodes]
    raise ConfigError(f"found only {len(codes)} of {num_edges} distinct edges; ask for fewer edges or more nodes.")


def draw_rmat_edges(rng: np.random.Generator, num_nodes: int, count: int) -> tuple[Array, Array]:
    """Sources and destinations of at most `count` edges without self-loops, possibly repeated."""
    a, b, c = QUADRANTS
    src, dst = np.zeros((2, count), dtype=np.int64)
    for _ in range((num_nodes - 1).bit_length()):
        draw = rng.random(count)
        src = 2 * src + (draw >= a + b)
        dst = 2 * dst + ((draw >= a) & (draw < a + b) | (draw >= a + b + c))
    fits = (src < num_nodes) & (dst < num_nodes) & (src != dst)
    return src[fits], dst[fits]
