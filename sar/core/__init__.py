"""The engine, free of DGL: the distributed graph and what happens when a layer calls it."""

from sar.core.graph.graph import DistributedBlock, GraphShardManager, construct_full_graph
from sar.core.graph.mfg import construct_mfgs

HeteroGraphShardManager = GraphShardManager
"""SAR's name: one class serves homogeneous and heterogeneous graphs."""

__all__ = ["DistributedBlock", "GraphShardManager", "HeteroGraphShardManager", "construct_full_graph", "construct_mfgs"]
