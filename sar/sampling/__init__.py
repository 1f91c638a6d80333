"""Mini-batch training: which seeds go to which worker and batch, and neighbors sampled across all workers.

A seed's way to a block: `loader.py` takes its batch (`seeds.py`) and draws it in `batch.py`, which samples one layer
after another. It sends nodes to their owners (`owner_requests.py`), which draw in-edges (`draws.py`, compiled in
`loops.py`) in their part of the graph (`worker_graph.py`), and numbers the nodes of the edges that come back. Features
are fetched likewise. `sampler.py` makes blocks of the layers.
"""

from sar.sampling.edge_sampler import EdgePredictionSampler
from sar.sampling.loader import DataLoader
from sar.sampling.sampler import DistNeighborSampler
from sar.sampling.seed_edges import reverse_edges, split_edges
from sar.sampling.seeds import SeedBatches, split_seeds

__all__ = [
    "DataLoader",
    "DistNeighborSampler",
    "EdgePredictionSampler",
    "SeedBatches",
    "reverse_edges",
    "split_edges",
    "split_seeds",
]
