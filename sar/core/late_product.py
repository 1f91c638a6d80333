"""Products with a layer's weight: nothing waits for its gradient, so that it can be computed while messages travel.

torch's own backward of a product computes both gradients before anything can be sent that follows from one of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.modules import module

from sar.core.eager import uncompiled

LINEAR = nn.Linear.forward  # torch's own


def is_plain(layer: Any, x: Tensor) -> bool:
    """Whether a layer is a function of x, its weight and bias and nothing else: without hooks, forward or autocast."""
    kinds = [f"{direction}{pre}_hooks" for direction in ("forward", "backward") for pre in ("", "_pre")]
    hooked = any(getattr(layer, f"_{kind}") or getattr(module, f"_global_{kind}") for kind in kinds)
    autocast = x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
    own = getattr(layer.forward, "__func__", None) is LINEAR
    return type(layer) is nn.Linear and own and not hooked and not autocast


def late_product(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """`linear` of an x, (N, in), with a weight, (out, in); in the backward, its gradient is computed where this stands.

    So a node of autograd that is made after this and before the product comes between both gradients.
    """
    made: list[Tensor] = []
    tie = _Weight.apply(weight, made)

    @uncompiled
    def product(x: Tensor) -> Tensor:
        result: Tensor = _Product.apply(x, weight, tie, made)
        return result

    return product


class _Weight(torch.autograd.Function):
    """Makes the weight's gradient, from what the backward of the product left in `made`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, made: list[Tensor]) -> Tensor:
        ctx.made = made
        return torch.empty(0, dtype=weight.dtype, device=weight.device)

    @staticmethod
    def backward(ctx: Any, tie: Tensor) -> Any:
        grad, x = ctx.made
        ctx.made.clear()
        return grad.t() @ x, None


class _Product(torch.autograd.Function):
    """The weight is an input, for second derivatives; its gradient goes through the tie."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tie: Tensor, made: list[Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.made = made
        return linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_tie, _ = ctx.needs_input_grad
        if needs_tie:
            ctx.made[:] = grad, x
        return grad @ weight if needs_x else None, None, torch.empty_like(weight[:0, 0]) if needs_tie else None, None
