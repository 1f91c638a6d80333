"""Making DGL's own layers use sar's edge softmax on distributed graphs."""

import importlib
import pkgutil
from types import ModuleType
from typing import Any

from torch import Tensor

from sar.adapters.dgl.shim import require_dgl
from sar.core.graph import GraphShardManager
from sar.core.queries import ALL
from sar.nn.edge_softmax import edge_softmax

_NAME = "edge_softmax"
_originals: dict[str, Any] = {}


def patched_edge_softmax(graph: Any, logits: Tensor, eids: Any = ALL, norm_by: str = "dst") -> Tensor:
    """`sar.edge_softmax` on distributed graphs, DGL's own on all others."""
    if isinstance(graph, GraphShardManager):
        return edge_softmax(graph, logits, eids, norm_by)
    ops = importlib.import_module("dgl.ops.edge_softmax")
    original = _originals.get(ops.__name__, ops.edge_softmax)
    return original(graph, logits, eids=eids, norm_by=norm_by)  # type: ignore[no-any-return]


def patch_dgl() -> None:
    """Let DGL's attention layers run on distributed graphs.

    Replaces the name `edge_softmax` wherever DGL's layers have bound it (GATConv, GATv2Conv, DotGatConv and others) and
    in `dgl.ops`, `dgl.nn.functional`; on ordinary graphs it does what it did. A second call changes nothing.

    Raises:
        DglError: where DGL cannot be imported.
    """
    for module in _modules_with_edge_softmax():
        if module.__name__ not in _originals:
            _originals[module.__name__] = getattr(module, _NAME)
            setattr(module, _NAME, patched_edge_softmax)


def unpatch_dgl() -> None:
    """Undo `patch_dgl`."""
    while _originals:
        name, original = _originals.popitem()
        setattr(importlib.import_module(name), _NAME, original)


def _modules_with_edge_softmax() -> list[ModuleType]:
    require_dgl()
    names = ["dgl.ops.edge_softmax", "dgl.ops", "dgl.nn.functional", "dgl.nn.pytorch.softmax"]
    layers = importlib.import_module("dgl.nn.pytorch.conv")
    names += [f"{layers.__name__}.{info.name}" for info in pkgutil.iter_modules(layers.__path__)]
    modules = [importlib.import_module(name) for name in names]
    return [module for module in modules if callable(getattr(module, _NAME, None))]
