"""Tensors of node numbers that only support operations known to be right across workers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from sar.errors import GraphError

Handler = Callable[..., Any]
Original = Callable[..., Any]  # a function of PyTorch Geometric that we replace
Handlers = dict[Any, Handler]
Replacements = list[tuple[Any, str, Callable[..., Any]]]  # the owner of a function, its name, and the replacement
Guarded = TypeVar("Guarded", bound="GuardedTensor")


class GuardedTensor(Tensor):
    """Tensor whose operations have handlers in its class. Others raise, unless they do not read the numbers.

    It has a shape but no memory. So functions that bypass `__torch_function__`, such as `torch.tensor` and
    `torch.sparse_coo_tensor`, find no numbers: they reach `__torch_dispatch__`, which raises.
    """

    plain: Tensor  # the numbers
    handlers: ClassVar[Handlers] = {}  # handlers of all such tensors; subclasses copy them and add more
    what: ClassVar[str]  # description of the numbers, for errors
    advice: ClassVar[str]

    @classmethod
    def over(cls: type[Guarded], numbers: Tensor, **attributes: Any) -> Guarded:
        """Wrap the numbers in such a tensor with these attributes, without a copy."""
        guarded: Any = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=numbers.dtype, device=numbers.device)
        guarded.plain = numbers
        for name, value in attributes.items():
            setattr(guarded, name, value)
        return guarded

    @classmethod
    def handles(cls, *functions: Any, told: bool = False) -> Callable[[Handler], Handler]:
        """Register a function as handler of some operations. With `told`, its first argument is the operation."""

        def register(handler: Handler) -> Handler:
            cls.handlers.update({each: functools.partial(handler, each) if told else handler for each in functions})
            return handler

        return register

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = cls.handlers.get(func)
        try:
            if handler is not None:
                return handler(*args, **kwargs)
            if func in _RIGHT and args and isinstance(args[0], GuardedTensor):
                return plainly(func, *args, **kwargs)
        except TypeError as error:  # arguments that the handler does not know
            raise cls._refusal(func) from error
        raise cls._refusal(func)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise cls._refusal(func)

    @classmethod
    def _refusal(cls, func: Callable[..., Any]) -> GraphError:
        name = getattr(func, "__name__", str(func))
        return GraphError(
            f"{name} was called with {cls.what}, so that its result might be wrong across workers. {cls.advice}"
        )


EQUALITY = (Tensor.eq, Tensor.ne, Tensor.__eq__, Tensor.__ne__, torch.eq, torch.ne)

_METHODS = (
    "size dim numel nelement __len__ is_floating_point stride is_complex is_contiguous get_device element_size "
    "__hash__ new_ones new_zeros new_empty new_full"
)
_ATTRIBUTES = (
    "shape dtype device layout ndim is_cuda is_cpu is_meta is_sparse is_quantized is_mkldnn is_nested is_sparse_csr "
    "requires_grad grad_fn is_leaf grad"
)
_FUNCTIONS = "numel is_floating_point is_complex is_tensor ones_like zeros_like empty_like full_like rand_like"
_RIGHT = {
    *(getattr(Tensor, name) for name in _METHODS.split()),
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES.split()),
    *(getattr(torch, name) for name in _FUNCTIONS.split()),
}
"""Functions that need no handler: they do not read the numbers of their first argument."""


def plain(value: Any) -> Any:
    """The numbers of a guarded tensor; other values are unchanged."""
    return value.plain if isinstance(value, GuardedTensor) else value


def plainly(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function with plain tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})


def replace(replacements: Replacements) -> None:
    """Make each `owner.name(...)` call `function(original, ...)`. Repeated calls have no effect.

    `torch.jit.script` reads the source of the original, and looks up names in the globals of the function that it
    receives, so the replacement has the globals of the original.
    """
    for owner, name, function in replacements:
        original = getattr(owner, name)
        if getattr(original, "replaced_by", None) is not function:
            setattr(owner, name, _standing_in(original, name, function))


def _standing_in(original: Original, name: str, function: Callable[..., Any]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    made: Any = FunctionType(call.__code__, original.__globals__, name, None, call.__closure__)
    made = functools.wraps(original)(made)
    made.replaced_by = function
    return made


@GuardedTensor.handles(Tensor.__repr__)
def _repr(value: Tensor, **_: Any) -> str:
    return f"{type(value).__name__}({plain(value)!r})"


@GuardedTensor.handles(Tensor.__reduce_ex__)
def _refuse_to_save(value: Tensor, *_: Any) -> Any:
    raise GraphError(
        f"{type(value).__name__} belongs to the running workers, so that it cannot be saved. Save model.state_dict(), "
        "keep it out of modules, and make it again by sar.pyg.load_partition."
    )


@GuardedTensor.handles(Tensor.clone, Tensor.contiguous, Tensor.detach, Tensor.long, Tensor.__deepcopy__, torch.clone)
def _same(value: Tensor, *_: Any, **__: Any) -> Tensor:
    return value  # nothing here changes the numbers in place


@GuardedTensor.handles(Tensor.scatter_add_)
def _scatter_add_in_place(out: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    return out.copy_(out.scatter_add(dim, index, src))
