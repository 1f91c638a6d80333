"""Tries whether a Python function makes each row of its results of that row of its arguments alone.

[Note: own rows]
A message function runs on some of the edges at a time, a reduce function on one worker's nodes. So their results must
not depend on other rows, on the number of rows, or on a row's place among them, as with `x.mean(0)`, `x / len(x)` and
`x[:1]`. We try this on a few rows. In a second try the same two rows stand elsewhere among more rows, which are NaN,
and their results have to stay the same. Random numbers differ with the place: if results differ, we try again with a
constant in place of each random number. A function whose results differ by as much if all arguments change by a
rounding error, or because it keeps state, is left alone.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sar.core.eager import is_written_in
from sar.core.passing.captured import AmbientState
from sar.errors import GraphError


class FewRows(NamedTuple):
    """The rows of one try: their numbers, and which of them are kept if the others are NaN, and compared."""

    numbers: tuple[int, ...]
    kept: slice
    others: tuple[slice, ...] = ()  # rows that are NaN
    nudge: int = 0  # rounding errors by which values are changed

    def of(self, values: Tensor) -> Tensor:
        """These rows of values, (N, ...)."""
        values = values.detach() if len(values) else values.new_zeros(1, *values.shape[1:])
        rows = torch.stack([values[number % len(values)] for number in self.numbers])  # without a copy to the device
        is_number = rows.is_floating_point() or rows.is_complex()
        for spoilt in self.others:
            rows[spoilt] = torch.nan if is_number else rows[self.kept.start]
        return rows * (1 + self.nudge * _eps(rows)) if is_number and self.nudge else rows


FIRST = FewRows((0, 1, 2, 3), slice(0, 2))
SECOND = FewRows((2, 3, 2, 0, 1, 3, 2), slice(3, 5), (slice(0, 3), slice(5, 7)))
Run = Callable[[FewRows], Iterable[Tensor]]


def makes_own_rows(run: Run, device: torch.device, function: Any) -> bool | None:
    """Whether `run(rows)`, the results of a function on some rows, are the same in both tries; None if left alone.

    The random state, and the training modes and buffers of the function's modules, are the same in each run, and after.
    """
    state = AmbientState(device, function)

    def kept(rows: FewRows, mode: AbstractContextManager[Any]) -> list[Tensor]:
        with state.with_spare_buffers(), mode:
            made = [each.detach() for each in run(rows)]
        if any(len(each) != len(rows.numbers) for each in made):
            raise ValueError("Results must have a row for each row of the arguments.")
        return [each[rows.kept] for each in made]

    first = kept(FIRST, nullcontext())
    if all(map(is_close, first, kept(SECOND, nullcontext()))):
        return True
    if all(map(is_close, kept(FIRST, _WithoutChance()), kept(SECOND, _WithoutChance()))):
        return True
    return False if all(map(is_close, first, kept(FIRST._replace(nudge=4), nullcontext()))) else None


def refuse_other_rows(name: str, function: Any, run: Run, device: torch.device) -> None:
    """Raise a GraphError that names a function of a user's, unless it makes its own rows."""
    if is_written_in(function, "dgl") or is_written_in(function, "sar"):
        return
    try:
        owns = makes_own_rows(run, device, function)
    except Exception:  # if it is the user's, the call with all rows raises it
        return
    if owns is False:
        raise GraphError(
            f"{name} makes other results of the same edges or nodes if they stand among others: it looks at all rows "
            "that it is given, as x.mean(0), len(x) and x[:1] do. A distributed graph calls it with some rows at a "
            "time; compute such values before, and set them as fields."
        )


def is_close(first: Tensor, second: Tensor) -> bool:
    """Whether two tries' results are equal but for rounding."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.is_meta or not first.numel():
        return True
    same = first == second
    if first.is_floating_point() or first.is_complex():
        eps, size = _eps(first), first.abs()
        near = (first - second).abs() <= eps**0.5 * size + 16 * eps * size.nan_to_num(0, 0, 0).max()
        same = same | near | (first.isnan() & second.isnan())
    return bool(same.all())


def _eps(values: Tensor) -> float:
    """The rounding error of values, or of autocast."""
    kind = values.device.type
    autocast = [torch.get_autocast_dtype(kind)] if not values.is_meta and torch.is_autocast_enabled(kind) else []
    return max(torch.finfo(dtype).eps for dtype in (values.dtype, *autocast))


class _WithoutChance(TorchDispatchMode):
    """Mode in which random numbers are one constant, and dropout keeps everything."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.native_dropout.default:
            return args[0], torch.ones_like(args[0], dtype=torch.bool)
        made = func(*args, **(kwargs or {}))
        is_random = torch.Tag.nondeterministic_seeded in func.tags and "Tensor" not in func._overloadname
        return made.fill_(0.5) if is_random and isinstance(made, Tensor) else made
