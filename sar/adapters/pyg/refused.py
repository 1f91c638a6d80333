"""What of PyTorch Geometric would take one worker's nodes or edges for all, and raises on a distributed edge index."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch_geometric import transforms, utils
from torch_geometric.nn import models
from torch_geometric.utils import num_nodes as number_of_nodes

from sar.adapters.pyg.edge_index import DistributedEdgeIndex, SourceIndex, edge_indices
from sar.adapters.pyg.guarded import Original, replace
from sar.errors import GraphError

_BEFORE = "Do it before the graph is partitioned"
_MASK = "would take numbers for rows of each worker. Give it a mask of this worker's nodes"
_GREATEST = "divides by the greatest value of all edges. Give it max_value, or norm=False"
_ERROR = "would scale by this worker's mean error. Make it with autoscale=False"

TRANSFORMS: dict[str, str] = {
    **dict.fromkeys(
        ("RandomFlip", "RandomRotate", "RandomScale", "RandomShear"),
        f"draws numbers for all nodes together, of which each worker would draw its own. {_BEFORE}",
    ),
    **dict.fromkeys(
        ("Center", "NormalizeFeatures", "NormalizeRotation", "NormalizeScale", "SVDFeatureReduction"),
        f"needs statistics of all nodes. {_BEFORE}",
    ),
    **dict.fromkeys(("GridSampling", "KNNGraph", "RadiusGraph"), f"compares all nodes. {_BEFORE}"),
    **dict.fromkeys(("FixedPoints", "SamplePoints"), f"chooses among all nodes. {_BEFORE}"),
    **dict.fromkeys(("HalfHop", "SIGN", "ToDense", "VirtualNode"), f"makes edges or matrices of its own. {_BEFORE}"),
    **dict.fromkeys(("Delaunay", "FaceToEdge", "GenerateMeshNormals"), f"is of meshes. {_BEFORE}"),
    **dict.fromkeys(("Cartesian", "Distance", "Polar", "Spherical", "TargetIndegree"), _GREATEST),
    "ToSparseTensor": "would make a matrix of this worker's edges. Pass edge_index, which data.adj_t of a partition is",
    "RandomNodeSplit": f"counts nodes on each worker. {_BEFORE}; sar.split_seeds gives workers equal shares of seeds",
}
"""Transforms that raise on data with a distributed edge index, and why."""

FUNCTIONS: dict[str, str] = {
    "assortativity": f"needs the degrees at both ends of all edges. {_BEFORE}",
    "bipartite_subgraph": _MASK,
    "contains_self_loops": "would look at this worker's edges. Ask sar.all_sum(int((edges[0] == edges[1]).sum()))",
    "homophily": f"would count this worker's edges. {_BEFORE}",
    "subgraph": _MASK,
}
"""Functions of `torch_geometric.utils` that raise, and why."""

_LOSS = "has losses that are means over one worker's. Call model.encoder and model.decoder, and divide by sar.all_sum"

METHODS: dict[tuple[type, str], str] = {
    (models.ARGA, "encode"): _LOSS,
    (models.CorrectAndSmooth, "correct"): _ERROR,
    (models.DeepGraphInfomax, "forward"): "would shuffle and summarise this worker's nodes. Train it on mini-batches",
    (models.GAE, "recon_loss"): _LOSS,
    (models.GAE, "test"): "would rank this worker's pairs. Gather all scores by sar.comm.exchange_tensors",
    (models.Polynormer, "forward"): "would attend between this worker's nodes. Train it on mini-batches",
    (models.SGFormer, "forward"): "would attend between this worker's nodes. Train it on mini-batches",
    (models.VGAE, "encode"): _LOSS,
}
"""Methods of models that raise, and why."""


def install() -> None:
    """Let them raise, and let others find the nodes of a worker without in-edges."""
    for name, reason in TRANSFORMS.items():
        replace(getattr(transforms, name), "forward", _refusing(f"transforms.{name}", reason))
    for (model, name), reason in METHODS.items():
        replace(model, name, _refusing(f"{model.__name__}.{name}", reason))
    refusing = {name: _refusing(name, reason) for name, reason in FUNCTIONS.items()}
    for name, function in (refusing | {"maybe_num_nodes": _count_nodes}).items():
        original = getattr(utils, name, None) or getattr(number_of_nodes, name)
        for module in list(sys.modules.values()):  # users', too
            if getattr(module, "__dict__", {}).get(name) is original:
                replace(module, name, function)


def _count_nodes(original: Original, edge_index: Any, num_nodes: int | None = None) -> int:
    """As `original`, which takes a worker without in-edges for one without nodes."""
    if num_nodes is None and isinstance(edge_index, DistributedEdgeIndex | SourceIndex):
        num_nodes = edge_index.edges.sides[0] if isinstance(edge_index, SourceIndex) else max(edge_index.sides)
    return original(edge_index, num_nodes)


def _refusing(name: str, reason: str) -> Callable[..., Any]:
    right = _RIGHT.get(reason, lambda *_, **__: False)

    def call(original: Original, /, *args: Any, **kwargs: Any) -> Any:
        distributed = any(isinstance(edges, DistributedEdgeIndex) for edges in edge_indices((args, kwargs)))
        if distributed and not right(*args, **kwargs):
            raise GraphError(f"{name} was called with a distributed edge_index, but {reason}.")
        return original(*args, **kwargs)

    return call


def _are_masks(subset: Any, *_: Any, **__: Any) -> bool:
    """Whether nodes, those of two types in a tuple, are given by masks."""
    parts = subset if isinstance(subset, tuple) else [subset]
    return all(getattr(part, "dtype", None) == torch.bool for part in parts)


_RIGHT: dict[str, Callable[..., bool]] = {
    _MASK: _are_masks,
    _GREATEST: lambda transform, *_: not transform.norm or transform.max is not None,
    _ERROR: lambda model, *_, **__: not model.autoscale,
}
"""With which arguments a reason does not hold."""
