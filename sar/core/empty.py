"""Layers on a worker that has no nodes or no edges.

DGL's layers write `x.view(len(x), -1, D)`, which torch refuses for an x without elements: -1 could be anything there.
What they mean is plain from the other dimensions, so on such a worker it is worked out for them.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def views_of_nothing(rows: int) -> AbstractContextManager[Any]:
    """A context in which views of tensors without elements may say -1; does nothing unless `rows` is 0."""
    return _ResolveViews() if rows == 0 else nullcontext()


class _ResolveViews(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.view, Tensor.reshape, torch.reshape) and len(args) > 1 and args[0].numel() == 0:
            sizes = args[1] if isinstance(args[1], Iterable) else args[1:]
            if isinstance(sizes, Iterable) and -1 in (sizes := tuple(sizes)):
                args = (args[0], _resolved(args[0].shape, sizes))
        return func(*args, **(kwargs or {}))


def _resolved(shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """`sizes` with -1 replaced by what the dimensions of `shape` other than 0 leave for it."""
    had = prod(size for size in shape if size)
    given = prod(size for size in sizes if size > 0)
    fits = had % given == 0 and sizes.count(0) == sum(size == 0 for size in shape)
    return tuple(had // given if size == -1 and fits else size for size in sizes)
