"""Collective operations on whole tensors, for users and for the layers. Workers agree on each before it starts."""

import warnings
import zlib
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from itertools import zip_longest
from numbers import Integral, Real
from typing import Any, Final, TypeVar, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten, tree_unflatten

from sar.comm.gradients import begin_sum, end_sum, warn_of_mistakes, warn_of_nan, watch
from sar.comm.group import Group
from sar.comm.replicas import refuse_sharded
from sar.comm.session import current_group
from sar.errors import ConfigError, DisagreementError
from sar.tensors.views import accumulation_dtype, as_bytes, described, materialize, to_device

AnyTensor = TypeVar("AnyTensor", bound=Tensor)

BUCKET_ELEMENTS = 2**22
_told_of_norms: Final[WeakSet[Module]] = WeakSet()
REDUCED_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
)
_OF_COMPLEX, _OF_FLOATS = ("SUM", "AVG"), ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
_OF_INTEGERS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_EXTREMES = (dist.ReduceOp.MIN, dist.ReduceOp.MAX)


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, move_to_comm_device: bool = False) -> None:
    """Reduce a tensor over all workers, in place.

    Args:
        tensor: the same shape and dtype on all workers.
        op: a `torch.distributed.ReduceOp`. Default: SUM.
        move_to_comm_device: send a copy on the communication device, required for tensors on other devices. Default
            False.

    Raises:
        ConfigError: the dtype is not supported, or the tensor is on another device.
    """
    with current_group().guard() as group:
        _check_device(group, tensor, move_to_comm_device)
        _combine(group, tensor, op, group.device)


def _combine(group: Group, tensor: Tensor, op: Any, device: torch.device) -> None:
    """Combine a tensor over all workers, in place, through memory of `device`, which is the same on all workers."""
    where = "" if device.type == group.device.type else f" on the {device}"
    call = f"all_reduce({op}) of {described(tensor)}{where}"
    if tensor.dtype not in REDUCED_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in REDUCED_DTYPES)
        raise ConfigError(f"{call} is not possible: workers combine {names}. Convert the tensor.")
    ops = _OF_COMPLEX if tensor.is_complex() else _OF_FLOATS if tensor.is_floating_point() else _OF_INTEGERS
    if not any(op == getattr(dist.ReduceOp, name) for name in ops):
        raise ConfigError(f"{call} is not possible: numbers of this dtype are combined by {', '.join(ops)}.")
    group.agree(call)
    group.has_summed |= op == dist.ReduceOp.SUM
    if group.world_size > 1:
        data = tensor.detach()
        travelling = materialize(data).to(device, accumulation_dtype(data.dtype)).contiguous()
        broken = travelling.isnan() if op in _EXTREMES and travelling.is_floating_point() else None
        group.all_reduce(travelling, op, call)
        if broken is not None:  # gloo's extremes of NaN depend on the order of its operands
            anywhere = broken.to(torch.uint8)
            group.all_reduce(anywhere, dist.ReduceOp.MAX, call)
            travelling.masked_fill_(anywhere.bool(), torch.nan)
        if travelling is not data:
            data.copy_(to_device(travelling, data.device))


def all_to_all(recv_tensors: list[Tensor], send_tensors: list[Tensor], move_to_comm_device: bool = False) -> None:
    """Send `send_tensors[q]` to every worker q, and receive `recv_tensors[p]` from every worker p, in place.

    Args:
        recv_tensors: one tensor per worker p, of the size that p sends.
        send_tensors: one tensor per worker.
        move_to_comm_device: send copies on the communication device, required for tensors on other devices. Default
            False.

    Raises:
        ConfigError: a received tensor has another size.
    """
    with current_group().guard() as group:
        if len(recv_tensors) != group.world_size or len(send_tensors) != group.world_size:
            raise ConfigError(
                f"all_to_all got {len(recv_tensors)} tensors to receive into and {len(send_tensors)} to send; "
                f"expected one of each for all {group.world_size} workers."
            )
        _check_alike((*recv_tensors, *send_tensors))
        for tensor in (*recv_tensors, *send_tensors):
            _check_device(group, tensor, move_to_comm_device)
        arrived = exchange_tensors(send_tensors, [len(tensor) for tensor in recv_tensors])
        for tensor, received in zip(recv_tensors, arrived, strict=True):
            tensor.detach().copy_(received)


def exchange_tensors(tensors: Sequence[Tensor], recv_sizes: Sequence[int] | None = None) -> list[Tensor]:
    """Send `tensors[q]` to every worker q, and return the received tensors by rank.

    Args:
        tensors: one tensor per worker, of any length; dtype and trailing shape are the same on all workers.
        recv_sizes: expected lengths, to be checked. Default None: any length.

    Returns:
        One tensor per worker, on the communication device. The tensor that this worker sends to itself is not copied.

    Raises:
        ConfigError: dtype or trailing shape differ, or a length is not the expected one.
    """
    with current_group().guard() as group:
        if len(tensors) != group.world_size:
            raise ConfigError(
                f"exchange_tensors got {len(tensors)} tensors; expected one for each of {group.world_size}."
            )
        sample = tensors[0]
        _check_alike(tensors)
        call = f"exchange_tensors of {described(sample[:0])} rows"
        group.agree(call)
        arriving = [lengths[group.rank] for lengths in group.gather_numbers([len(t) for t in tensors], call)]
        if recv_sizes is not None and list(recv_sizes) != arriving:
            raise ConfigError(f"exchange_tensors expected lengths {list(recv_sizes)}, but {arriving} arrive.")
        sent = [tensor.detach() for tensor in tensors]
        sent[group.rank] = sent[group.rank].to(group.device)
        into = [torch.empty(n, *sample.shape[1:], dtype=sample.dtype, device=group.device) for n in arriving]
        return group.exchange(call, sent, into)


def exchange_single_tensor(recv_idx: int, send_idx: int, recv_tensor: Tensor, send_tensor: Tensor) -> None:
    """Send a tensor to one worker and receive a tensor, in place, from another.

    Args:
        recv_idx: worker to receive from; it must send to this worker.
        send_idx: worker to send to; it must receive from this worker.
        recv_tensor: tensor for the received data, of the size that `recv_idx` sends.
        send_tensor: tensor to send.
    """
    with current_group().guard() as group:
        if recv_tensor.dtype != send_tensor.dtype:
            raise ConfigError(
                f"exchange_single_tensor of {send_tensor.dtype} cannot receive into {recv_tensor.dtype}; expected one "
                "dtype for all that is sent and received."
            )
        if not (0 <= recv_idx < group.world_size and 0 <= send_idx < group.world_size):
            raise ConfigError(
                f"exchange_single_tensor names {recv_idx} and {send_idx}; expected ranks below {group.world_size}."
            )
        sent, sizes = [send_tensor.new_empty(0)] * group.world_size, [0] * group.world_size
        sent[send_idx], sizes[recv_idx] = send_tensor.detach().flatten(), recv_tensor.numel()
        arrived = exchange_tensors(sent, sizes)[recv_idx]
        recv_tensor.detach().copy_(arrived.view_as(recv_tensor))


def sync_params(model: Module) -> None:
    """Copy all parameters and buffers of worker 0 to every worker. A collective call.

    Raises:
        ConfigError: for a lazy module before its first input, or a norm layer that `sar.convert_batchnorm` has not
            converted, if this worker has an edge index of PyTorch Geometric.
        DisagreementError: the number, shapes or dtypes of parameters or buffers differ between workers, or a buffer
            seems to hold rows of this worker's nodes or edges.
    """
    with current_group().guard() as group:
        group.check_model(model, "sync_params")
        copy_from_first(model)


def copy_from_first(model: Module) -> None:
    """As `sync_params`, for models whose norm layers may normalise by the rows of one worker."""
    named = [*model.named_parameters(), *model.named_buffers()]
    with current_group().guard() as group, torch.no_grad():
        call = "sync_params"
        _agree_on_model(group, call, model, named)
        if group.world_size == 1:
            return
        _refuse_own_rows(group, call, model)
        watch(model.parameters(), group.rank)
        for bucket in _buckets([tensor.detach() for _, tensor in named]):
            travelling = torch.cat([tensor.flatten().to(group.device) for tensor in bucket])
            group.broadcast(travelling, call)
            for tensor, values in zip(bucket, travelling.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(values.view_as(tensor))


def _refuse_own_rows(group: Group, call: str, model: Module) -> None:
    """Raise for buffers of users' modules that differ and have one row per own node or edge on all workers.

    Libraries' modules hold no such rows, but their buffers, such as running statistics, may have this length by chance.
    """
    buffers = {}
    for prefix, module in model.named_modules():
        if type(module).__module__.partition(".")[0] not in ("torch", "torch_geometric", "dgl", "sar"):
            buffers.update(module.named_buffers(prefix, recurse=False))
    # 0 for a buffer that has no rows of nodes or edges.
    digests = [0 if group.own_sizes.isdisjoint(x.shape) else 1 + zlib.crc32(as_bytes(x)) for x in buffers.values()]
    everywhere = list(zip(*group.gather_numbers(digests, call), strict=True)) if buffers else []
    for (name, buffer), of_all in zip(buffers.items(), everywhere, strict=True):
        if all(of_all) and len(set(of_all)) > 1:
            raise DisagreementError(
                f"{call}: the buffer {name}, {described(buffer)}, differs between workers and is as long as their "
                f"nodes or edges, so it seems to hold own rows, which those of worker 0 would replace. {_OWN_BUFFER} "
                "If it is a part of the model, make it equal on all workers first."
            )


_OWN_BUFFER: Final = "Keep own rows in a plain attribute, self.x = x.to(device), or pass them to forward."


def gather_grads(model: Module) -> None:
    """Sum the gradients of a model's parameters over all workers, in place. A collective call.

    Call it once per step, between backward and optimizer step. If the loss is (local sum / global count), the result is
    the gradient of the loss over the whole graph. A parameter without a gradient on all workers keeps None; if only
    some workers lack it, theirs counts as zero.

    Raises:
        ConfigError: for gradients that `DistributedDataParallel` has already reduced, which needs `ddp_sum_hook`
            instead; gradients that are all sums of an earlier call; sparse gradients; lazy modules before their first
            input; or norm layers that have not been converted, as in `sync_params`.
        DisagreementError: the number, shapes or dtypes of parameters differ between workers.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]
    with current_group().guard() as group, torch.no_grad():
        call = "gather_grads" if model.training else "gather_grads of a model in evaluation mode"
        group.check_model(model, call)
        alike = _agree_on_model(group, call, model, named, [p.grad is not None for p in parameters])
        begin_sum(parameters, group.rank)
        several = group.world_size > 1
        if several:
            warn_of_mistakes(group, model, parameters)
        for name, p in named if several else []:
            if p.grad is not None and p.grad.layout != torch.strided:
                raise ConfigError(
                    f"{call}: the gradient of {name} is {p.grad.layout}; expected a dense one. Make the layer with "
                    "sparse=False; for rows of nodes, sar.nn.DistEmbedding has sparse gradients and optimizers."
                )
        present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device="cpu")
        if several and not alike:
            group.all_reduce(present, dist.ReduceOp.MAX, call)
        summed = [p for p, somewhere in zip(parameters, present.tolist(), strict=True) if somewhere]
        for bucket in _buckets(summed) if several else []:
            flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in bucket])
            travelling = flat.to(group.device, accumulation_dtype(flat.dtype))
            group.all_reduce(travelling, dist.ReduceOp.SUM, call)
            warn_of_nan(group, call, model, bucket, travelling)
            flat = to_device(travelling, flat.device)
            for p, total in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                total = total.view_as(p).to(p.dtype)
                p.grad = total.clone() if p.grad is None else p.grad.copy_(total)
        end_sum(parameters, group.rank)


def _agree_on_model(
    group: Group, call: str, model: Module, named: Sequence[tuple[str, Tensor]], present: Sequence[bool] = ()
) -> bool:
    """Agree on a call over a model that has the same layout on all workers.

    Returns whether `present` is also the same.
    """
    refuse_sharded(model, call)
    for name, tensor in named:
        if is_lazy(tensor):
            raise ConfigError(
                f"{call}: {name} has no shape yet, as its module is lazy. Give the model an input first, on every "
                "worker: model(graph, features)."
            )
    layout = repr(([described(tensor) for _, tensor in named], present))
    layouts = group.agree(call, int.from_bytes(blake2b(layout.encode(), digest_size=7).digest(), "little"))
    alike = len(set(layouts)) == 1
    if not alike:
        own = [[name, described(tensor)] for name, tensor in named]
        models = group.gather_json(own, call)
        for of_all in zip_longest(*models, fillvalue=["nothing", ""]):
            if len({layout for _, layout in of_all}) > 1:
                lines = "\n".join(f"  worker {rank}: {name} {layout}" for rank, (name, layout) in enumerate(of_all))
                raise DisagreementError(
                    f"The workers gave different models to {call}. The first difference:\n{lines}\nRun the same script "
                    "on all. A parameter with a row for each of a worker's own nodes is not part of the model: use a "
                    "tensor that requires a gradient, or sar.nn.DistEmbedding. Its gradient is complete as it is. Nor "
                    f"is such a buffer. {_OWN_BUFFER}"
                )
    if group.replicas is None or not group.replicas.share(model, call) or model in _told_of_norms:
        return alike
    # Warn of batch normalisation over each worker's own rows, except in DGL's layers, which are patched, and in layers
    # that the user has marked as local with `sar.convert_batchnorm`.
    layers = [module for module in model.modules() if type(module).__module__.startswith("dgl.")]
    covered = {id(inner) for layer in layers for inner in layer.modules()}
    covered |= {id(module) for module in model.modules() if hasattr(module, "knows_its_rows")}
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or isinstance(module, SyncBatchNorm) or id(module) in covered:
            continue
        if module.training or module.running_mean is None:  # else it is frozen
            _told_of_norms.add(model)
            warnings.warn(
                f"{call}: {name or 'the model'} is a {type(module).__name__}, which normalises by the rows of one "
                "worker, so that results depend on the partitioning. model = sar.convert_batchnorm(model) makes it "
                "normalise by those of all workers.",
                stacklevel=3,
            )
            break
    return alike


def _buckets(tensors: Sequence[AnyTensor]) -> list[list[AnyTensor]]:
    """Group tensors of one dtype into buckets of at most `BUCKET_ELEMENTS` elements; a larger tensor has its own."""
    buckets: list[list[AnyTensor]] = []
    size = 0
    for tensor in sorted(tensors, key=lambda tensor: str(tensor.dtype)):
        if not buckets or buckets[-1][0].dtype != tensor.dtype or size + tensor.numel() > BUCKET_ELEMENTS:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += tensor.numel()
    return buckets


def _check_alike(tensors: Sequence[Tensor]) -> None:
    """Raise if tensors differ in dtype or row shape, which the receiver would misread, or which would abort it."""
    rows = described(tensors[0][:0])
    for tensor in tensors:
        if described(tensor[:0]) != rows:
            raise ConfigError(
                f"Got {described(tensor)} among tensors with rows like {rows}; expected one dtype and row shape."
            )


def _check_device(group: Group, tensor: Tensor, move: bool) -> None:
    if tensor.device.type != group.device.type and not move:
        raise ConfigError(
            f"The tensor is on {tensor.device}, but tensors travel on {group.device}; pass move_to_comm_device=True."
        )


T = TypeVar("T")


def all_sum(x: T) -> T:
    """Return the sum over all workers, as a new tensor or number. A collective call.

    Not differentiable: a backward through it raises a `ConfigError`. In a model use `sar.nn.global_sum`.

    Args:
        x: a tensor, a number, or a list, tuple or dictionary of these, with the same structure, shapes and dtypes on
            all workers.

    Returns:
        The sum in the structure of `x`. As in `torch.sum`, booleans and integers become integers or int64 tensors.

    Raises:
        DisagreementError: structure, shapes or dtypes differ between workers.
        ConfigError: `x` contains other types.
    """
    return _over_all("all_sum", x, dist.ReduceOp.SUM)


def all_max(x: T) -> T:
    """Return the elementwise maximum over all workers; arguments as for `all_sum`.

    Dtypes do not change. NaN is the greatest value, as in `torch.max`.
    """
    return _over_all("all_max", x, dist.ReduceOp.MAX)


def _over_all(name: str, x: T, op: Any) -> T:
    leaves, structure = tree_flatten(x)
    with current_group().guard() as group:
        if others := [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor | Real)]:
            raise ConfigError(f"{name} got a {others[0]}; expected tensors, numbers, or a list, tuple or dict of them.")
        if not isinstance(x, Tensor | Real):  # for a single tensor or number, the agreement of `_combine` is enough
            forms = [described(leaf) if isinstance(leaf, Tensor) else isinstance(leaf, Integral) for leaf in leaves]
            group.agree(f"{name} of {tree_unflatten(forms, structure)}")
        return cast(T, tree_unflatten([_combined(group, name, leaf, op, group.device) for leaf in leaves], structure))


def _combined(group: Group, name: str, x: Any, op: Any, device: torch.device) -> Any:
    """Combine a tensor on the device, or a number on the CPU."""
    if isinstance(x, Integral):
        if not -(2**63) <= int(x) < 2**63:
            raise ConfigError(f"{name} got {x}; expected an integer of 64 bits.")
        if op == dist.ReduceOp.MAX:
            number = torch.tensor(x if isinstance(x, bool) else int(x), device="cpu")
            return _combined(group, name, number, op, number.device).item()
        halves = torch.tensor([int(x) >> 32, int(x) & 0xFFFFFFFF], device="cpu")  # whose sums do not overflow
        _combine(group, halves, op, halves.device)
        high, low = halves.tolist()
        return (high << 32) + low
    if isinstance(x, Real):
        number = torch.tensor(float(x), dtype=torch.float64, device="cpu")
        return _combined(group, name, number, op, number.device).item()
    if x.requires_grad and torch.is_grad_enabled():
        values = _combined(group, name, x.detach(), op, device).requires_grad_().clone()  # no leaf: may change in place
        values.register_hook(partial(_refuse_gradient, name))
        return values
    if x.dtype == torch.uint64 and op == dist.ReduceOp.MAX:
        raise ConfigError(f"{name} got {described(x)}; expected another dtype, as integers are compared in int64.")
    total = x.detach().clone() if x.is_floating_point() or x.is_complex() else x.to(torch.int64, copy=True)
    _combine(group, total, op, device)
    return total if op == dist.ReduceOp.SUM else total.to(x.dtype)


def _refuse_gradient(name: str, _: Tensor) -> None:
    raise ConfigError(
        f"sar.{name} has no gradient. In a model use sar.nn.global_sum, global_mean, global_max, or detach its input."
    )
