"""Layers, embeddings and functions for distributed graphs, free of DGL."""

from sar.nn.batch_norm import DistributedBN1D, convert_batchnorm
from sar.nn.edge_softmax import edge_softmax
from sar.nn.embedding import DistEmbedding
from sar.nn.fetch_rows import fetch_rows
from sar.nn.pair_graph import PairGraph, pair_graph
from sar.nn.sparse_optimizers import SparseAdagrad, SparseAdam

__all__ = [
    "DistEmbedding",
    "DistributedBN1D",
    "PairGraph",
    "SparseAdagrad",
    "SparseAdam",
    "convert_batchnorm",
    "edge_softmax",
    "fetch_rows",
    "pair_graph",
]
