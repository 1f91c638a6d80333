"""Results of message passing on operands that never change, such as the input features: `Config.cache_constant_inputs`.

[Note: hits are joint]
A worker may take a kept result only if all do, because the others need its rows otherwise; and only if all results were
made in one call, because they were made of the others' operands of then. So the agreement's flags say which call this
worker's result is from. A result is kept from the second call on the same operands: most operands are seen once.

[Note: equal operands]
Operands are known by their content, not by the tensor that they are: numpy, `.data` and shared memory change a tensor
and leave no trace, and a layer such as `GraphConv` scales its input anew on every call. They are looked up by a sample
of their rows. Where it is seen again, a copy of them is kept, and the result is that of operands whose bits are all the
copy's. The sample only decides what is worth a copy: what changes with every call, as after dropout, has another sample
each time, and costs next to nothing.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from sar.outofcore.residency import copied
from sar.raw_memory import settled

SAMPLED_ROWS = 16
SAMPLES = 8
"""Samples of a relation, the latest ones; so no more copies are kept."""


class Constant:
    """One call on certain operands, which come for the second time; made of copies of them.

    call_id: `Group.call_id` of the call that made the kept result; 0 where there is none.
    """

    def __init__(self, operands: Sequence[Tensor]) -> None:
        self.call_id = 0
        self._copies = [_kept(operand) for operand in operands]
        self._result: Tensor | None = None

    def is_of(self, operands: Sequence[Tensor]) -> bool:
        """Whether operands of the same shapes and dtypes have the same bits."""
        return all(
            torch.equal(_bits(copy), _bits(operand)) for copy, operand in zip(self._copies, operands, strict=True)
        )

    @property
    def result(self) -> Tensor | None:
        """A copy of the kept result, (N_dst, ...), as changes through numpy or `.data` leave no trace."""
        return None if self._result is None else copied(self._result)

    def keep(self, result: Tensor, call_id: int) -> None:
        """Keep a copy of a result that was made at `call_id`."""
        self._result, self.call_id = _kept(result.detach()), call_id


class Constants:
    """The constants of one relation."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Constant | None] = {}  # by sample, the latest last; None until there is a copy

    def find(self, call: Hashable, operands: Sequence[Tensor]) -> Constant | None:
        """What is known about a call on these operands, which need no gradient; None where they are new.

        Forgets samples that have not been seen for a while.
        """
        key = (call, *map(_sample, operands))
        seen, known = key in self._known, self._known.pop(key, None)
        if known is None:
            known = Constant(operands) if seen else None
        elif not known.is_of(operands):
            known = None
        self._known[key] = known
        if len(self._known) > SAMPLES:
            del self._known[next(iter(self._known))]
        return known


def _sample(operand: Tensor) -> Hashable:
    """Shape, dtype, and the bits of some rows."""
    rows = operand[:: max(len(operand) // SAMPLED_ROWS, 1)]
    return operand.shape, operand.dtype, _bits(rows).cpu().contiguous().numpy().tobytes()


def _kept(tensor: Tensor) -> Tensor:
    """A copy that stays, out of memory where there is a place for such."""
    return copied(settled(tensor))


def _bits(values: Tensor) -> Tensor:
    """Floating-point numbers as integers, in which 0 is not -0, and NaN is NaN."""
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
