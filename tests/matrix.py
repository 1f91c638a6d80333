"""Which cases run when: corners of matrices, which only `make test-all` runs, and what virtual workers cannot do."""

from typing import Any

import pytest

BACKGROUND = pytest.mark.processes("virtual workers refuse background processes")
"""For tests of `num_workers`."""


def corner(*values: Any) -> Any:
    """One case of `pytest.mark.parametrize`, marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)
