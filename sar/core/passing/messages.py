"""What a built-in message function reads and a built-in reducer makes, read off DGL's descriptors by attribute."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from sar.errors import GraphError
from sar.kernels import Op, Target

Function = TypeVar("Function", bound=Callable[..., Any])

REDUCERS = ("sum", "mean", "max", "min")


@dataclass(frozen=True)
class Operand:
    """A field that a message reads, and whose rows it has."""

    target: Target
    field: str

    def __str__(self) -> str:
        return f"{self.target.name.lower()}[{self.field!r}]"


@dataclass(frozen=True)
class Message:
    """A built-in message function: op(lhs, rhs) per edge; `rhs` is None for a copy."""

    op: Op
    lhs: Operand
    rhs: Operand | None
    out_field: str

    def __str__(self) -> str:
        return f"{self.op.name.lower()}({self.lhs}{f', {self.rhs}' if self.rhs else ''})"


COPY_SOURCE = Message(Op.COPY, Operand(Target.U, "values"), None, "values")
"""The row of each edge's source."""


def is_python(function: Any) -> bool:
    """Whether a message or reduce function is a Python function, rather than one of `dgl.function` or neither."""
    return callable(function) and not hasattr(function, "out_field")


def parse_message(function: Any) -> Message:
    """Read a built-in message function.

    Raises:
        GraphError: for one that is not known.
    """
    if hasattr(function, "binary_op"):
        lhs = Operand(Target(function.lhs), function.lhs_field)
        rhs = Operand(Target(function.rhs), function.rhs_field)
        return Message(Op(function.binary_op), lhs, rhs, function.out_field)
    if hasattr(function, "in_field") and hasattr(function, "target"):
        return Message(Op.COPY, Operand(Target(function.target), function.in_field), None, function.out_field)
    raise GraphError(
        f"{_named(function)} is not a message function; expected one of dgl.function, or a Python function."
    )


def parse_reduction(function: Any, made: str | None) -> tuple[str, str]:
    """Read a built-in reducer: its name, and the field that it makes.

    Args:
        function: the reducer.
        made: the field that the message function makes, where that is known.

    Raises:
        GraphError: for a reducer that is not known, or that reads another field.
    """
    if not hasattr(function, "msg_field") or function.name not in REDUCERS:
        raise GraphError(
            f"{_named(function)} is not a reducer; expected {', '.join(REDUCERS)} of dgl.function, or a function."
        )
    if made is not None and function.msg_field != made:
        raise GraphError(
            f"The message function makes {made!r}, but the reducer reads {function.msg_field!r}; use one name for both."
        )
    return function.name, function.out_field


def _named(function: Any) -> str:
    return repr(getattr(function, "name", function))


def message_has_parameters(param_fn: Callable[..., Any]) -> Callable[[Function], Function]:
    """Accept SAR's declaration of the parameters that a message function uses; autograd finds them by itself.

    Args:
        param_fn: ignored.

    Returns:
        A decorator that gives its function back as it is.
    """
    return lambda function: function
