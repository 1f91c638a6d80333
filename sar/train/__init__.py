"""What a training script wants around the engine: checkpoints, averaged models, plans of memory and traffic."""

from sar.adapters.dgl.local_subgraphs import local_subgraphs
from sar.train.local_trainer import LocalTrainer

__all__ = ["LocalTrainer", "local_subgraphs"]
