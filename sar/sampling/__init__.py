"""Mini-batch training: which seed nodes go to which worker and batch, and neighbors sampled across all workers."""

from sar.sampling.edge_sampler import EdgePredictionSampler
from sar.sampling.loader import DataLoader
from sar.sampling.saint import SAINTSampler
from sar.sampling.sampler import DistNeighborSampler
from sar.sampling.seed_batches import SeedBatches
from sar.sampling.seeds import reverse_edges, split_edges, split_seeds
from sar.sampling.subgraphs import ClusterGCNSampler

__all__ = [
    "ClusterGCNSampler",
    "DataLoader",
    "DistNeighborSampler",
    "EdgePredictionSampler",
    "SAINTSampler",
    "SeedBatches",
    "reverse_edges",
    "split_edges",
    "split_seeds",
]
