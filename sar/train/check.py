"""`sar.check_loss`: whether several workers have the loss that one worker would have."""

import math
from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn

from sar.adapters.dgl.load import load_dgl_partition_data
from sar.comm import session
from sar.comm.collectives import all_sum
from sar.comm.rows import BufferPool
from sar.common_tuples import PartitionData, StrPath
from sar.errors import ConfigError
from sar.train.counted_graph import CountingGroup

LossOf = Callable[[nn.Module, PartitionData], Tensor]


def check_loss(model: nn.Module, loss_of: LossOf, directory: StrPath, *, tolerance: float = 1e-4) -> float:
    """Compare the sum of all workers' losses with the loss of one worker that has the whole graph; a collective call.

    For small graphs: worker 0 loads the whole graph and runs the model on it, while the others wait. The model must be
    without dropout. What is computed leaves it and the random state as they were.

    Args:
        model: alike on all workers.
        loss_of: called as `loss_of(model, data)` with a worker's partition; makes the graph and returns the loss as the
            script does, before its backward.
        directory: the partition directory, or its JSON file.
        tolerance: how far apart the losses may be, relative to their size.

    Returns:
        The loss.

    Raises:
        ConfigError: on all workers, where the losses differ.
        PeerError: where `loss_of` raised on another worker, such as on the whole graph.
    """
    group, cpu = session.current_group(), torch.device("cpu")

    def loss_here() -> float:
        with torch.no_grad(), torch.random.fork_rng():
            return float(loss_of(deepcopy(model), load_dgl_partition_data(str(directory), session.rank(), cpu)))

    with group.guard():
        together, alone = all_sum(loss_here()), 0.0
        if group.rank == 0:
            with session.standing_in(CountingGroup(0, 1), BufferPool(cpu)):
                alone = loss_here()
        alone = all_sum(alone)
    if not math.isclose(together, alone, rel_tol=tolerance):
        raise ConfigError(
            f"The losses of {group.world_size} workers add up to {together:.6g}, but one worker that has the whole "
            f"graph gets {alone:.6g}. A worker's loss has to be its share (sar.Task.loss, or a sum over its nodes "
            "divided by the number of all), and what combines rows in the model, such as a mean or BatchNorm1d, has to "
            "do so over all workers (sar.all_sum, sar.convert_batchnorm)."
        )
    return alone
