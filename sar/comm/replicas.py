"""Compares the workers' models by a checksum in the agreement after an optimizer's step.

[Note: replicas]
Every worker has a copy of the model, and the copies stay equal only if they start equal and get equal gradients. So the
first agreement after a step carries a checksum of the bits of the stepped parameters. Only parameters that have been
passed to `sync_params` or `gather_grads` count; others may be a worker's own, such as rows for its nodes. If there are
none, because the user forgot both calls, all parameters count, as long as every worker has stepped the same shapes. On
a device we sum up the bits and read only the sums, because copying the parameters would take longer than the step.
Shards of a model, as of FSDP, are refused in the step, unless `Config.check_replicas` is off.
"""

import threading
import zlib
from typing import Final

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from sar.config import Config
from sar.errors import ConfigError, DisagreementError
from sar.tensors.views import as_bytes, described, materialize

NOT_STEPPED: Final = 0
NOT_CHECKED: Final = 1  # `Config.check_replicas` is off
SHARED: Final = 2**62  # flag of a checksum of parameters that were passed to `sync_params` or `gather_grads`


def refuse_sharded(model: Module, call: str) -> None:
    """Raise `ConfigError` for a model of FSDP or tensor parallelism."""
    for name, part in (*model.named_parameters(), *model.named_modules()):
        refuse_shard(part, f"{call}: {name or 'the model'}")


def refuse_shard(part: object, name: str) -> None:
    """Raise `ConfigError` for a sharded module or parameter."""
    if not {"DTensor", "FSDPModule", "FullyShardedDataParallel"}.isdisjoint(k.__name__ for k in type(part).__mro__):
        raise ConfigError(
            f"{name} is a {type(part).__name__}, of FSDP (fully_shard) or tensor parallelism; expected the whole of "
            "each parameter on every worker. FSDP averages gradients of the workers' shares of a loss. Use "
            "DistributedDataParallel with sar.ddp_sum_hook, or sar.gather_grads. To train by shards, call sync_params "
            "before fully_shard, set_gradient_divide_factor(1.0) and set_force_sum_reduction_for_comms(True) of each "
            "module, no gather_grads, set sar.Config.check_replicas = False, and save by torch.distributed.checkpoint."
        )


class Replicas:
    """The parameters that this thread's optimizers have stepped since the latest agreement: see [Note: replicas]."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()  # workers of one process are threads
        self._shared: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameter -> also passed to `gather_grads`
        self._gathered = False  # any parameter of the latest checksum
        self._stepped: dict[int, Tensor] = {}  # by `id`, in the order of the steps
        self.close = register_optimizer_step_post_hook(self._note).remove  # stops observing optimizers

    def _note(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Hook that records the parameters that an optimizer of this thread has stepped, if their bits can be read."""
        if threading.get_ident() == self._thread and not torch.compiler.is_compiling():
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                if isinstance(p, Parameter) and type(p.data) is Tensor and p.layout is torch.strided and not p.is_meta:
                    # In the order of the latest steps, as `ZeroRedundancyOptimizer` first steps each worker's share.
                    self._stepped.pop(id(p), None)
                    self._stepped[id(p)] = p
                elif Config.check_replicas:
                    refuse_shard(p, "optimizer.step(): a parameter")

    def share(self, model: Module, call: str) -> bool:
        """Record that a model's parameters should be equal on all workers; return whether any of them is new here."""
        gathered = call == "gather_grads"
        new = [p for p in model.parameters() if gathered > self._shared.get(p, -1)]
        self._shared.update((p, gathered) for p in new)
        return bool(new)

    def forget_steps(self) -> None:
        """Drop the steps so far from the comparison, as after an error or before models are averaged."""
        self._stepped = {}

    def take_checksum(self) -> int:
        """Checksum for the next agreement: a flag, 30 bits of the parameters' layout and 32 bits of their values."""
        stepped, self._stepped = list(self._stepped.values()), {}
        if not Config.check_replicas:
            return NOT_CHECKED
        if not stepped:
            return NOT_STEPPED
        shared = [p for p in stepped if p in self._shared]
        self._gathered = any(self._shared[p] for p in shared)
        counted, sums, values = shared or stepped, [], 0
        for p in counted:
            if p.device.type == "cpu":
                values = zlib.crc32(as_bytes(p), values)
            else:
                bits = materialize(p.detach()).contiguous().view(-1)
                integer = {1: torch.uint8, 2: torch.int16}.get(bits.element_size(), torch.int32)
                sums.append(bits.view(integer).sum(dtype=torch.int64))
        if sums:  # read in one copy
            numbers = torch.stack([each.to(sums[0].device) for each in sums]).tolist()
            values = zlib.crc32(repr(numbers).encode(), values)
        layout = zlib.crc32(repr([described(p) for p in counted]).encode())
        return (SHARED if shared else 0) | layout >> 2 << 32 | values

    def compare(self, checksums: list[int]) -> None:
        """Raise, on all workers, if different checksums mean that their models have drifted apart."""
        off, idle = ([r for r, each in enumerate(checksums) if each == flag] for flag in (NOT_CHECKED, NOT_STEPPED))
        if off:
            raise DisagreementError(f"Config.check_replicas is False on workers {off} only; set it alike on all.")
        if not any(checksum & SHARED for checksum in checksums) and len({value >> 32 for value in checksums}) > 1:
            return  # parameters of each worker's own
        if idle:
            raise DisagreementError(
                f"The workers' models are not the same: no optimizer has stepped the model on workers {idle}. Call "
                "optimizer.step() on all, or on none."
            )
        other = next(rank for rank, checksum in enumerate(checksums) if checksum != checksums[0])
        if self._gathered:
            cause = (
                "Perhaps sync_params(model), which gives all workers the model of worker 0, has not been called. Or "
                "something has changed a parameter on some workers only, the model is on the CPU of some and on a "
                "device of others, or a learning rate differs, as when a scheduler is stepped by a worker's own loss: "
                "sar.all_sum makes it that of all."
            )
        else:
            cause = (
                "The optimizer has stepped without gather_grads(model), which sums gradients (or ddp_sum_hook): call "
                "it before optimizer.step(), and before training sync_params(model), which gives all workers the model "
                "of worker 0."
            )
        raise DisagreementError(
            f"The workers' models are not the same after optimizer.step(): worker 0 and worker {other} differ. {cause} "
            "If a parameter is meant to differ, such as a mask with a row for each of a worker's own nodes: set "
            "Config.check_replicas = False on all workers, or make it a tensor that requires a gradient, not a "
            "torch.nn.Parameter."
        )
