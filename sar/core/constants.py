"""Results of message passing on operands that never change, such as the input features: `Config.cache_constant_inputs`.

[Note: hits are joint]
A worker may take a kept result only if all do, because the others need its rows otherwise; and only if all results were
made in one call, because they were made of the others' operands of then. So the agreement's flags say which call this
worker's result is from. A result is kept from the second call on the same operands: most operands are seen once.

[Note: equal operands]
A layer such as `GraphConv` scales its input anew on every call, so that its operand is always another tensor, of equal
content. Operands that are new are therefore looked up by a sample of their rows. Where one is seen again, a copy of
them is kept, and the result is that of operands whose bits are all the copy's. The sample only decides what is worth a
copy: what changes with every call, as after dropout, has another sample each time, and costs next to nothing.
"""

import weakref
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

SAMPLED_ROWS = 16
SAMPLES = 8
"""Samples of a relation, the latest ones; so no more copies are kept."""


class Constant:
    """What is known about one call on certain operands, from its second time on.

    result: (N_dst, ...).
    call_id: `Group.call_id` of the call that made the result; 0 where there is none.
    """

    def __init__(self) -> None:
        self._result: tuple[Tensor, int] | None = None
        self._call_id = 0

    @property
    def result(self) -> Tensor | None:
        """The kept result, unless anybody has changed it."""
        if self._result is None or self._result[0]._version != self._result[1]:
            return None
        return self._result[0]

    @property
    def call_id(self) -> int:
        return 0 if self.result is None else self._call_id

    def keep(self, result: Tensor, call_id: int) -> None:
        """Keep a result that was made at `call_id`; not one of inference mode, in which changes do not show."""
        if not result.is_inference():
            # Detached, it shares memory and version with what the caller gets, so that a change in place shows.
            self._result, self._call_id = (result.detach(), result._version), call_id


class _Same(Constant):
    """Of operands that are known by identity and version."""

    def __init__(self, operands: Sequence[Tensor]) -> None:
        super().__init__()
        self._operands = [(weakref.ref(operand), operand._version) for operand in operands]

    @property
    def alive(self) -> bool:
        """Whether the operands still exist."""
        return all(reference() is not None for reference, _ in self._operands)

    def is_of(self, operands: Sequence[Tensor]) -> bool:
        """Whether these are the operands, unchanged."""
        return all(
            reference() is operand and version == operand._version
            for (reference, version), operand in zip(self._operands, operands, strict=True)
        )


class _Equal(Constant):
    """Of operands that are known by content: see [Note: equal operands]."""

    def __init__(self, operands: Sequence[Tensor]) -> None:
        super().__init__()
        self._copies = [operand.clone() for operand in operands]

    def is_of(self, operands: Sequence[Tensor]) -> bool:
        """Whether operands of the same shapes and dtypes have the same bits."""
        return all(
            torch.equal(_bits(copy), _bits(operand)) for copy, operand in zip(self._copies, operands, strict=True)
        )


class Constants:
    """The constants of one relation."""

    def __init__(self) -> None:
        self._same: dict[Hashable, _Same] = {}
        self._equal: dict[Hashable, _Equal | None] = {}  # by sample, the latest last; None until there is a copy

    def find(self, call: Hashable, operands: Sequence[Tensor]) -> Constant | None:
        """What is known about a call on these operands, which need no gradient; None where they are new.

        Forgets operands that are gone, and samples that have not been seen for a while.
        """
        if not any(operand.is_inference() for operand in operands):  # these have no versions
            key = (call, *map(id, operands))
            same = self._same.get(key)
            if same is not None and same.is_of(operands):
                return same
            self._same = {k: entry for k, entry in self._same.items() if entry.alive}
            self._same[key] = _Same(operands)
        return self._find_equal((call, *map(_sample, operands)), operands)

    def _find_equal(self, key: Hashable, operands: Sequence[Tensor]) -> Constant | None:
        seen = key in self._equal
        equal = self._equal.pop(key, None)
        if equal is None:
            equal = _Equal(operands) if seen else None
        elif not equal.is_of(operands):
            equal = None
        self._equal[key] = equal
        if len(self._equal) > SAMPLES:
            del self._equal[next(iter(self._equal))]
        return equal


def _sample(operand: Tensor) -> Hashable:
    """Shape, dtype, and the bits of some rows."""
    rows = operand[:: max(len(operand) // SAMPLED_ROWS, 1)]
    return operand.shape, operand.dtype, _bits(rows).cpu().numpy().tobytes()


def _bits(values: Tensor) -> Tensor:
    """Floating-point numbers as integers, in which 0 is not -0, and NaN is NaN."""
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
