"""`patch_dgl`: DGL's own layers on distributed graphs. Which layers it changes is in `patched_layers.py`."""

import importlib
import pkgutil
from functools import wraps
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple

from packaging.version import Version
from torch import Tensor

from sar.adapters.dgl.layers.patched_layers import PATCHED_LAYERS, Forward
from sar.adapters.dgl.shim import require_dgl
from sar.core.graph.graph import GraphShardManager
from sar.core.graph.queries import ALL
from sar.nn.edge_softmax import edge_softmax

_SOFTMAX = "edge_softmax"


class _Replaced(NamedTuple):
    """A name in a module or class that has been replaced, and what it stood for."""

    owner: Any
    name: str
    original: Any


_replaced: list[_Replaced] = []


def patch_dgl() -> None:
    """Let DGL's layers run on distributed graphs; on ordinary graphs they do what they did.

    Replaces the name `edge_softmax` wherever DGL's layers have bound it (GATConv, GATv2Conv, DotGatConv, ...), in
    `dgl.ops` and in `dgl.nn.functional`, and the methods of layers that `patched_layers.PATCHED_LAYERS` lists.
    A second call changes nothing; `unpatch_dgl` undoes it.

    Raises:
        DglError: where DGL cannot be imported.
    """
    if _replaced:
        return
    for module in _modules_with_edge_softmax():
        _replace(module, _SOFTMAX, patched_edge_softmax)
    dgl = require_dgl()
    for patch in PATCHED_LAYERS:
        if Version(dgl.__version__) >= Version(patch.since):
            layer = attrgetter(patch.layer)(dgl.nn.pytorch)
            method = getattr(layer, patch.method)
            _replace(layer, patch.method, _on_either_graph(method, patch.distributed))


def unpatch_dgl() -> None:
    """Undo `patch_dgl`."""
    while _replaced:
        owner, name, original = _replaced.pop()
        setattr(owner, name, original)


def patched_edge_softmax(graph: Any, logits: Tensor, eids: Any = ALL, norm_by: str = "dst") -> Tensor:
    """`sar.edge_softmax` on distributed graphs, DGL's own on all others."""
    if isinstance(graph, GraphShardManager):
        return edge_softmax(graph, logits, eids, norm_by)
    module = importlib.import_module("dgl.ops.edge_softmax")
    original = next((one.original for one in _replaced if one.owner is module), module.edge_softmax)
    return original(graph, logits, eids=eids, norm_by=norm_by)  # type: ignore[no-any-return]


def _on_either_graph(original: Forward, distributed: Forward) -> Forward:
    """A method that is `distributed` on distributed graphs and `original` on all others."""

    @wraps(original)
    def method(layer: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(graph, GraphShardManager):
            return distributed(original, layer, graph, *args, **kwargs)
        return original(layer, graph, *args, **kwargs)

    return method


def _replace(owner: Any, name: str, value: Any) -> None:
    _replaced.append(_Replaced(owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def _modules_with_edge_softmax() -> list[ModuleType]:
    require_dgl()
    names = ["dgl.ops.edge_softmax", "dgl.ops", "dgl.nn.functional", "dgl.nn.pytorch.softmax"]
    layers = importlib.import_module("dgl.nn.pytorch.conv")
    names += [f"{layers.__name__}.{info.name}" for info in pkgutil.iter_modules(layers.__path__)]
    modules = [importlib.import_module(name) for name in names]
    return [module for module in modules if callable(getattr(module, _SOFTMAX, None))]
