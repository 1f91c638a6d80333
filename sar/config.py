"""Global settings of the engine, read when a distributed call starts and kept for its backward."""

import difflib
import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from sar.errors import ConfigError


def _integer_from(least: int) -> tuple[Callable[[Any], bool], str]:
    return lambda value: isinstance(value, int) and type(value) is not bool and value >= least, (
        f"an integer of at least {least}"
    )


_SWITCH = (lambda value: isinstance(value, bool), "True or False")
_WIRE = (lambda value: value in (None, torch.bfloat16, torch.float16), "None, torch.bfloat16 or torch.float16")
_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "disable_sr": _SWITCH,
    "pipeline_depth": _integer_from(0),
    "max_collective_size": _integer_from(0),
    "comm_buffer_bytes": _integer_from(1),
    "allocator": (lambda value: value in ("auto", "least", "kept", "system"), "'auto', 'least', 'kept' or 'system'"),
    "wire_dtype_features": _WIRE,
    "wire_dtype_gradients": _WIRE,
    "check_replicas": _SWITCH,
    "patch_dgl": _SWITCH,
    "timeout": (
        lambda value: isinstance(value, int | float) and type(value) is not bool and value > 0,
        "a positive number of seconds",
    ),
}
"""What every setting accepts, and that in words."""


class _Checked(type):
    """A class whose attributes are settings: others, and values that make no sense, are refused where they are set.

    The settings are explained in its docstring, where each gets what it accepts and its default, for `help`.
    """

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> "_Checked":
        doc = namespace.get("__doc__") or ""  # none with python -OO
        for setting in _EXPECTED.keys() & namespace.keys():
            values = f"({_EXPECTED[setting][1]}; default: {namespace[setting]!r})"
            doc = doc.replace(f" {setting}: ", f" {setting} {values}:\n            ")
        return super().__new__(mcs, name, bases, namespace | {"__doc__": doc})

    def __setattr__(cls, name: str, value: Any) -> None:
        if name not in _EXPECTED:
            near = difflib.get_close_matches(name, _EXPECTED, 1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(_EXPECTED)}."
            raise ConfigError(f"There is no Config.{name}; {hint}")
        _check(name, value)
        super().__setattr__(name, value)


def _check(name: str, value: Any) -> None:
    accepts, expected = _EXPECTED[name]
    if not accepts(value):
        raise ConfigError(f"Config.{name} is {value!r}; expected {expected}.")


class Config(metaclass=_Checked):
    """Settings shared by all graphs of a process; set them alike on every worker.

    A distributed call compares them between workers and raises `DisagreementError` where they differ. Setting a name or
    a value that there is not raises `ConfigError`.

    Attributes:
        disable_sr: Mode 2 (SA): keep fetched rows for the backward instead of fetching them again.
        pipeline_depth: Tiles in flight while one is computed; 0 fetches and computes in turn.
        max_collective_size: Elements in one message at most; 0 means unlimited. Tiles never get smaller than one row.
        comm_buffer_bytes: Bytes that all exchange buffers of a worker together may take in modes 1 and 2 (kept rows not
            counted).
        allocator: What `initialize_comms` has glibc's allocator do with freed memory: "least" gives it back, "kept"
            keeps it, which is faster for mini-batches, "auto", the default, keeps it from the first `DataLoader` on,
            "system" changes nothing. The environment variable SAR_ALLOCATOR sets another default. Ignored where
            GLIBC_TUNABLES or a MALLOC_ variable is set, or another allocator is loaded.
        wire_dtype_features: Round features to this on their way between workers; sums are kept in float32. float16 is
            scaled by the greatest number of each message, so that neither large nor small ones leave its range. None is
            exact.
        wire_dtype_gradients: As `wire_dtype_features`, for gradients on their way back.
        check_replicas: Compare the workers' models after steps of torch's optimizers, bit for bit; a difference is an
            error. Turn it off on all workers where models are meant to differ, or where hosts with different processors
            round differently.
        patch_dgl: Call `sar.patch_dgl` wherever a distributed graph is made while DGL is imported; False leaves DGL as
            it is.
        timeout: Seconds that one wait for other workers may take. A peer's death is noticed at once, whatever this
            says.
    """

    disable_sr: ClassVar[bool] = False
    pipeline_depth: ClassVar[int] = 1
    max_collective_size: ClassVar[int] = 0
    comm_buffer_bytes: ClassVar[int] = 32 * 2**20
    allocator: ClassVar[str] = os.environ.get("SAR_ALLOCATOR", "auto")
    wire_dtype_features: ClassVar[torch.dtype | None] = None
    wire_dtype_gradients: ClassVar[torch.dtype | None] = None
    check_replicas: ClassVar[bool] = True
    patch_dgl: ClassVar[bool] = True
    timeout: ClassVar[float] = 1800.0

    @classmethod
    def validate(cls) -> None:
        """Raise `ConfigError` where a setting, such as one from the environment, is none that sar knows."""
        for name in _EXPECTED:
            _check(name, getattr(cls, name))
