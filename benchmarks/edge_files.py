"""Files of edges for the partitioning benchmark: of generated and real graphs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.graphs import draw_rmat_edges, read_arrays
from sar.data.arrays import Array

PIECE = 1 << 20
"""Edges that are drawn at a time."""
Draw = Callable[[np.random.Generator, int], tuple[Array, Array]]
"""At most about so many edges: sources and destinations."""


@dataclass(frozen=True)
class GeneratedEdges:
    """Size of a generated graph."""

    nodes: int = 1_000_000
    edges: int = 16_000_000
    communities: int = 32  # of "sbm"
    homophily: float = 0.65  # of "sbm": the fraction of edges drawn within a community


def prepare(name: str, size: GeneratedEdges, data: Path, work: Path, seed: int) -> tuple[Path, int]:
    """Write the edges of a graph, (E, 2) int32, to the work directory, unless the file exists.

    Args:
        name: "rmat", "sbm", or a real graph as in `benchmarks.graphs.prepare`.
        size: of a generated graph.
        data: folder of real graphs.
        work: the directory to use.
        seed: of the generator.

    Returns:
        The .npy file, and the number of nodes.
    """
    if name in ("rmat", "sbm"):
        file = work / f"{name}-{'-'.join(map(str, vars(size).values()))}-{seed}.npy"
        pieces, num_nodes, num_edges = _generated(name, size, seed), size.nodes, size.edges
    else:
        arrays = read_arrays(name, data)
        file = work / f"{Path(name).stem}.npy"
        pieces = iter([(arrays["src"], arrays["dst"])])
        num_nodes, num_edges = int(arrays["num_nodes"]), len(arrays["src"])
    if not file.exists():
        unfinished = file.with_suffix(".unfinished")
        rows = np.lib.format.open_memmap(unfinished, "w+", np.int32, (num_edges, 2))
        done = 0
        for src, dst in pieces:
            rows[done : done + len(src)] = np.stack([src, dst], axis=1)
            done += len(src)
        rows.flush()
        unfinished.rename(file)
    return file, num_nodes


def _generated(name: str, size: GeneratedEdges, seed: int) -> Iterator[tuple[Array, Array]]:
    """Edges without self-loops, possibly repeated; nodes are in random order."""
    draw = sbm(size, seed) if name == "sbm" else lambda rng, count: draw_rmat_edges(rng, size.nodes, count)
    rng = np.random.default_rng([seed, 0])
    shuffled, left = rng.permutation(size.nodes), size.edges
    while left > 0:
        src, dst = draw(rng, min(PIECE, 2 * left + 2))
        kept = np.flatnonzero(src != dst)[:left]
        yield shuffled[src[kept]], shuffled[dst[kept]]
        left -= len(kept)


def communities(size: GeneratedEdges, seed: int) -> Array:
    """The community of each node of "sbm"."""
    found = np.empty(size.nodes, np.int64)
    shuffled = np.random.default_rng([seed, 0]).permutation(size.nodes)
    found[shuffled] = _communities(np.random.default_rng([seed, 1]), size)
    return found


def _communities(rng: np.random.Generator, size: GeneratedEdges) -> Array:
    """The community of each node before shuffling."""
    return np.sort(rng.integers(size.communities, size=size.nodes))


def sbm(size: GeneratedEdges, seed: int) -> Draw:
    """Edges in both directions of a degree-corrected block model, as `community_graph` of the demo."""
    rng = np.random.default_rng([seed, 1])
    labels = _communities(rng, size)
    ends = np.concatenate([[0], np.cumsum(np.minimum(rng.pareto(2.5, size=size.nodes) + 1, 20))])
    firsts = ends[np.searchsorted(labels, np.arange(size.communities + 1))]  # first node of each community, and the end

    def pick(rng: np.random.Generator, low: Array, high: Array) -> Array:
        return np.clip(np.searchsorted(ends, rng.uniform(low, high), side="right") - 1, 0, size.nodes - 1)

    def draw(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
        low, high = np.zeros(count // 2), np.full(count // 2, ends[-1])
        u = pick(rng, low, high)
        within = rng.random(count // 2) < size.homophily
        v = pick(rng, np.where(within, firsts[labels[u]], low), np.where(within, firsts[labels[u] + 1], high))
        both = np.stack([u, v], axis=1)  # each edge is followed by its reverse
        return both.ravel(), both[:, ::-1].ravel()

    return draw
