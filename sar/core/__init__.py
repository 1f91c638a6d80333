"""The public import path `sar.core`: distributed graphs and their constructors, the same objects as in `sar`.

A facade over the engine and the adapter for DGL. No other file of sar imports it, except `sar` itself.
"""

from sar.adapters.dgl.graphs import construct_full_graph, construct_mfgs
from sar.core import sampling
from sar.core.graph.graph import DistributedBlock, GraphShardManager

HeteroGraphShardManager = GraphShardManager
"""SAR's name: one class serves homogeneous and heterogeneous graphs."""

__all__ = [
    "DistributedBlock",
    "GraphShardManager",
    "HeteroGraphShardManager",
    "construct_full_graph",
    "construct_mfgs",
    "sampling",
]
