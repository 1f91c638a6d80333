"""PyTorch Geometric's layers on graphs that span all workers: `sar.pyg`. Nothing else in sar imports that package."""

from sar.adapters.pyg import layers, propagate
from sar.adapters.pyg.edge_index import edge_index

__all__ = ["edge_index"]

propagate.install()
layers.install()
