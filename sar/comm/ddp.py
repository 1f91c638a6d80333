"""`torch.nn.parallel.DistributedDataParallel` around a model: its gradients are summed over workers, not averaged."""

from collections.abc import Iterable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors
from torch.utils.weak import WeakTensorKeyDictionary

from sar.comm.statistics import counters
from sar.errors import ConfigError
from sar.raw_memory import accumulation_dtype

REGISTER: Final = "ddp_model.register_comm_hook(None, sar.ddp_sum_hook)"
AVERAGED: Final = (
    "DistributedDataParallel averages gradients over workers, but each worker has only its share of the loss over the "
    f"graph: they must be summed. Call {REGISTER} once, and divide the loss by the global count."
)

_combined: Final[WeakTensorKeyDictionary] = WeakTensorKeyDictionary()
"""Versions of parameters at the latest backward in which DDP combined their gradients."""
_backwards: Final = {"share": -1, "average": -2}
"""Autograd's numbers of the latest backward through a share of a loss, and of the latest in which DDP averages."""


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
    if ddp is not None and torch.is_grad_enabled() and _averages(ddp):
        raise ConfigError(AVERAGED)


def join_backward(ddp: DistributedDataParallel | None = None) -> None:
    """Note that a distributed call or a share of a loss, or else a DDP model, takes part in the current backward.

    Raises `ConfigError` if both do and the DDP model averages.
    """
    if ddp is not None:
        _combined.update((p, p._version) for p in ddp.module.parameters())
    if ddp is None or _averages(ddp):
        _backwards["share" if ddp is None else "average"] = torch._C._current_graph_task_id()
        if len({*_backwards.values()}) == 1:
            raise ConfigError(AVERAGED)


def _averages(ddp: DistributedDataParallel) -> bool:
    """Whether no hook replaces the average; those that torch brings average, too."""
    of_torch = [hook.__module__.startswith("torch.") and "." not in hook.__qualname__ for hook, _ in ddp._comm_hooks]
    return all(of_torch) and dist.get_world_size(ddp.process_group) > 1


def _follow(ddp: Module, name: str, module: Module | None) -> None:
    """Let a DDP model that is being made join the backwards in which it combines gradients."""

    def follow(ddp: Any, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled() and ddp.require_backward_grad_sync:
            for tensor in _find_tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: join_backward(ddp))

    if isinstance(ddp, DistributedDataParallel) and name == "module":
        ddp.register_forward_hook(follow)


register_module_module_registration_hook(_follow)


def refuse_second_sum(parameters: Iterable[Parameter]) -> None:
    """Raise `ConfigError` for gradients that DDP has combined in the backward."""
    if any(_combined.get(p) == p._version for p in parameters):
        raise ConfigError(
            "gather_grads got parameters of a model in DistributedDataParallel, which combines the gradients of all "
            f"workers in the backward; summing them again would multiply them. Leave them out, with {REGISTER}."
        )
