"""Sums, means and maxima over the rows of all workers, through which gradients flow."""

from typing import Any

import torch
from torch import Tensor

from sar.comm import session
from sar.comm.collectives import all_max
from sar.core.collective import Collective, Made
from sar.core.eager import uncompiled
from sar.kernels import accumulation_dtype


@uncompiled
def global_sum(values: Tensor) -> Tensor:
    """The sum of what the workers have, which the losses of all of them may depend on; a collective call.

    Args:
        values: of equal shape and dtype on all workers.

    Returns:
        Equal on all workers. Its gradients are summed too, so each worker's values get that of all losses together.

    Raises:
        CommunicationError: where another worker failed or makes another call.
    """
    return _GlobalSum(values).apply(values)[0]


def global_mean(x: Tensor) -> Tensor:
    """The mean over the rows of all workers, (N_i, ...) to (...); otherwise as `global_sum`."""
    own = x.sum(0, dtype=accumulation_dtype(x.dtype))
    total = global_sum(torch.cat([own.reshape(-1), own.new_full((1,), len(x))]))
    return (total[:-1] / total[-1].detach()).view(x.shape[1:]).to(x.dtype)


def global_max(x: Tensor) -> Tensor:
    """The maximum over the rows of all workers, (N_i, ...) to (...), of which equal ones share the gradient.

    As of `torch.amax`, NaN is the greatest, and makes the gradient NaN.
    """
    with torch.no_grad():
        greatest = all_max(x.amax(0) if len(x) else x.new_full(x.shape[1:], -torch.inf))
        equal = (x == greatest).to(x.dtype)
        ties = global_sum(equal.sum(0, dtype=accumulation_dtype(x.dtype)))
        ties = ties.maximum((~greatest.isnan()).to(ties.dtype))  # without any rows there are none
    return greatest + (global_sum((zeros_of(x) * equal).sum(0)) / ties).to(x.dtype)


def zeros_of(x: Tensor) -> Tensor:
    """Zeros that bring x its gradient; x - x would be NaN where x is infinite."""
    zeros: Tensor = _Zeros.apply(x)
    return zeros


class _Zeros(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _GlobalSum(Collective):
    def __init__(self, values: Tensor) -> None:
        shape, gradients = tuple(values.shape), "on" if torch.is_grad_enabled() else "off"
        super().__init__(session.current_group(), f"global_sum of {values.dtype} {shape}, gradients {gradients}")

    def forward(self, *inputs: Any) -> Made:
        return Made((self._summed(inputs[0]),))

    def backward(self, saved: list[Any], *grads: Tensor) -> list[Tensor | None]:
        return [self._summed(grads[0])]

    def _summed(self, values: Tensor) -> Tensor:
        if self.group is None or not self.distributed:
            return values.clone()
        everywhere = self.group.all_gather(values.detach().cpu().contiguous(), self.signature)
        return torch.stack(everywhere).sum(0).to(values.device)
