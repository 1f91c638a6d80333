"""Global settings of the engine, read when a distributed call starts and kept for its backward."""

import os
from typing import ClassVar

import torch

from sar.errors import ConfigError


class Config:
    """Settings shared by all graphs of a process; set them alike on every worker.

    A distributed call compares them between workers and raises `DisagreementError` where they differ.
    """

    disable_sr: ClassVar[bool] = False
    """Mode 2 (SA): keep fetched rows for the backward instead of fetching them again."""

    pipeline_depth: ClassVar[int] = 1
    """Tiles in flight while one is computed; 0 fetches and computes in turn."""

    max_collective_size: ClassVar[int] = 0
    """Elements in one message at most; 0 means unlimited. Tiles never get smaller than one row."""

    comm_buffer_bytes: ClassVar[int] = 32 * 2**20
    """Bytes that all exchange buffers of a worker together may take in modes 1 and 2 (kept rows not counted)."""

    allocator: ClassVar[str] = os.environ.get("SAR_ALLOCATOR", "least")
    """What `initialize_comms` has glibc's allocator do with freed memory: "least" gives it back, "kept" keeps it, which
    is faster for mini-batches, "system" changes nothing. The default is taken from the environment variable
    SAR_ALLOCATOR. Ignored where GLIBC_TUNABLES or a MALLOC_ variable is set, or another allocator is loaded."""

    cache_constant_inputs: ClassVar[bool] = False
    """Keep what built-in `update_all`s made of operands that need no gradient, such as the input features, and take it
    again as long as all workers pass the same unchanged tensors, or tensors of equal content, such as a layer's scaled
    input. Costs the memory of these results, which the calls then share: do not change them in place; and of a copy of
    operands that are another tensor each time, for at most 8 contents a relation."""

    wire_dtype_features: ClassVar[torch.dtype | None] = None
    """torch.bfloat16 or torch.float16: round features to it on their way between workers; sums are kept in float32.
    None (the default) is exact."""

    wire_dtype_gradients: ClassVar[torch.dtype | None] = None
    """As `wire_dtype_features`, for gradients on their way back."""

    timeout: ClassVar[float] = 1800.0
    """Seconds that one wait for other workers may take. A peer's death is noticed at once, whatever this says."""

    @classmethod
    def validate(cls) -> None:
        """Raise `ConfigError` where a setting is out of range."""
        bounds = {"pipeline_depth": 0, "max_collective_size": 0, "comm_buffer_bytes": 1}
        for name, least in bounds.items():
            value = getattr(cls, name)
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"Config.{name} is {value!r}; expected an integer of at least {least}.")
        for name in ("wire_dtype_features", "wire_dtype_gradients"):
            value = getattr(cls, name)
            if value not in (None, torch.bfloat16, torch.float16):
                raise ConfigError(f"Config.{name} is {value!r}; expected None, torch.bfloat16 or torch.float16.")
        if cls.allocator not in ("least", "kept", "system"):
            raise ConfigError(f"Config.allocator is {cls.allocator!r}; expected 'least', 'kept' or 'system'.")
        if not cls.timeout > 0:
            raise ConfigError(f"Config.timeout is {cls.timeout!r}; expected a positive number of seconds.")
