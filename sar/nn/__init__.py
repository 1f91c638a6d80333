"""Layers and functions for distributed graphs, free of DGL."""

from sar.nn.batch_norm import DistributedBN1D
from sar.nn.edge_softmax import edge_softmax

__all__ = ["DistributedBN1D", "edge_softmax"]
