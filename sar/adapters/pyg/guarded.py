"""Tensors of node numbers on which only operations work that are known to be right across workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from sar.errors import GraphError

Handler = Callable[..., Any]
Handlers = dict[Any, Handler]


class GuardedTensor(Tensor):
    """An operation on such a tensor is done by a handler of its class, as it stands where it is right so, or raises.

    Attributes:
        plain: the same memory as a plain tensor.
    """

    plain: Tensor
    handlers: ClassVar[Handlers]
    what: ClassVar[str]
    """What its numbers are, for errors."""
    advice: ClassVar[str]

    @classmethod
    def over(cls, numbers: Tensor) -> Any:
        """The numbers as such a tensor; shares their memory."""
        guarded = numbers.as_subclass(cls)
        guarded.plain = numbers
        return guarded

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = cls.handlers.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        if func in _RIGHT:
            return plainly(func, *args, **kwargs)
        name = getattr(func, "__name__", str(func))
        raise GraphError(
            f"{name} was called with {cls.what}, so that its result might be wrong across workers. {cls.advice}"
        )


_EQUALITY = (Tensor.eq, Tensor.ne, Tensor.__eq__, Tensor.__ne__, torch.eq, torch.ne)

_RIGHT = {
    *_EQUALITY,
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "nelement", "__len__", "is_floating_point", "stride")),
    *(getattr(Tensor, name) for name in ("is_complex", "is_contiguous", "get_device", "element_size", "__hash__")),
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "is_meta", "is_sparse")
    ),
    *(
        getattr(Tensor, name).__get__
        for name in ("is_quantized", "is_mkldnn", "is_nested", "is_sparse_csr", "requires_grad", "grad_fn", "is_leaf")
    ),
    *(getattr(torch, name) for name in ("numel", "is_floating_point", "is_complex", "is_tensor", "ones_like")),
    *(getattr(torch, name) for name in ("zeros_like", "empty_like", "full_like", "rand_like")),
    *(getattr(Tensor, name) for name in ("new_ones", "new_zeros", "new_empty", "new_full", "new_tensor", "type")),
}
"""Functions that are right as they stand: those that ask nothing of the numbers, and whether two of them are equal."""


def plain(value: Any) -> Any:
    """The same memory as a plain tensor; what is not guarded as it is."""
    return value.plain if isinstance(value, GuardedTensor) else value


def plainly(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function with plain tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})


def handler_for(handlers: Handlers, *functions: Any) -> Callable[[Handler], Handler]:
    """Make a function the handler of some operations."""

    def register(handler: Handler) -> Handler:
        handlers.update(dict.fromkeys(functions, handler))
        return handler

    return register
