"""Tools for training scripts: tasks, early stopping, checkpoints, averaged models, plans."""

from sar.adapters.dgl.graphs import local_subgraphs
from sar.train.local_trainer import LocalTrainer

__all__ = ["LocalTrainer", "local_subgraphs"]
