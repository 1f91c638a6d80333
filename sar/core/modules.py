"""Whether a module does what its type says, and views of empty tensors in layers."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all_modules
from torch.overrides import TorchFunctionMode

_KINDS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether a call runs hooks, of the module or all modules, other than those of sar's profiles and plans."""
    for kind in _KINDS:
        for hook in (*getattr(module, f"_{kind}").values(), *getattr(hooks_of_all_modules, f"_global_{kind}").values()):
            if not is_written_in(hook, "sar.train"):
                return True
    return False


def is_written_in(function: Any, package: str) -> bool:
    """Whether a function is a package's own, and not a replacement by the user."""
    return f"{getattr(function, '__globals__', {}).get('__name__')}.".startswith(f"{package}.")


def is_exactly(module: Any, *kinds: type) -> bool:
    """Whether a call of a module only runs the `forward` of one of these types, so that a kernel may replace it."""
    if type(module) not in kinds or "forward" in vars(module) or has_hooks(module):
        return False
    return is_written_in(module.forward, type(module).__module__)


def is_autocast(x: Tensor) -> bool:
    """Whether `torch.autocast` changes the dtype of products of a tensor."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def views_of_nothing(rows: int) -> AbstractContextManager[Any]:
    """Context for layers on a worker without edges, and maybe without nodes. Does nothing unless `rows` is 0.

    DGL's layers call `x.view(len(x), -1, D)`, which torch refuses for an x without elements, because -1 is ambiguous.
    The context derives that size from the other dimensions of x.
    """
    return _ResolveViews() if rows == 0 else nullcontext()


class _ResolveViews(TorchFunctionMode):
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.view, Tensor.reshape, torch.reshape) and len(args) > 1 and args[0].numel() == 0:
            sizes = args[1] if isinstance(args[1], Iterable) else args[1:]
            if isinstance(sizes, Iterable) and -1 in (sizes := tuple(sizes)):
                # Replace -1 by the quotient of the dimensions other than 0.
                old_size = prod(size for size in args[0].shape if size)
                known_size = prod(size for size in sizes if size > 0)
                if old_size % known_size == 0 and sizes.count(0) == args[0].shape.count(0):
                    args = (args[0], tuple(old_size // known_size if size == -1 else size for size in sizes))
        return func(*args, **(kwargs or {}))
