"""`patch_dgl`: DGL's own layers on distributed graphs. Which layers it changes is in `patched_layers.py`."""

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple, ParamSpec, TypeVar

from packaging.version import Version
from torch import Tensor

from sar.adapters.dgl.layers.patched_layers import PATCHED_LAYERS, Forward
from sar.adapters.dgl.shim import require_dgl
from sar.config import Config
from sar.core.graph.absent import INSTEAD
from sar.core.graph.graph import GraphShardManager
from sar.core.graph.queries import ALL
from sar.errors import GraphError
from sar.kernels import compile_ahead
from sar.logging_setup import logger
from sar.nn.edge_softmax import edge_softmax

P = ParamSpec("P")
T = TypeVar("T")

_SOFTMAX = "edge_softmax"
_READOUTS = ("readout_nodes", "softmax_nodes", "topk_nodes")
"""What would take a worker's nodes for all; those of `dgl.readout` that read edges find no `batch_num_edges`."""


class _Replaced(NamedTuple):
    """A name in a module or class that has been replaced, and what it stood for."""

    owner: Any
    name: str
    original: Any


_replaced: list[_Replaced] = []


def with_patched_dgl(make: Callable[P, T]) -> Callable[P, T]:
    """`make`, a maker of distributed graphs, with a call of `patch_dgl` before it where `Config.patch_dgl` allows."""

    @wraps(make)
    def patch_and_make(*args: P.args, **kwargs: P.kwargs) -> T:
        if Config.patch_dgl and sys.modules.get("dgl") is not None:
            patch_dgl()
        return make(*args, **kwargs)

    return patch_and_make


def patch_dgl() -> None:
    """Let DGL's layers run on distributed graphs; on ordinary graphs they do what they did.

    `construct_full_graph`, `construct_mfgs` and `convert_dist_graph` call it where DGL is imported, unless
    `Config.patch_dgl` is False. It replaces DGL's `edge_softmax` in all modules that have imported it by this name, the
    methods of layers that `patched_layers.PATCHED_LAYERS` lists, and readouts, which on distributed graphs raise a
    `GraphError`. A second call changes nothing; `unpatch_dgl` undoes it.

    Raises:
        DglError: where DGL cannot be imported.
    """
    if _replaced:
        return
    compile_ahead()
    dgl = require_dgl()
    layers = importlib.import_module("dgl.nn.pytorch")
    for module in _modules_with(_SOFTMAX, importlib.import_module("dgl.ops.edge_softmax").edge_softmax):
        _replace(module, _SOFTMAX, patched_edge_softmax)
    for name in _READOUTS:
        original = getattr(dgl.readout, name)
        for module in _modules_with(name, original):
            _replace(module, name, _on_either_graph(original, _refuse))
    for patch in PATCHED_LAYERS:
        if Version(dgl.__version__) >= Version(patch.since):
            layer = attrgetter(patch.layer)(layers)
            method = getattr(layer, patch.method)
            _replace(layer, patch.method, _on_either_graph(method, patch.distributed))
    logger.info("DGL's layers are patched for distributed graphs (sar.Config.patch_dgl)")


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
    """A function or method that is `distributed` on distributed graphs and `original` on all others."""
    parameters = list(inspect.signature(original).parameters)
    position = 1 if parameters[0] == "self" else 0

    @wraps(original)
    def either(*args: Any, **kwargs: Any) -> Any:
        graph = args[position] if len(args) > position else kwargs.get(parameters[position])
        if not isinstance(graph, GraphShardManager):
            return original(*args, **kwargs)
        kwargs.pop(parameters[position], None)
        return distributed(original, *args[:position], graph, *args[position + 1 :], **kwargs)

    return either


def _refuse(original: Forward, graph: GraphShardManager, *args: Any, **kwargs: Any) -> Any:
    name = original.__name__
    raise GraphError(f"dgl.{name} takes no distributed graph: {INSTEAD[name]}.")


def _replace(owner: Any, name: str, value: Any) -> None:
    _replaced.append(_Replaced(owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def _modules_with(name: str, value: Any) -> list[ModuleType]:
    """The modules, users' too, that know `value` by this name."""
    return [module for module in list(sys.modules.values()) if getattr(module, "__dict__", {}).get(name) is value]
