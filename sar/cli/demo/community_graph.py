"""A generated graph with communities, for demonstrations and benchmarks."""

import numpy as np

from sar.errors import ConfigError
from sar.partition.graph_data import GraphData
from sar.storage.arrays import Array


def community_graph(
    num_nodes: int = 20_000,
    num_edges: int = 400_000,
    num_features: int = 64,
    num_classes: int = 8,
    homophily: float = 0.6,
    signal: float = 0.2,
    seed: int = 0,
) -> GraphData:
    """A degree-corrected stochastic block model (Karrer and Newman, 2011) whose communities are the classes.

    Nodes have a heavy-tailed propensity to take edges. An edge picks one end by propensity, and the other by propensity
    among the same community with probability `homophily`, among all nodes otherwise. Features are a random centroid per
    class, entries N(0, 1), times `signal`, plus independent N(0, 1) noise.

    Args:
        num_nodes: N.
        num_edges: directed edges, an even number; both directions of each pair are stored.
        num_features: F.
        num_classes: communities, of about equal size.
        homophily: share of the edges that are drawn within a community.
        signal: distance of the class centroids, against noise of standard deviation 1 on each feature.
        seed: the same seed gives the same graph.

    Raises:
        ConfigError: no such simple graph can be drawn.
    """
    if num_classes < 2 or num_nodes < num_classes or num_edges % 2 or not 0 <= num_edges <= num_nodes**2 // 10:
        raise ConfigError(
            f"cannot draw {num_edges} edges between {num_nodes} nodes of {num_classes} classes; expected at least two "
            f"classes, a node for each, and an even number of edges, at most {num_nodes**2 // 10} for so many nodes."
        )
    rng = np.random.default_rng(seed)
    labels = np.sort(rng.integers(num_classes, size=num_nodes))  # sorted while edges are drawn: classes are ranges
    pairs = _draw_pairs(rng, labels, num_edges // 2, homophily)
    shuffled = rng.permutation(num_nodes)
    labels[shuffled] = labels.copy()
    low, high = shuffled[pairs // num_nodes], shuffled[pairs % num_nodes]
    src, dst = np.concatenate([low, high]), np.concatenate([high, low])
    order = np.lexsort((dst, src))
    centroids = rng.standard_normal((num_classes, num_features), dtype=np.float32)
    noise = rng.standard_normal((num_nodes, num_features), dtype=np.float32)
    feat = np.float32(signal) * centroids[labels] + noise
    return GraphData(src[order], dst[order], num_nodes, {"feat": feat, "label": labels})


def _draw_pairs(rng: np.random.Generator, labels: Array, num_pairs: int, homophily: float) -> Array:
    """Distinct undirected pairs without loops, (num_pairs,), coded as low * N + high; `labels` ascend."""
    num_nodes = len(labels)
    propensity = np.minimum(rng.pareto(2.5, size=num_nodes) + 1, 20)
    ends = np.concatenate([[0], np.cumsum(propensity)])
    first, last = (ends[np.searchsorted(labels, labels, side=side)] for side in ("left", "right"))  # (N,) each

    def pick(low: Array, high: Array) -> Array:
        return np.clip(np.searchsorted(ends, rng.uniform(low, high), side="right") - 1, 0, num_nodes - 1)

    pairs = np.empty(0, dtype=np.int64)
    for _ in range(100):
        everything = np.zeros(num_pairs), np.full(num_pairs, ends[-1])
        u = pick(*everything)
        within = rng.random(num_pairs) < homophily
        v = pick(np.where(within, first[u], everything[0]), np.where(within, last[u], everything[1]))
        fresh = np.minimum(u, v) * num_nodes + np.maximum(u, v)
        pairs = np.unique(np.concatenate([pairs, fresh[u != v]]))
        if len(pairs) >= num_pairs:
            return rng.permutation(pairs)[:num_pairs]
    raise ConfigError(f"found only {len(pairs)} of {num_pairs} distinct pairs; ask for fewer edges or more nodes.")
