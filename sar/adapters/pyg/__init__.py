"""PyTorch Geometric's layers on graphs that span all workers; `sar.pyg`. The only part of sar that imports its package."""

from sar.adapters.pyg.edge_index import edge_index
from sar.adapters.pyg.propagate import install

install()

__all__ = ["edge_index"]
