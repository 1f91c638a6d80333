"""Which cases run when: corners of matrices, which only `make test-all` runs, and what virtual workers cannot do."""

from typing import Any

import pytest

THREAD = pytest.mark.processes("virtual workers refuse to sample in a thread")
"""For tests of `num_workers`."""


def corner(*values: Any) -> Any:
    """One case of `pytest.mark.parametrize`, marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)
