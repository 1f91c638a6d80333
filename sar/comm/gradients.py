"""Checks that gradients are summed over workers once: by `gather_grads`, or by DDP with `ddp_sum_hook`.

[Note: averages]
Without a hook DDP (`DistributedDataParallel`) averages. This is right for a worker's own mini-batches, and wrong for a
share of a loss over the graph. So DDP models, distributed calls and `Task.loss` record the backwards that reach them.
A backward that reaches both kinds raises. FSDP also averages: its wrappers are treated like DDP, and parameters of
`fully_shard` are rejected when an optimizer steps them (`replicas.py`).

[Note: sums]
A sum that is changed in place, as by clipping, still counts as a sum. It no longer does if the gradient is set to None,
if it is zero when a backward adds to it, or if both the gradient and its parameter have changed, as in a loop that
writes gradients by hand. If a backward adds to a sum S that was not cleared, worker 0 keeps S and the others start from
zero. So the next sum is S plus the new gradients of all workers, as on one machine.
"""

import gc
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.futures import Future
from torch.nn import Module, Parameter, ParameterList
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary, WeakTensorKeyDictionary

from sar.comm import session
from sar.comm.group import Group
from sar.comm.statistics import counters
from sar.errors import ConfigError
from sar.logging_setup import logger
from sar.tensors.views import accumulation_dtype

REGISTER: Final = "ddp_model.register_comm_hook(None, sar.ddp_sum_hook)"

_sums: Final[WeakIdKeyDictionary] = WeakIdKeyDictionary()
"""Gradients that are sums -> their version and their parameter's; None after a backward has added to the sum."""
_hooks: Final[WeakTensorKeyDictionary] = WeakTensorKeyDictionary()
"""Parameters -> the hook that checks their gradients before a backward adds to these."""
_added: Final[WeakTensorKeyDictionary] = WeakTensorKeyDictionary()
"""Parameters -> the version of their gradient after the latest backward that added to it, until it is summed."""
_told_of_loss: Final[WeakSet[Module]] = WeakSet()
_told_of_clipping: Final[WeakSet[Module]] = WeakSet()
_told_of_nan: Final[WeakSet[Module]] = WeakSet()
_combined: Final[WeakTensorKeyDictionary] = WeakTensorKeyDictionary()
"""Parameters -> their version in the latest backward in which DDP combined the gradients of all workers."""
_backwards: Final = {"share": -1, "average": -2}
"""Autograd's IDs of the latest backward of a share of a loss, and of the latest in which DDP averaged."""


def ddp_sum_hook(process_group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """DDP communication hook that sums gradients over workers instead of averaging them. Replaces `gather_grads`.

    If the loss is (local sum / global count), parameters get the gradient of the loss over the whole graph.

        ddp_model = DistributedDataParallel(model)
        ddp_model.register_comm_hook(None, sar.ddp_sum_hook)

    Args:
        process_group: the first argument of `register_comm_hook`; None for all workers.
        bucket: gradients, from DDP.

    Returns:
        A future of the sum.
    """
    counters.bytes_sent += bucket.buffer().nbytes
    counters.bytes_received += bucket.buffer().nbytes
    dtype = bucket.buffer().dtype
    group = process_group or session.job().processes  # torch's own may have other graphs' workers, too
    work: Any = dist.all_reduce(bucket.buffer().to(accumulation_dtype(dtype)), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0].to(dtype))


def refuse_average(part: str = "share") -> None:
    """Record the running backward as of `part`. Raise `ConfigError` if it is of both parts: see [Note: averages]."""
    _backwards[part] = torch._C._current_graph_task_id()
    if _backwards["share"] == _backwards["average"]:
        raise ConfigError(
            "DistributedDataParallel or FSDP averages gradients over workers, but each worker has only its share of "
            f"the loss over the graph: they must be summed. Wrap the model in DistributedDataParallel, call {REGISTER} "
            "once, and divide the loss by the global count."
        )


def _watch(ddp: Module, name: str, module: Module | None) -> None:
    if (isinstance(ddp, DistributedDataParallel) and name == "module") or name == "_fsdp_wrapped_module":
        ddp.register_forward_hook(_watch_backward)
        for p in module if isinstance(module, ParameterList) else ():  # of `replicate`, which calls no forward of DDP
            p.register_hook(partial(_combine, ddp, [p]))


register_module_module_registration_hook(_watch)
for made in gc.get_objects() if dist.is_initialized() else ():  # before a name of sar was first used
    for name, inner in made._modules.items() if issubclass(type(made), Module) else ():
        _watch(made, name, inner)


def _watch_backward(ddp: Any, args: Any, output: Any) -> None:
    if getattr(ddp, "require_backward_grad_sync", True):  # FSDP1 has none
        for tensor in _find_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(_combine, ddp, list(ddp.parameters())))


def _combine(ddp: Any, parameters: Iterable[Parameter], _: Tensor) -> None:
    """Record that a backward has reached a DDP model. Torch's own communication hooks also average."""
    if dist.get_world_size(ddp.process_group) == 1:
        return
    _combined.update((p, p._version) for p in parameters)
    hooks = getattr(ddp, "_comm_hooks", ())
    if all(hook.__module__.startswith("torch.") and "." not in hook.__qualname__ for hook, _ in hooks):
        refuse_average("average")


def begin_sum(parameters: Sequence[Parameter], rank: int) -> None:
    """Raise `ConfigError` for gradients that DDP has combined, or if all are sums: see [Note: sums]."""
    if any(_combined.get(p) == p._version for p in parameters):
        raise ConfigError(
            "gather_grads got parameters of a model in DistributedDataParallel, which combines the gradients of all "
            f"workers in the backward; summing them again would multiply them. Leave them out, with {REGISTER}."
        )
    present: list[Any] = [p for p in parameters if p.grad is not None]
    sums = []
    for p in present:
        versions = _sums.get(p.grad, ())
        unchanged = versions is None or p.grad._version in versions[:1] or p._version in versions[1:]
        if unchanged and p.grad.any():
            sums.append(p)
    if present and len(sums) == len(present):
        raise ConfigError(
            "gather_grads: the gradients are sums over the workers already, and would be added up once more. Call it "
            "once for each step, after the last backward; then optimizer.step() and optimizer.zero_grad()."
        )
    for p in sums:
        _add_to_sum(p.grad, rank)


def end_sum(parameters: Sequence[Parameter], rank: int) -> None:
    """Record that the gradients are sums now."""
    watch(parameters, rank)
    for p in parameters:
        if p.grad is not None and p.grad.layout is torch.strided and not p.grad.is_inference():
            _added.pop(p, None)
            _sums[p.grad] = p.grad._version, p._version


def watch(parameters: Iterable[Parameter], rank: int) -> None:
    """Make parameters check and record the backwards that add to their gradients."""
    for p in parameters:
        if p.requires_grad and p not in _hooks and not p.is_inference():
            _hooks[p] = p.register_hook(partial(_before_adding, TensorWeakRef(p), rank))
            p.register_post_accumulate_grad_hook(_note_version)


def _note_version(p: Any) -> None:
    _added[p] = p.grad._version


def warn_of_mistakes(group: Group, model: Module, parameters: Sequence[Parameter]) -> None:
    """Log once for a model, on worker 0, that its loss or clipping seems to be unchanged from one machine."""
    present: list[Any] = [p for p in parameters if p.grad is not None]
    log = logger.warning if group.rank == 0 else logger.debug
    if present and not group.has_summed and model not in _told_of_loss:
        _told_of_loss.add(model)
        log(
            "gather_grads sums gradients over workers, but there was no sar.Task.loss before, and no sum over workers, "
            "as sar.all_sum(train_mask.sum()). If the loss is a mean over a worker's own nodes, gradients are about %d "
            "times too large: divide the worker's sum by the number on all, or use task.loss. sar.check_model finds "
            "out.",
            group.world_size,
        )
    changed = all(p in _added and p.grad._version != _added[p] for p in present)  # by clipping; it changes all
    if present and changed and model not in _told_of_clipping:
        _told_of_clipping.add(model)
        log(
            "gather_grads: the gradients were changed after the backward. If they were clipped or unscaled, each "
            "worker did so to its share: call gather_grads first, then clip_grad_norm_ or scaler.unscale_."
        )


def warn_of_nan(group: Group, call: str, model: Module, bucket: Sequence[Parameter], total: Tensor) -> None:
    """Log once for a model, on worker 0, which workers contributed NaN or infinity to the sum of gradients `total`.

    `bucket` holds the parameters, still with the gradients of this worker.
    """
    # On a device, the host would wait for the sum. A sum of its entries is the quickest look, but may overflow.
    if total.device.type != "cpu" or total.sum().isfinite() or total.isfinite().all():
        return
    broken = (i for i, p in enumerate(bucket) if p.grad is not None and not p.grad.isfinite().all())
    first = [number for [number] in group.gather_numbers([next(broken, len(bucket))], call)]
    log = logger.warning if group.rank == 0 and model not in _told_of_nan else logger.debug
    _told_of_nan.add(model)
    workers = [rank for rank, number in enumerate(first) if number < len(bucket)]
    name = next((name for name, p in model.named_parameters() if workers and p is bucket[min(first)]), "")
    source = f"workers {workers} brought it, first in {name}" if workers else "the gradients of each worker are finite"
    log("%s: there is NaN or infinity in the sum of gradients; %s. A GradScaler skips such a step.", call, source)


def _before_adding(of: Any, rank: int, _: Tensor) -> None:
    """Hook that runs before a backward adds to a gradient. torch.autograd.grad also runs it, without adding."""
    p = of()
    if p is not None and p.grad in _sums:
        with suppress(RuntimeError), torch.enable_grad():  # in earlier torch the edge is that of a view
            if not torch._C._will_engine_execute_node(get_gradient_edge(p).node):
                return
            if p.grad.any():
                _add_to_sum(p.grad, rank)
            else:
                del _sums[p.grad]


def _add_to_sum(grad: Any, rank: int) -> None:
    if rank and _sums[grad] is not None:
        grad.zero_()
    _sums[grad] = None
