"""Mini-batch training: which seed nodes go to which worker and batch."""

from sar.sampling.optimized_batches import OptimizedBatches
from sar.sampling.seed_batches import SeedBatches
from sar.sampling.split import split_seeds

__all__ = ["OptimizedBatches", "SeedBatches", "split_seeds"]
