"""Mini-batch training: which seeds go to which worker and batch, and neighbors sampled across all workers.

A seed's way to a block: `loader.py` takes its batch (`seed_batches.py`) and starts it in `batch.py`, where features are
fetched, too. `neighbors.py` samples one layer after another: it sends nodes to their owners (`owner_requests.py`),
which draw in-edges (`draws.py`) in their part of the graph (`worker_graph.py`), and numbers the nodes of the edges that
come back. `sampler.py` makes blocks of the layers.
"""

from sar.sampling.edge_sampler import EdgePredictionSampler
from sar.sampling.loader import DataLoader
from sar.sampling.sampler import DistNeighborSampler
from sar.sampling.seed_batches import SeedBatches
from sar.sampling.seeds import reverse_edges, split_edges, split_seeds

__all__ = [
    "DataLoader",
    "DistNeighborSampler",
    "EdgePredictionSampler",
    "SeedBatches",
    "reverse_edges",
    "split_edges",
    "split_seeds",
]
