"""Distributed calls under `torch.compile`: they run as they are, between the compiled parts of a model."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """A function that `torch.compile` leaves alone, with all that it calls.

    As `torch.compiler.disable`, which imports torch's compiler; here only those who use that pay for it.
    """
    disabled: Callable[..., Any] | None = None

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return call  # type: ignore[return-value]
