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


@dataclass(frozen=True)
class Reduction:
    """A built-in reducer and the name of what it makes."""

    reducer: str
    out_field: str


def parse_message(function: Any) -> Message:
    """Read a message function of `dgl.function`.

    Raises:
        GraphError: for anything that is not one.
    """
    if hasattr(function, "binary_op"):
        lhs = Operand(Target(function.lhs), function.lhs_field)
        rhs = Operand(Target(function.rhs), function.rhs_field)
        return Message(Op(function.binary_op), lhs, rhs, function.out_field)
    if hasattr(function, "in_field") and hasattr(function, "target"):
        return Message(Op.COPY, Operand(Target(function.target), function.in_field), None, function.out_field)
    raise GraphError(
        f"{_named(function)} is not a built-in message function; only those of dgl.function are supported so far."
    )


def parse_reduction(function: Any, message: Message) -> Reduction:
    """Read a reducer of `dgl.function` that reduces what `message` makes.

    Raises:
        GraphError: for anything that is not one, or that reads another field.
    """
    if not hasattr(function, "msg_field") or getattr(function, "name", None) not in REDUCERS:
        raise GraphError(
            f"{_named(function)} is not a built-in reducer; of those in dgl.function, {', '.join(REDUCERS)} are "
            "supported so far."
        )
    if function.msg_field != message.out_field:
        raise GraphError(
            f"The message function makes {message.out_field!r}, but the reducer reads {function.msg_field!r}; "
            "give both the same name."
        )
    return Reduction(function.name, function.out_field)


def _named(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def message_has_parameters(param_fn: Callable[..., Any]) -> Callable[[Function], Function]:
    """Accept SAR's declaration of the parameters that a message function uses; autograd finds them by itself.

    Args:
        param_fn: ignored.

    Returns:
        A decorator that gives its function back as it is.
    """
    return lambda function: function
