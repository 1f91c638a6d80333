"""PyTorch Geometric's layers on graphs that span all workers: `sar.pyg`. Nothing else in sar imports that package."""

from sar.adapters.pyg import layers, propagate
from sar.adapters.pyg.edge_index import edge_index
from sar.adapters.pyg.norms import convert_norms, global_add_pool, global_max_pool, global_mean_pool

__all__ = ["convert_norms", "edge_index", "global_add_pool", "global_max_pool", "global_mean_pool"]

propagate.install()
layers.install()
