"""`all_sum` and `all_max`: over all workers, of tensors, numbers, and collections of them."""

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sar.comm.collectives import all_reduce
from sar.comm.replicas import described
from sar.comm.session import current_group
from sar.errors import ConfigError

T = TypeVar("T")


def all_sum(x: T) -> T:
    """The sum over all workers, as a new tensor or number without a gradient; called by all workers together.

    Args:
        x: a tensor, a number, or a list, tuple or dictionary of them; alike on all workers in structure, shapes and
            dtypes.

    Returns:
        What `x` is. Booleans and integers give integers, tensors of them int64, as in `torch.sum`.

    Raises:
        DisagreementError: where the workers' `x` are not alike.
        ConfigError: where there is something else in `x`.
    """
    return _over_all("all_sum", x, _sum)


def all_max(x: T) -> T:
    """The greatest value over all workers, element by element; otherwise as `all_sum`.

    Dtypes stay, and NaN is the greatest, as in `torch.max`.
    """
    return _over_all("all_max", x, _max)


def _over_all(name: str, x: T, combine: Callable[[Tensor], Tensor]) -> T:
    group = current_group()
    with group.guard():
        form = _form(name, x)
        if not isinstance(x, Tensor | Real):  # of these `all_reduce` agrees on all that matters
            group.agree(f"{name} of {form}")
        combined: T = _leaf_by_leaf(x, combine)
        return combined


def _form(name: str, x: Any) -> str:
    """What has to be alike on all workers, for texts."""
    if isinstance(x, Tensor):
        return described(x)
    if isinstance(x, Real):
        return "an integer" if isinstance(x, Integral) else "a number"
    if isinstance(x, Mapping):
        return "{" + ", ".join(f"{key!r}: {_form(name, value)}" for key, value in x.items()) + "}"
    if isinstance(x, list | tuple):
        return "[" + ", ".join(_form(name, value) for value in x) + "]"
    raise ConfigError(f"{name} got a {type(x).__name__}; expected tensors, numbers, or a list, tuple or dict of them.")


def _leaf_by_leaf(x: Any, combine: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(x, Tensor):
        return combine(x.detach())
    if isinstance(x, Real):
        return combine(torch.tensor(x, dtype=None if isinstance(x, Integral) else torch.float64, device="cpu")).item()
    if isinstance(x, Mapping):
        return {key: _leaf_by_leaf(value, combine) for key, value in x.items()}
    values: Sequence[Any] = [_leaf_by_leaf(value, combine) for value in x]
    return type(x)(*values) if hasattr(x, "_fields") else type(x)(values)  # a named tuple takes them one by one


def _sum(x: Tensor) -> Tensor:
    total = x.clone() if x.is_floating_point() or x.is_complex() else x.to(torch.int64, copy=True)
    all_reduce(total, move_to_comm_device=True)
    return total


def _max(x: Tensor) -> Tensor:
    """By numbers and, because gloo's maximum of a number and NaN depends on their order, by what is NaN."""
    number = torch.where(x.isnan(), -torch.inf, x) if x.is_floating_point() else x.to(torch.int64, copy=True)
    all_reduce(number, dist.ReduceOp.MAX, move_to_comm_device=True)
    if not x.is_floating_point():
        return number.to(x.dtype)
    broken = x.isnan().to(torch.uint8)
    all_reduce(broken, dist.ReduceOp.MAX, move_to_comm_device=True)
    return torch.where(broken.bool(), torch.nan, number)
