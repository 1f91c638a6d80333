"""Which gradients are sums over workers already, so that `gather_grads` does not sum them again.

[Note: sums]
A change in place, such as clipping, leaves a sum a sum. It ends when the gradient is set to None, is zero when a
backward adds to it, or when both the gradient and its parameter have changed, as in a loop that writes gradients by hand.
A backward may also add to a sum S that nobody has cleared. Then worker 0 alone keeps S, and the others begin at zero:
the next sum is S and what all workers have added, as on one machine.
"""

from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary, WeakTensorKeyDictionary

from sar.errors import ConfigError

_sums: Final[WeakIdKeyDictionary] = WeakIdKeyDictionary()
"""By gradient: its version and that of its parameter when it was summed; None once a backward has added to it."""
_followed: Final[WeakTensorKeyDictionary] = WeakTensorKeyDictionary()
"""Parameters of which every backward is followed, with the hook that does."""


def remember_sums(parameters: Sequence[Parameter], rank: int) -> None:
    """Note that the gradients of these parameters are sums now."""
    for p in parameters:
        if p.grad is not None and p.grad.layout is torch.strided and not p.grad.is_inference():
            if p not in _followed:
                _followed[p] = p.register_hook(partial(_add, TensorWeakRef(p), rank))
            _sums[p.grad] = p.grad._version, p._version


def begin_sum(call: str, parameters: Sequence[Parameter], rank: int) -> None:
    """Raise if there are no gradients but sums; leave those among others to worker 0. See [Note: sums]."""
    given = [p for p in parameters if p.grad is not None]
    sums = [p.grad for p in given if _is_sum(p)]
    if given and len(sums) == len(given):
        raise ConfigError(
            f"{call}: the gradients are sums over the workers already, and would be added up once more. Call it once "
            "for each step, after the last backward; then optimizer.step() and optimizer.zero_grad()."
        )
    for grad in sums:
        _leave_to_first(grad, rank)


def _is_sum(p: Parameter) -> bool:
    then = _sums.get(p.grad, ())
    return (then is None or p.grad._version in then[:1] or p._version in then[1:]) and bool(p.grad.any())


@torch.no_grad()
def _add(of: TensorWeakRef, rank: int, _: Tensor) -> None:
    """What happens before a backward adds to a gradient."""
    p = of()
    if p is not None and p.grad in _sums:
        if p.grad.any():
            _leave_to_first(p.grad, rank)
        else:
            del _sums[p.grad]


def _leave_to_first(grad: Tensor, rank: int) -> None:
    if rank and _sums[grad] is not None:
        grad.zero_()
    _sums[grad] = None
