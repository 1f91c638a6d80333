"""Global settings of the engine. A distributed call reads them when it starts, and its backward uses the same ones."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from sar.errors import ConfigError

if TYPE_CHECKING:
    import torch


def _is_number(value: Any, kind: Any = int) -> bool:
    return isinstance(value, kind) and type(value) is not bool


_SWITCH = (lambda value: isinstance(value, bool), "True or False")
_COUNT = (lambda value: _is_number(value) and value >= 0, "an integer of at least 0")
_WIRE = (lambda value: value is None or str(value) == "torch.bfloat16", "None or torch.bfloat16")
_ACCEPTED: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "disable_sr": _SWITCH,
    "pipeline_depth": _COUNT,
    "max_collective_size": _COUNT,
    "comm_buffer_bytes": (lambda value: _is_number(value) and value >= 1, "an integer of at least 1"),
    "allocator": (lambda value: value in ("auto", "least", "kept", "system"), "'auto', 'least', 'kept' or 'system'"),
    "wire_dtype_features": _WIRE,
    "wire_dtype_gradients": _WIRE,
    "check_replicas": _SWITCH,
    "patch_dgl": _SWITCH,
    "timeout": (lambda value: _is_number(value, int | float) and value > 0, "a positive number of seconds"),
}


class GlobalConfig:
    """Settings shared by all graphs of a process, as `sar.Config`. Set them alike on every worker.

    A distributed call compares them between workers and raises `DisagreementError` if they differ. Setting an unknown
    name or a value that is not accepted raises `ConfigError`.

    Attributes:
        disable_sr (True or False; default False):
            Mode 2 (SA): keep fetched rows for the backward instead of fetching them again.
        pipeline_depth (an integer of at least 0; default 1):
            Tiles in flight while one is computed; 0 fetches and computes in turn.
        max_collective_size (an integer of at least 0; default 0):
            Largest number of elements in one message; 0 means unlimited. A tile has at least one row.
        comm_buffer_bytes (an integer of at least 1; default 33554432):
            Bytes that all exchange buffers of a worker together may take in modes 1 and 2. Kept rows do not count.
        allocator ('auto', 'least', 'kept' or 'system'; default 'auto'):
            Policy of glibc's allocator for freed memory, which `initialize_comms` sets. "least" returns it to the
            system; "kept" keeps it, which is faster for mini-batches; "auto" keeps it from the first `DataLoader` on;
            "system" changes nothing. The environment variable SAR_ALLOCATOR changes the default. Ignored if
            GLIBC_TUNABLES or a MALLOC_ variable is set, or another allocator is loaded.
        wire_dtype_features (None or torch.bfloat16; default None):
            Round features to this dtype on their way between workers; sums are kept in float32. None is exact.
        wire_dtype_gradients (None or torch.bfloat16; default None):
            The same for gradients on their way back.
        check_replicas (True or False; default True):
            Compare the workers' models bit for bit after optimizer steps, and raise if they differ. Disable it on all
            workers if models should differ, or if hosts with different processors round differently.
        patch_dgl (True or False; default True):
            Call `sar.patch_dgl` whenever a distributed graph is created and DGL is imported.
        timeout (a positive number of seconds; default 600.0):
            Longest wait for other workers. The death of a worker is noticed at once, regardless of the timeout. After
            the timeout, the error names workers that are frozen or whose host is unreachable.
    """

    disable_sr: bool = False
    pipeline_depth: int = 1
    max_collective_size: int = 0
    comm_buffer_bytes: int = 32 * 2**20
    allocator: str = os.environ.get("SAR_ALLOCATOR", "auto")
    wire_dtype_features: torch.dtype | None = None
    wire_dtype_gradients: torch.dtype | None = None
    check_replicas: bool = True
    patch_dgl: bool = True
    timeout: float = 600.0

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _ACCEPTED:
            near = difflib.get_close_matches(name, _ACCEPTED, 1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(_ACCEPTED)}."
            raise ConfigError(f"There is no Config.{name}; {hint}")
        accepts, expected = _ACCEPTED[name]
        if not accepts(value):
            raise ConfigError(f"Config.{name} is {value!r}; expected {expected}.")
        super().__setattr__(name, value)

    def validate(self) -> None:
        """Raise `ConfigError` if a default is invalid, as the environment variable of `allocator` may be."""
        for name in _ACCEPTED:
            setattr(self, name, getattr(self, name))


Config: Final = GlobalConfig()
"""The settings of this process: `sar.Config.timeout = 60`."""
