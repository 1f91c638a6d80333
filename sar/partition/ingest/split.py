"""Training, validation and test masks for a graph that comes without them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from sar.common_tuples import SPLIT
from sar.errors import ConfigError
from sar.partition.graph_data import Array, split_masks
from sar.partition.graph_source import Column, GraphSource

LABEL = "label"


def with_split(graph: GraphSource, shares: Sequence[float], seed: int) -> GraphSource:
    """Add masks that divide the labelled nodes of every type at random.

    A node is labelled where its `label` is a number from 0 on, or has several columns. In a graph without labels, and
    with one node type, all nodes are divided.

    Args:
        graph: the graph.
        shares: of the nodes in `train_mask`, `val_mask` and `test_mask`; positive, with a sum of at most 1.
        seed: of the random choice.

    Raises:
        ConfigError: shares are no such numbers; there are masks already; or there are several node types and no labels.
    """
    if len(shares) != len(SPLIT) or not min(shares) >= 0 or not 0 < sum(shares) < 1 + 1e-6:
        raise ConfigError(
            f"the split is {', '.join(map(str, shares))}; expected three shares of the nodes, to train, validate and "
            "test on, with a sum of at most 1, such as 0.6,0.2,0.2."
        )
    labelled = [ntype for ntype in graph.num_nodes if LABEL in graph.node_data.get(ntype, {})]
    if not labelled and len(graph.num_nodes) > 1:
        raise ConfigError(f"no node type among {', '.join(graph.num_nodes)} has a label, so there is nothing to split.")
    node_data = dict(graph.node_data)
    for ntype in labelled or graph.num_nodes:
        fields: Mapping[str, Column] = node_data.get(ntype, {})
        there = [name for name in SPLIT if name in fields]
        if there:
            raise ConfigError(f"'{ntype}' has {', '.join(there)} already; leave these or the split out.")
        chosen = _labelled(fields[LABEL]) if LABEL in fields else np.ones(graph.num_nodes[ntype], np.bool_)
        node_data[ntype] = {**fields, **split_masks(chosen, shares, seed)}
    return replace(graph, node_data=node_data)


def _labelled(labels: Column) -> Array:
    if len(labels.shape) > 1:
        return np.ones(labels.shape[0], np.bool_)
    known: Array = labels[:] >= 0
    return known
