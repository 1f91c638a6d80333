"""Creates tensors that outlive a call, such as caches, outside the modes of the call."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def lasting(make: Callable[P, T]) -> Callable[P, T]:
    """Decorator of functions whose tensors are kept: they are ordinary tensors in any mode of the caller.

    Autograd cannot save tensors that were created in inference mode. Tensors of torch's fake mode have no values.
    """

    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> T:
        fake: Any = sys.modules.get("torch._subclasses.fake_tensor")
        gradients = torch.is_grad_enabled()  # which inference_mode(False) switches on
        no_fake = fake.unset_fake_temporarily() if fake else nullcontext()
        with torch.inference_mode(False), torch.set_grad_enabled(gradients), no_fake:
            return make(*args, **kwargs)

    return made
