"""Layers, embeddings and functions for distributed graphs, free of DGL."""

from sar.nn.edge_softmax import edge_softmax
from sar.nn.embedding import DistEmbedding
from sar.nn.rows import PairGraph, fetch_rows, global_ids, pair_graph
from sar.nn.sparse_optimizers import SparseAdagrad, SparseAdam
from sar.nn.statistics import DistributedBN1D, global_max, global_mean, global_sum

__all__ = [
    "DistEmbedding",
    "DistributedBN1D",
    "PairGraph",
    "SparseAdagrad",
    "SparseAdam",
    "edge_softmax",
    "fetch_rows",
    "global_ids",
    "global_max",
    "global_mean",
    "global_sum",
    "pair_graph",
]
