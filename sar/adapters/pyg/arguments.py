"""The edge indices among what something is called with."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data.data import BaseData

from sar.adapters.pyg.edge_index import DistributedEdgeIndex


def edge_indices(value: Any) -> Iterator[Tensor]:
    """The edge indices in arguments, in data and dictionaries too: distributed ones, and those of this worker alone."""
    if isinstance(value, Tensor) and value.dtype == torch.int64 and value.dim() == 2 == len(value):
        yield value
    elif isinstance(value, BaseData):
        yield from edge_indices(value.to_dict())
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from edge_indices(part)


def are_distributed(*args: Any) -> bool:
    """Whether a distributed edge index is among the arguments."""
    return any(isinstance(edges, DistributedEdgeIndex) for edges in edge_indices(args))
