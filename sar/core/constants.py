"""Results of message passing on operands that never change, such as the input features: `Config.cache_constant_inputs`.

[Note: hits are joint]
A worker may take a kept result only if all do, because the others need its rows otherwise. So whether this worker has
one is a flag in the agreement. A result is kept from the second call on the same operands: most operands are seen once.
"""

import weakref
from collections.abc import Hashable, Sequence

from torch import Tensor


class Constant:
    """What is known about one call on certain operands.

    result: (N_dst, ...), from the second call on.
    """

    def __init__(self, operands: Sequence[Tensor]) -> None:
        self._operands = [(weakref.ref(operand), operand._version) for operand in operands]
        self._result: tuple[Tensor, int] | None = None
        self._calls = 0

    @property
    def alive(self) -> bool:
        """Whether the operands still exist."""
        return all(reference() is not None for reference, _ in self._operands)

    @property
    def result(self) -> Tensor | None:
        """The kept result, unless anybody has changed it."""
        if self._result is None or self._result[0]._version != self._result[1]:
            return None
        return self._result[0]

    def is_of(self, operands: Sequence[Tensor]) -> bool:
        """Whether these are the operands, unchanged."""
        return all(
            reference() is operand and version == operand._version
            for (reference, version), operand in zip(self._operands, operands, strict=True)
        )

    def keep(self, result: Tensor) -> None:
        """Note a result that was computed; it is kept if it is not the first."""
        self._calls += 1
        if self._calls > 1:
            # Detached, it shares memory and version with what the caller gets, so that a change in place shows.
            self._result = result.detach(), result._version


class Constants:
    """The constants of one relation."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, Constant] = {}

    def find(self, call: Hashable, operands: Sequence[Tensor]) -> Constant:
        """What is known about a call on these operands; forgets operands that are gone."""
        key = (call, *map(id, operands))
        entry = self._entries.get(key)
        if entry is None or not entry.is_of(operands):
            self._entries = {k: e for k, e in self._entries.items() if e.alive}
            entry = self._entries[key] = Constant(operands)
        return entry
