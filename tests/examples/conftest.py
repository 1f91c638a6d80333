"""Fixtures of the tests of examples."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def double() -> Iterator[None]:
    """Parameters in float64, in this process as on the workers."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
