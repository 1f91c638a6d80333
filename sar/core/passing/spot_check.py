"""Spot check of Python functions: a result must only depend on its own edge or node.

A message function is called with some of a worker's edges at a time, and a reduce function with one worker's nodes. So
a message may only depend on its own edge, and the result of a reduce function on its own node and the node's messages,
unlike `x.mean(0)`, `x / len(x)` and `x[:1]`. At a function's first call on a graph we recompute the results of a
few random rows without the other rows, and compare. Functions that draw random numbers, or whose results change from
call to call because they keep state, are not checked here, but by `check_model`.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sar.core.modules import is_written_in
from sar.core.passing.captured import AmbientState
from sar.core.relation import Relation
from sar.errors import GraphError

ROWS, AT_ONCE = 64, 4
"""Rows to compare, and about how many to pass at a time: few, so that their mean differs from that of all rows."""

Results = Mapping[str, Tensor]
Change = Callable[[Tensor], Tensor]
Alone = Callable[[Tensor, Change], Results]

ADVICE = (
    "A distributed graph calls it with some rows at a time. Compute such values before the call; or, in a layer of "
    "PyTorch Geometric, let `message` take `index`, so that it gets all edges into the worker's nodes."
)


class SpotCheck:
    """The check of one function; due until its results on a relation have been compared once.

    `state` is the state before the call.
    """

    def __init__(self, relation: Relation, name: str, function: Any, state: AmbientState, advice: str = ADVICE) -> None:
        self._checked, self._name, self._state, self._advice = relation.checked, name, state, advice
        inner = inspect.unwrap(getattr(function, "__func__", function))
        self._key = getattr(inner, "__code__", type(inner)), state.identity
        is_known = is_written_in(inner, "dgl") or is_written_in(inner, "sar")  # known to be right
        self.is_due = not (is_known or relation.in_degrees.is_meta or self._key in self._checked)

    def compare(self, results: Results, alone: Alone, nodes: Tensor | None = None) -> None:
        """Raise a GraphError if the results of some rows change when the function only receives these rows.

        Args:
            results: results of all rows, (n, ...) each.
            alone: returns the results of some rows; its second argument is applied to all operands, to change some.
            nodes: node of each row, (n,), if a result may depend on all rows of its node.
        """
        batches = _few_rows(len(next(iter(results.values()), ())), nodes)
        if not self.is_due or not batches or self._state.has_changed():
            return
        try:
            with self._state.with_spare_modules(), torch.no_grad():
                device = next(iter(results.values())).device
                batches = [rows.to(device) for rows in batches]
                together = [{name: values.detach()[rows] for name, values in results.items()} for rows in batches]
                apart = [alone(rows, unchanged) for rows in batches]
                is_wrong = not all(map(_are_close, together, apart))
                if is_wrong:  # unless it keeps state, or makes rounding errors large
                    is_wrong = all(map(_are_close, apart, [alone(rows, _nudged) for rows in batches]))
        except Exception:  # errors of the user's code are raised again by calls with all rows
            is_wrong = False
        if is_wrong:
            raise GraphError(
                f"{self._name} makes other results of the same edges or nodes if they stand among others: it looks at "
                f"all rows that it is given, as x.mean(0), len(x) and x[:1] do. {self._advice}"
            )
        self.is_due = False
        self._checked.add(self._key)


@contextmanager
def refuse_batch_norms(name: str, state: AmbientState) -> Iterator[None]:
    """Context in which a function's batch norms raise if they would compute statistics of their input rows."""

    def refuse(module: nn.Module, _: Any) -> None:
        raise GraphError(
            f"{name} calls a {type(module).__name__}, which takes statistics of all rows that it is given. A "
            "distributed graph calls the function with some rows at a time: normalise before or after the call, or let "
            "the module use running statistics, by eval()."
        )

    with ExitStack() as stack:
        for module in state.modules:
            if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
                stack.callback(module.register_forward_pre_hook(refuse, prepend=True).remove)
        yield


def _few_rows(count: int, nodes: Tensor | None) -> Sequence[Tensor]:
    """Random rows, or all rows of random nodes, some at a time; neither the first row nor all."""
    if count < 2:
        return ()
    rows = torch.randint(1, count, (ROWS,), generator=torch.Generator().manual_seed(count), device="cpu").unique()
    if nodes is None:
        count = max(len(rows) // AT_ONCE, 1)
        return [rows[first::count] for first in range(count)]  # far apart, because neighboring rows may be equal
    nodes = nodes.cpu()
    chosen = nodes[rows].unique()
    batch_of = torch.full((int(nodes.max()) + 1,), -1)
    batch_of[chosen] = torch.arange(len(chosen)) // AT_ONCE
    batch_of[nodes[0]] = -1
    batches = batch_of[nodes]
    return [rows for number in range(-(-len(chosen) // AT_ONCE)) if len(rows := (batches == number).nonzero()[:, 0])]


def _are_close(first: Results, second: Results) -> bool:
    """Whether two results of the same rows are equal up to rounding."""
    return all(_is_close(values, second[name]) for name, values in first.items())


def _is_close(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    same = first == second
    if first.numel() and (first.is_floating_point() or first.is_complex()):
        eps, size = _eps(first), first.abs()
        near = (first - second).abs() <= eps**0.5 * size + 16 * eps * size.nan_to_num(0, 0, 0).max()
        same = same | near | (first.isnan() & second.isnan())
    return bool(same.all())


def unchanged(values: Tensor) -> Tensor:
    """The identity, a `Change`."""
    return values


def _nudged(values: Tensor) -> Tensor:
    """Values changed by some rounding errors."""
    return values * (1 + 4 * _eps(values)) if values.is_floating_point() or values.is_complex() else values


def _eps(values: Tensor) -> float:
    """The rounding error of values, or of autocast."""
    kind = values.device.type
    autocast = [torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else []
    return max(torch.finfo(dtype).eps for dtype in (values.dtype, *autocast))
