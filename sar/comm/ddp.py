"""`torch.nn.parallel.DistributedDataParallel` around a model: its gradients are summed over workers, not averaged."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from sar.comm.statistics import counters
from sar.errors import ConfigError
from sar.raw_memory import accumulation_dtype

REGISTER = "ddp_model.register_comm_hook(None, sar.ddp_sum_hook)"


def ddp_sum_hook(process_group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Sum gradients over workers while DDP's backward goes on, in place of its average and of `gather_grads`.

    With a loss of (local sum / global count) the parameters get the gradient of the loss over the whole graph.

        ddp_model = DistributedDataParallel(model)
        ddp_model.register_comm_hook(None, sar.ddp_sum_hook)

    Args:
        process_group: the first argument of `register_comm_hook`; None for the group of all workers.
        bucket: gradients, from DDP.

    Returns:
        Their sum, once it is there.
    """
    counters.bytes_sent += bucket.buffer().nbytes
    counters.bytes_received += bucket.buffer().nbytes
    dtype = bucket.buffer().dtype
    work: Any = dist.all_reduce(bucket.buffer().to(accumulation_dtype(dtype)), group=process_group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0].to(dtype))


def refuse_averaging() -> None:
    """Raise `ConfigError` in the forward of a DDP model that would average its gradients."""
    # There is no public way to ask which DDP model runs and what it does with gradients.
    ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if ddp is not None and torch.is_grad_enabled() and dist.get_world_size() > 1 and not ddp._comm_hooks:
        raise ConfigError(
            "DistributedDataParallel averages gradients over workers, but each worker has only its share of the loss "
            f"over the graph: they must be summed. Call {REGISTER} once, and divide the loss by the global count."
        )


def refuse_second_sum(model: Module) -> None:
    """Raise `ConfigError` for a model whose gradients DDP has combined in the backward."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ConfigError(
            "gather_grads got a model in DistributedDataParallel, which combines the gradients of all workers in the "
            f"backward; summing them again would multiply them. Leave gather_grads out, with {REGISTER}."
        )
