"""`sar.print`, for worker 0, and `sar.seed`, for all workers."""

import builtins
import random
from typing import Any

import numpy as np
import torch

from sar.comm import session
from sar.errors import ConfigError


def print(*values: Any, **options: Any) -> None:
    """Python's `print` on worker 0 only, with flushing. Not a collective call."""
    if session.rank() == 0:
        builtins.print(*values, **{"flush": True, **options})


def seed(n: int) -> None:
    """Seed the random generators of torch (including CUDA), numpy and Python. Not a collective call.

    Worker 0 uses n, so after `sync_params` a model starts as after `torch.manual_seed(n)` on one machine. Other workers
    derive their seed from n and the rank, so dropout and samples differ.

    Args:
        n: from 0 to 2**32 - 1, the same on all workers.

    Raises:
        ConfigError: for another n.
    """
    if not 0 <= n < 2**32:
        raise ConfigError(f"seed got {n}; expected 0 to 2**32 - 1, which all generators take.")
    rank = session.rank()
    own = n if rank == 0 else int(np.random.SeedSequence((n, rank)).generate_state(1)[0])
    torch.manual_seed(own)
    np.random.seed(own)  # noqa: NPY002  user code may draw from it
    random.seed(own)
