"""The public import path `sar.core`: distributed graphs and their constructors, the same objects as in `sar`.

Only `sar` itself imports this file; the engine and the adapter for DGL define the objects.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sar.adapters.dgl.graphs import construct_full_graph, construct_mfgs
    from sar.core import sampling
    from sar.core.graph.graph import DistributedBlock, GraphShardManager

    HeteroGraphShardManager = GraphShardManager
else:

    def __getattr__(name: str) -> Any:
        """Import public names on first use, because their modules import files of this folder."""
        if name == "sampling":
            return import_module("sar.core.sampling")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = "sar.adapters.dgl.graphs" if name.startswith("construct_") else "sar.core.graph.graph"
        # SAR's class for graphs of several types; here one class serves all graphs.
        return getattr(import_module(found), name.removeprefix("Hetero"))


__all__ = [
    "DistributedBlock",
    "GraphShardManager",
    "HeteroGraphShardManager",
    "construct_full_graph",
    "construct_mfgs",
    "sampling",
]
