"""Corners of test matrices: cases that only `make test-all` runs, because the others would show the same fault."""

from typing import Any

import pytest


def corner(*values: Any) -> Any:
    """One case of `pytest.mark.parametrize`, marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)
