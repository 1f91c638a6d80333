"""Mini-batch training: which seeds go to which worker and batch, and neighbors sampled across all workers.

From seeds to blocks: `loader.py` takes a batch of seeds (`seeds.py`), and `batch.py` samples its layers one after
another. Nodes are sent to their owners (`owner_requests.py`), which draw in-edges (`draws.py`, compiled in `loops.py`)
from their part of the graph (`worker_graph.py`). The nodes of the returned edges are numbered, and features are fetched
in the same way. `sampler.py` creates blocks.
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
