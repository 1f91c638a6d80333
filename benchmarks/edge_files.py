"""Graphs as files of edges, for the benchmark of partitioning: generated piece by piece, or from `.npz` files."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.graphs import draw_rmat_edges
from benchmarks.npz import load_graph
from sar.data.arrays import Array, open_raw
from sar.errors import ConfigError
from sar.partition.graph_source import GraphSource
from sar.partition.ingest.edges import PairEdges

PIECE = 1 << 20
"""Edges that are drawn at a time."""
Draw = Callable[[np.random.Generator, int], tuple[Array, Array]]
"""At most about so many edges: sources and destinations."""


@dataclass(frozen=True)
class GeneratedEdges:
    """Size of a generated graph.

    communities, homophily: of "sbm": how many, and which share of the edges is drawn within one.
    """

    nodes: int = 1_000_000
    edges: int = 16_000_000
    communities: int = 32
    homophily: float = 0.65


def prepare(name: str, size: GeneratedEdges, data: Path, work: Path, seed: int) -> tuple[Path, int]:
    """Write the edges of a graph to the work directory, unless they are there; returns the file and N.

    Args:
        name: "rmat", "sbm", or a data set as `sar demo --dataset` takes it.
        size: of a generated graph.
        data: folder of `.npz` files.
        work: the directory to use.
        seed: of the generator.

    Raises:
        ConfigError: the graph cannot be generated or loaded.
    """
    if name not in ("rmat", "sbm"):
        graph = load_graph(name, data)
        if not graph.is_homogeneous:
            raise ConfigError(f"'{name}' is heterogeneous; this benchmark takes graphs of one type.")
        file = work / f"{Path(name).stem}.edges"
        _write(file, lambda: iter([graph.ends()]))
        return file, graph.total_nodes
    file = work / f"{name}-{'-'.join(map(str, vars(size).values()))}-{seed}.edges"
    _write(file, lambda: _generated(rmat(size) if name == "rmat" else sbm(size, seed), size, seed))
    return file, size.nodes


def graph_of(file: Path, num_nodes: int) -> GraphSource:
    """A prepared graph as partition methods take it."""
    return GraphSource(
        {"_N": num_nodes}, {("_N", "_E", "_N"): PairEdges(open_raw(file, np.dtype(np.int32), (2,)))}, {}, {}
    )


def rmat(size: GeneratedEdges) -> Draw:
    """Edges of a recursive-matrix graph, see `benchmarks.graphs.rmat_graph`; parallel ones stay."""
    return lambda rng, count: draw_rmat_edges(rng, size.nodes, count)


def sbm(size: GeneratedEdges, seed: int) -> Draw:
    """Edges, both ways round, of a degree-corrected block model, see `community_graph`; parallel ones stay."""
    rng = np.random.default_rng([seed, 1])
    labels = np.sort(rng.integers(size.communities, size=size.nodes))
    ends = np.concatenate([[0], np.cumsum(np.minimum(rng.pareto(2.5, size=size.nodes) + 1, 20))])
    firsts = ends[np.searchsorted(labels, np.arange(size.communities + 1))]  # of each community, and the end

    def pick(rng: np.random.Generator, low: Array, high: Array) -> Array:
        return np.clip(np.searchsorted(ends, rng.uniform(low, high), side="right") - 1, 0, size.nodes - 1)

    def draw(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
        low, high = np.zeros(count // 2), np.full(count // 2, ends[-1])
        u = pick(rng, low, high)
        within = rng.random(count // 2) < size.homophily
        v = pick(rng, np.where(within, firsts[labels[u]], low), np.where(within, firsts[labels[u] + 1], high))
        both = np.stack([u, v], axis=1)  # so that each edge is followed by the same one the other way round
        return both.ravel(), both[:, ::-1].ravel()

    return draw


def _generated(draw: Draw, size: GeneratedEdges, seed: int) -> Iterator[tuple[Array, Array]]:
    """So many edges without loops, with nodes in random order."""
    rng = np.random.default_rng([seed, 0])
    shuffled, left = rng.permutation(size.nodes), size.edges
    while left > 0:
        src, dst = draw(rng, min(PIECE, 2 * left + 2))
        kept = np.flatnonzero(src != dst)[:left]
        yield shuffled[src[kept]], shuffled[dst[kept]]
        left -= len(kept)


def _write(file: Path, pieces: Callable[[], Iterator[tuple[Array, Array]]]) -> None:
    if file.exists():
        return
    unfinished = file.with_suffix(".unfinished")
    with open(unfinished, "wb") as stream:
        for src, dst in pieces():
            np.stack([src, dst], axis=1).astype(np.int32).tofile(stream)
    unfinished.rename(file)


def both_ways(file: Path, num_nodes: int) -> Path:
    """The undirected graph of a prepared one: every edge with its reverse, once each, sorted, in a file beside it."""
    undirected = file.with_name(f"{file.stem}-undirected.edges")

    def edges() -> tuple[Array, Array]:
        src, dst = np.fromfile(file, np.int32).reshape(-1, 2).astype(np.int64).T
        codes = np.unique(np.concatenate([src * num_nodes + dst, dst * num_nodes + src]))
        return codes // num_nodes, codes % num_nodes

    _write(undirected, lambda: iter([edges()]))
    return undirected
