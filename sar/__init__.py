"""Graph neural networks on graphs too large for one machine: a distributed graph for DGL layers, with exact results."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sar.adapters.dgl.shim import install_shim, require_dgl
from sar.host.huge_pages import ask_for_huge_pages
from sar.logging_setup import logger as logger
from sar.logging_setup import logging_setup as logging_setup  # import it now, because the module has the same name
from sar.removed import advice

install_shim()  # before anything imports dgl
ask_for_huge_pages()  # before anything makes a tensor

__version__ = "0.1.0"

if TYPE_CHECKING:
    # Not in `__all__`: `from sar import *` leaves the names of Python and torch alone.
    from sar import comm, common_tuples, core, train
    from sar import nn as nn
    from sar import pyg as pyg
    from sar.adapters.dgl.dist_graph import convert_dist_graph
    from sar.adapters.dgl.load import load_dgl_partition_data
    from sar.adapters.dgl.patched_layers import patch_dgl, patched_edge_softmax, unpatch_dgl
    from sar.comm import (
        comm_device,
        ddp_sum_hook,
        gather_grads,
        initialize_comms,
        nfs_ip_init,
        rank,
        recover,
        should_stop,
        sync_params,
        world_size,
    )
    from sar.comm.collectives import all_max, all_sum
    from sar.common_tuples import PartitionData, ShardEdgesAndFeatures, suffix_key_lookup
    from sar.config import Config
    from sar.core import (
        DistributedBlock,
        GraphShardManager,
        HeteroGraphShardManager,
        construct_full_graph,
        construct_mfgs,
    )
    from sar.core.passing.messages import message_has_parameters
    from sar.data.original_order import to_original_order
    from sar.errors import SarError
    from sar.nn import DistributedBN1D, fetch_rows, global_ids, pair_graph
    from sar.nn.edge_softmax import edge_softmax
    from sar.partition.in_memory import partition_graph
    from sar.partition.ingest.chunked import write_chunked
    from sar.partition.ingest.cleanup import clean_up
    from sar.partition.ingest.open import open_graph
    from sar.partition.write.write import write_partitions
    from sar.sampling import (
        DataLoader,
        DistNeighborSampler,
        EdgePredictionSampler,
        reverse_edges,
        split_edges,
        split_seeds,
    )
    from sar.train.check import check_model
    from sar.train.checkpoint import load_checkpoint, save_checkpoint, save_model
    from sar.train.early_stopping import EarlyStopping
    from sar.train.norms import convert_batchnorm
    from sar.train.profile import profile
    from sar.train.script import print as print
    from sar.train.script import seed
    from sar.train.task import Task

    RelGraphConv: Any

_MODULES = "comm", "common_tuples", "core", "nn", "pyg", "train"
_NAMES = {
    "adapters.dgl.dist_graph": "convert_dist_graph",
    "adapters.dgl.load": "load_dgl_partition_data",
    "adapters.dgl.patched_layers": "patch_dgl patched_edge_softmax unpatch_dgl",
    "comm": "comm_device ddp_sum_hook gather_grads initialize_comms nfs_ip_init rank recover should_stop sync_params "
    "world_size",
    "comm.collectives": "all_max all_sum",
    "common_tuples": "PartitionData ShardEdgesAndFeatures suffix_key_lookup",
    "config": "Config",
    "core": "DistributedBlock GraphShardManager HeteroGraphShardManager construct_full_graph construct_mfgs",
    "core.passing.messages": "message_has_parameters",
    "data.original_order": "to_original_order",
    "errors": "SarError",
    "nn": "DistributedBN1D edge_softmax fetch_rows global_ids pair_graph",
    "partition.in_memory": "partition_graph",
    "partition.ingest.chunked": "write_chunked",
    "partition.ingest.cleanup": "clean_up",
    "partition.ingest.open": "open_graph",
    "partition.write.write": "write_partitions",
    "sampling": "DataLoader DistNeighborSampler EdgePredictionSampler reverse_edges split_edges split_seeds",
    "train.check": "check_model",
    "train.checkpoint": "load_checkpoint save_checkpoint save_model",
    "train.early_stopping": "EarlyStopping",
    "train.norms": "convert_batchnorm",
    "train.profile": "profile",
    "train.script": "print seed",
    "train.task": "Task",
}
"""Public names by module. Modules are imported when a name is first used, because commands need few of them."""
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "RelGraphConv":
            return require_dgl().nn.RelGraphConv
        if name in _MODULES:
            return import_module(f"sar.{name}")
        if name in _MODULE_OF:
            return getattr(import_module(f"sar.{_MODULE_OF[name]}"), name)
        raise AttributeError(advice(f"sar.{name}") or f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*__all__, "nn", "print", "pyg"})


__all__ = [
    "Config",
    "DataLoader",
    "DistNeighborSampler",
    "DistributedBN1D",
    "DistributedBlock",
    "EarlyStopping",
    "EdgePredictionSampler",
    "GraphShardManager",
    "HeteroGraphShardManager",
    "PartitionData",
    "RelGraphConv",
    "SarError",
    "ShardEdgesAndFeatures",
    "Task",
    "all_max",
    "all_sum",
    "check_model",
    "clean_up",
    "comm",
    "comm_device",
    "common_tuples",
    "construct_full_graph",
    "construct_mfgs",
    "convert_batchnorm",
    "convert_dist_graph",
    "core",
    "ddp_sum_hook",
    "edge_softmax",
    "fetch_rows",
    "gather_grads",
    "global_ids",
    "initialize_comms",
    "load_checkpoint",
    "load_dgl_partition_data",
    "logger",
    "logging_setup",
    "message_has_parameters",
    "nfs_ip_init",
    "open_graph",
    "pair_graph",
    "partition_graph",
    "patch_dgl",
    "patched_edge_softmax",
    "profile",
    "rank",
    "recover",
    "reverse_edges",
    "save_checkpoint",
    "save_model",
    "seed",
    "should_stop",
    "split_edges",
    "split_seeds",
    "suffix_key_lookup",
    "sync_params",
    "to_original_order",
    "train",
    "unpatch_dgl",
    "world_size",
    "write_chunked",
    "write_partitions",
]
