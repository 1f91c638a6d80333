"""Layers, models, functions and transforms that would mistake one worker's nodes or edges for all.

They raise a `GraphError` that names them if they are called with a distributed edge index, or with a batch vector of
graphs across workers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch_geometric import explain, loader, transforms, utils
from torch_geometric.data.data import BaseData
from torch_geometric.nn import aggr, conv, models, pool
from torch_geometric.nn.attention import PerformerAttention

from sar.adapters.pyg import norms
from sar.adapters.pyg.guarded import GuardedTensor, Original, Replacements
from sar.comm import session
from sar.comm.collectives import all_max
from sar.errors import GraphError

_BEFORE = "Do it before the graph is partitioned"
_MASK = "would take numbers for rows of each worker. Give it a mask of this worker's nodes"

EXACT_TRANSFORMS = {
    *("AddRemainingSelfLoops", "AddSelfLoops", "Compose", "ComposeFilters", "Constant", "GCNNorm", "IndexToMask"),
    *("LinearTransformation", "LocalCartesian", "MaskToIndex", "NormalizeFeatures", "OneHotDegree"),
    *("PointPairFeatures", "RandomJitter", "RemoveSelfLoops", "RemoveTrainingClasses", "ToDevice"),
}
"""Transforms of PyTorch Geometric that are right on the nodes and in-edges of one worker. All others raise.

`NormalizeFeatures` is, once it knows the least value of all workers.
"""

SCALING_TRANSFORMS = {"Cartesian", "Distance", "Polar", "Spherical", "TargetIndegree"}
"""Transforms that divide by the maximum over all edges, unless the maximum is an argument or they do not divide."""

ADVICE = {
    **dict.fromkeys(SCALING_TRANSFORMS, "Give it max_value, or norm=False"),
    "RandomNodeSplit": f"{_BEFORE}; sar.split_seeds gives workers equal shares of seeds",
    "ToSparseTensor": "Pass edge_index, which data.adj_t of a partition is",
}
"""Advice for transforms, if it is not to apply them before partitioning."""

FUNCTIONS: dict[str, str] = {
    "assortativity": f"needs the degrees at both ends of all edges. {_BEFORE}",
    "bipartite_subgraph": _MASK,
    "contains_self_loops": "would look at this worker's edges. Ask sar.all_sum(int((edges[0] == edges[1]).sum()))",
    "homophily": f"would count this worker's edges. {_BEFORE}",
    "is_undirected": f"needs the edges out of this worker's nodes. {_BEFORE}",
    "negative_sampling": "would draw among this worker's nodes. Use sar.pair_graph, or sar.EdgePredictionSampler",
    "sort_edge_index": f"would sort this worker's edges. {_BEFORE}",
    "subgraph": _MASK,
    "to_undirected": f"would add edges into nodes of other workers. {_BEFORE}",
    "train_test_split_edges": "would split this worker's edges, and draw among its nodes. Split by "
    "transforms.RandomLinkSplit before the graph is partitioned; docs/howto/link-prediction.md has the training",
}
"""Functions of `torch_geometric.utils` that raise, and why."""

_LOSS = "has losses that are means over one worker's. Call model.encoder and model.decoder, and divide by sar.all_sum"
_ERROR = "would scale by this worker's mean error. Make it with autoscale=False"
_TRAINING = "draws pairs without an edge among all nodes while it trains. Train it on mini-batches"
_CHOOSES = "chooses among all nodes of a graph, so it cannot pool graphs across workers. Train it on mini-batches"
_SIDE_BY_SIDE = "needs all nodes of a graph side by side, so it cannot pool graphs across workers"
_SORTS = "sorts the nodes of a graph, so it cannot pool graphs across workers"
_EXPLAINS = (
    "would learn a mask on each worker. Explain batches of sar.DataLoader(..., format='pyg') with fan-outs of -1, or "
    "the graph before it is partitioned, on one machine"
)
_SAMPLES = (
    "takes this worker's edges for all. Use sar.DataLoader(data.graph, seeds, sampler, format='pyg') with "
    "sar.DistNeighborSampler(fanouts), whose prob is weight_attr, and for links sar.EdgePredictionSampler"
)
_CUTS = f"takes this worker's edges for all. {_BEFORE}, or use sar.DataLoader with sar.DistNeighborSampler"
_ATTENDS_TO_ALL = "attends between all nodes of a graph, so it cannot pool graphs across workers"
_ATTENDS = "attends between all pairs of nodes, unless it has attn_type='performer' and no batch"

METHODS: dict[tuple[type, str], str] = {
    (BaseData, "has_isolated_nodes"): "would look at this worker's edges. Add up graph.in_degrees() and out_degrees()",
    (BaseData, "has_self_loops"): FUNCTIONS["contains_self_loops"],
    (BaseData, "is_undirected"): FUNCTIONS["is_undirected"],
    (aggr.EquilibriumAggregation, "forward"): "takes gradients of gradients, so it cannot pool graphs across workers",
    **{(kind, "forward"): _SORTS for kind in (aggr.MedianAggregation, aggr.QuantileAggregation, aggr.SortAggregation)},
    **{(kind, "forward"): _ATTENDS_TO_ALL for kind in (aggr.GraphMultisetTransformer, aggr.SetTransformerAggregation)},
    **{(kind, "forward"): _SIDE_BY_SIDE for kind in (aggr.GRUAggregation, aggr.LCMAggregation, aggr.LSTMAggregation)},
    **{(kind, "forward"): _SIDE_BY_SIDE for kind in (aggr.MLPAggregation, aggr.PatchTransformerAggregation)},
    (conv.GPSConv, "forward"): _ATTENDS,
    **{(kind, "forward"): _CHOOSES for kind in (pool.ASAPooling, pool.ClusterPooling, pool.EdgePooling)},
    **{(kind, "forward"): _CHOOSES for kind in (pool.MemPooling, pool.PANPooling, pool.SAGPooling, pool.TopKPooling)},
    (conv.HypergraphConv, "forward"): "sends from hyperedges to nodes of other workers. Train it on mini-batches",
    (conv.MeshCNNConv, "forward"): "takes four edges that follow one another in edge_index for the neighbours of one",
    (conv.SuperGATConv, "forward"): _TRAINING,
    (conv.WLConv, "forward"): "numbers colours in the order in which it meets them",
    **{(kind, "__init__"): _CUTS for kind in (loader.ClusterData, loader.GraphSAINTSampler, loader.RandomNodeLoader)},
    **{(kind, "__init__"): _SAMPLES for kind in (loader.NeighborLoader, loader.LinkNeighborLoader, loader.HGTLoader)},
    **{(kind, "__init__"): _SAMPLES for kind in (loader.NeighborSampler, loader.ShaDowKHopSampler)},
    (explain.Explainer, "__call__"): _EXPLAINS,
    (explain.PGExplainer, "train"): _EXPLAINS,
    **{(kind, "encode"): _LOSS for kind in (models.ARGA, models.VGAE)},
    (models.CorrectAndSmooth, "correct"): _ERROR,
    (models.DeepGraphInfomax, "forward"): "would shuffle and summarise this worker's nodes. Train it on mini-batches",
    (models.GAE, "recon_loss"): _LOSS,
    (models.GAE, "test"): "would rank this worker's pairs. Gather all scores by sar.comm.exchange_tensors",
    (models.Polynormer, "forward"): "would attend between this worker's nodes. Train it on mini-batches",
    (models.SGFormer, "forward"): "would attend between this worker's nodes. Train it on mini-batches",
}
"""Methods of aggregations, layers and models that raise, and why."""


def _is_distributed(value: Any) -> bool:
    """Whether a value is, or contains, a distributed edge index or a batch vector of graphs across workers."""
    value = value.to_dict() if isinstance(value, BaseData) else value
    value = list(value.values()) if isinstance(value, dict) else value
    return any(map(_is_distributed, value)) if isinstance(value, list | tuple) else isinstance(value, GuardedTensor)


def _transform(original: Original, transform: Any, data: Any) -> Any:
    """`BaseTransform.__call__`. Users' transforms are not checked."""
    library = (kind.__name__ for kind in type(transform).__mro__ if kind.__module__.startswith("torch_geometric."))
    name = next(library)
    right = name in EXACT_TRANSFORMS or name == "BaseTransform"
    right |= name in SCALING_TRANSFORMS and (not transform.norm or transform.max is not None)
    if not right and _is_distributed(data):
        advice = ADVICE.get(name, _BEFORE)
        raise GraphError(
            f"transforms.{name} was called on data with a distributed edge_index, but is not known to be right on one "
            f"worker's part of a graph. {advice}."
        )
    return original(transform, data)


def _normalize_features(original: Original, transform: Any, data: Any) -> Any:
    """`NormalizeFeatures.forward`, which subtracts the minimum over all nodes."""
    if not _is_distributed(data):
        return original(transform, data)
    for store in data.stores:
        for key, value in store.items(*transform.attrs):
            own = torch.cat([value.flatten(), value.new_tensor([torch.inf])])  # there may be no node
            value = value + all_max(-own.min())
            store[key] = value / value.sum(-1, keepdim=True).clamp(min=1)
    return data


def _norm(original: Original, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a norm layer, which must be converted if it computes statistics without a batch vector."""
    if session.has_peers() and norms.takes_statistics(layer) and not _is_distributed((args, kwargs)):
        session.current_group().check_model(layer, "forward")
    return original(layer, *args, **kwargs)


def _refusing(name: str, reason: str) -> Callable[..., Any]:
    right = _RIGHT.get(reason, lambda *_, **__: False)

    def call(original: Original, /, *args: Any, **kwargs: Any) -> Any:
        if _is_distributed((args, kwargs)) and not right(*args, **kwargs):
            raise GraphError(f"{name} was called with a distributed edge_index or batch vector, but {reason}.")
        return original(*args, **kwargs)

    return call


_RIGHT: dict[str, Callable[..., bool]] = {
    _MASK: lambda nodes, *_, **__: all(
        getattr(part, "dtype", None) == torch.bool for part in (nodes if isinstance(nodes, tuple) else [nodes])
    ),
    _ERROR: lambda model, *_, **__: not model.autoscale,
    _ATTENDS: lambda layer, x, edges, batch=None, **_: type(layer.attn) is PerformerAttention and batch is None,
    _TRAINING: lambda layer, *_, **__: not layer.training,
}
"""Checks for arguments that make a call right."""

_CALLS = ("forward", "__call__", "__init__")  # errors name the class instead

REPLACED: Replacements = [
    (transforms.BaseTransform, "__call__", _transform),
    (transforms.NormalizeFeatures, "forward", _normalize_features),
    *((kind, "forward", _norm) for kind in norms.OVER_ALL),
    *(
        (kind, name, _refusing(kind.__name__ + f".{name}" * (name not in _CALLS), reason))
        for (kind, name), reason in METHODS.items()
    ),
    *(  # users' modules may also have imported a function
        (module, name, _refusing(name, reason))
        for name, reason in FUNCTIONS.items()
        for module in list(sys.modules.values())
        if getattr(module, "__dict__", {}).get(name) is getattr(utils, name)
    ),
]
"""All but `NormalizeFeatures` raise."""
