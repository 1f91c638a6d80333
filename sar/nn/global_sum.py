"""Sums over the nodes of all workers, through which gradients flow."""

from typing import Any

import torch
from torch import Tensor

from sar.comm import session
from sar.core.collective import Collective, Made
from sar.core.eager import uncompiled


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
