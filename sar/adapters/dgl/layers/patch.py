"""Making DGL's own layers run on distributed graphs."""

import importlib
import pkgutil
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from sar.adapters.dgl.layers.replacements import layers_to_patch, serving_both
from sar.adapters.dgl.shim import require_dgl
from sar.core.graph.graph import GraphShardManager
from sar.core.graph.queries import ALL
from sar.nn.edge_softmax import edge_softmax

_SOFTMAX = "edge_softmax"


class _Patch(NamedTuple):
    """A name in a module or class, and what it stood for."""

    owner: Any
    name: str
    original: Any


_patches: list[_Patch] = []


def patch_dgl() -> None:
    """Let DGL's layers run on distributed graphs; on ordinary graphs they do what they did.

    Replaces the name `edge_softmax` wherever DGL's layers have bound it (GATConv, GATv2Conv, DotGatConv, ...), in
    `dgl.ops` and in `dgl.nn.functional`, and methods of some other layers: see `layers.py`.
    A second call changes nothing; `unpatch_dgl` undoes it.

    Raises:
        DglError: where DGL cannot be imported.
    """
    if _patches:
        return
    for module in _modules_with_edge_softmax():
        _replace(module, _SOFTMAX, patched_edge_softmax)
    for layer, name, distributed in layers_to_patch():
        _replace(layer, name, serving_both(getattr(layer, name), distributed))


def unpatch_dgl() -> None:
    """Undo `patch_dgl`."""
    while _patches:
        patch = _patches.pop()
        setattr(patch.owner, patch.name, patch.original)


def patched_edge_softmax(graph: Any, logits: Tensor, eids: Any = ALL, norm_by: str = "dst") -> Tensor:
    """`sar.edge_softmax` on distributed graphs, DGL's own on all others."""
    if isinstance(graph, GraphShardManager):
        return edge_softmax(graph, logits, eids, norm_by)
    module = importlib.import_module("dgl.ops.edge_softmax")
    original = next((patch.original for patch in _patches if patch.owner is module), module.edge_softmax)
    return original(graph, logits, eids=eids, norm_by=norm_by)  # type: ignore[no-any-return]


def _replace(owner: Any, name: str, value: Any) -> None:
    _patches.append(_Patch(owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def _modules_with_edge_softmax() -> list[ModuleType]:
    require_dgl()
    names = ["dgl.ops.edge_softmax", "dgl.ops", "dgl.nn.functional", "dgl.nn.pytorch.softmax"]
    layers = importlib.import_module("dgl.nn.pytorch.conv")
    names += [f"{layers.__name__}.{info.name}" for info in pkgutil.iter_modules(layers.__path__)]
    modules = [importlib.import_module(name) for name in names]
    return [module for module in modules if callable(getattr(module, _SOFTMAX, None))]
