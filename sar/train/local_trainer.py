"""`LocalTrainer`: trains on each partition separately and averages the resulting models.

[Note: one model for each partition]
A worker has one model in memory, regardless of its number of partitions. Training on each partition starts from the
weights at the beginning of the round. The resulting weights, times the partition's share of all training nodes, are
added to a sum in double precision. The sum over workers is rounded once, so the average is bitwise equal everywhere.
"""

from collections.abc import Callable, Sequence
from typing import Any
from warnings import catch_warnings, filterwarnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from sar.comm import session
from sar.comm.collectives import all_reduce, copy_from_first
from sar.common_tuples import SPLIT
from sar.errors import ConfigError
from sar.logging_setup import logger


class LocalTrainer:
    """Trains on each partition separately and averages the models (Huang et al., "SDT-GNN", section III-D).

        w = sum_i n_i w_i / sum_i n_i        over all partitions i of all workers, with n_i training nodes each

    An approximation: a partition does not see beyond its halo. The constructor and `train_round` are collective calls;
    workers do not communicate in between. A worker trains on its partitions one after the other, or waits if it has
    none. Floating-point buffers, such as running statistics, are averaged like weights; other buffers, such as
    `num_batches_tracked`, take the maximum.

    Args:
        model: any single-machine model. It takes the parameters and buffers of worker 0.
        make_optimizer: called with a list of parameters; returns an optimizer. Each partition has its own optimizer,
            which keeps its state between rounds, because its moments belong to the gradients of the partition.
        parts: this worker's partitions, for example from `local_subgraphs`; any sequence, which may read from disk.
        counts: number of training nodes of each partition; default: counted in `train_mask`. Partitions with 0 are
            skipped.

    Raises:
        ConfigError: for invalid counts or only zeros, or a model in `DistributedDataParallel`.
        DisagreementError: shapes or dtypes of the model differ between workers.

    Attributes:
        optimizers: one for each partition of this worker, for schedulers.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
        parts: Sequence[Any],
        counts: Sequence[int] | None = None,
    ) -> None:
        with session.current_group().guard():
            if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
                raise ConfigError("DistributedDataParallel averages gradients by itself; pass the model that is in it.")
            self.model, self.parts = model, parts
            self.counts = [_training_nodes(part) for part in parts] if counts is None else [int(n) for n in counts]
            if len(self.counts) != len(parts) or min(self.counts, default=0) < 0:
                raise ConfigError(f"counts is {self.counts}; expected {len(parts)} numbers, one for each partition.")
            total = torch.tensor(sum(self.counts), device="cpu")
            all_reduce(total, move_to_comm_device=True)
            if not total:
                raise ConfigError("No partition of any worker has training nodes; see train_mask, or pass counts.")
            with catch_warnings():
                filterwarnings("ignore", message="sync_params: .* normalises by the rows of one")  # intended here
                copy_from_first(model)
        self._shares = [count / int(total) for count in self.counts]
        self.optimizers = [make_optimizer(list(model.parameters())) for _ in parts]

    def train_round(self, train_one: Callable[[Any, Optimizer], Any], epochs: int = 1) -> None:
        """Train on every partition for some epochs, then average the models of all workers. A collective call.

        Args:
            train_one: called as `train_one(part, optimizer)` to train the model for one epoch on one partition, in full
                or in mini-batches, with a loss over its own training nodes. Must not make distributed calls.
            epochs: epochs on each partition before averaging. Default 1.

        Raises:
            CommunicationError: another worker raised, or made a different call. The slowest worker may take
                `Config.timeout` longer than the fastest. After an error the model is as before the round.
        """
        with session.current_group().guard() as group:
            group.agree(f"a round of {epochs} epochs for each partition")
            begin = self._read()
            mean, greatest = torch.zeros_like(begin[0]), begin[1]
            try:
                for i, share in enumerate(self._shares):
                    if share:
                        self._write(*begin)
                        part = self.parts[i]  # may read from disk
                        for _ in range(epochs):
                            train_one(part, self.optimizers[i])
                        floats, others = self._read()
                        mean += share * floats
                        greatest = torch.maximum(greatest, others)
                if group.replicas is not None:
                    group.replicas.forget_steps()  # models differ until they are averaged
                all_reduce(mean, move_to_comm_device=True)
                all_reduce(greatest, dist.ReduceOp.MAX, move_to_comm_device=True)
            except BaseException:
                self._write(*begin)  # otherwise models would differ between workers after `sar.recover`
                raise
            self._write(mean, greatest)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizers' state. To save it: `save_checkpoint(..., model=model, loaders=trainer)`."""
        return {"partitions": self._partitions(), "optimizers": [one.state_dict() for one in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`. With different workers or partitions, optimizers start from scratch."""
        if state["partitions"] != self._partitions():
            logger.warning("the optimizers of other partitions were saved; those of this worker begin anew")
            return
        for optimizer, one in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(one)

    def _tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """The model's parameters and buffers, split into floating-point and other tensors."""
        tensors = [tensor.detach() for tensor in (*self.model.parameters(), *self.model.buffers())]
        real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
        return [t for t in real if t.is_floating_point()], [t for t in real if not t.is_floating_point()]

    def _read(self) -> tuple[Tensor, Tensor]:
        """All values as float64 and int64 tensors, to be sent."""
        device = session.current_group().device
        floats, others = self._tensors()
        return _joined(floats, torch.float64, device), _joined(others, torch.int64, device)

    def _write(self, *values: Tensor) -> None:
        """Write values returned by `_read` to the model."""
        for tensors, joined in zip(self._tensors(), values, strict=True):
            for tensor, own in zip(tensors, joined.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(own.view_as(tensor))

    def _partitions(self) -> list[int]:
        """A digest of this worker's partitions."""
        group = session.current_group()
        return [group.rank, group.world_size, *self.counts]


def _training_nodes(part: Any) -> int:
    """Nodes in the masks of a `DGLGraph`."""
    masks = [part.nodes[ntype].data.get(SPLIT[0]) for ntype in part.ntypes]
    found = [mask for mask in masks if mask is not None]
    if not found or any(mask.dim() != 1 for mask in found):
        raise ConfigError(f"The partition has no {SPLIT[0]} of one column; pass counts, the numbers of training nodes.")
    return sum(int(mask.sum()) for mask in found)


def _joined(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Concatenate the values of all tensors."""
    return torch.cat([torch.empty(0, dtype=dtype, device=device), *(t.flatten().to(device, dtype) for t in tensors)])
