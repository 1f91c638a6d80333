"""Communication between workers: set-up, agreement on calls, the exchange of tiles, and collectives."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sar.comm.collectives import (
    all_reduce,
    all_to_all,
    exchange_single_tensor,
    exchange_tensors,
    gather_grads,
    sync_params,
)
from sar.comm.gradients import ddp_sum_hook
from sar.comm.session import (
    backend,
    comm_device,
    is_initialized,
    master_ip,
    master_port,
    rank,
    recover,
    should_stop,
    world_size,
)
from sar.comm.setup import nfs_ip_init
from sar.comm.statistics import Statistics, statistics

if TYPE_CHECKING:
    from sar.outofcore.workers import initialize_comms
else:

    def __getattr__(name: str) -> Any:
        if name == "initialize_comms":  # imports files of this folder
            return import_module("sar.outofcore.workers").initialize_comms
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Statistics",
    "all_reduce",
    "all_to_all",
    "backend",
    "comm_device",
    "ddp_sum_hook",
    "exchange_single_tensor",
    "exchange_tensors",
    "gather_grads",
    "initialize_comms",
    "is_initialized",
    "master_ip",
    "master_port",
    "nfs_ip_init",
    "rank",
    "recover",
    "should_stop",
    "statistics",
    "sync_params",
    "world_size",
]
