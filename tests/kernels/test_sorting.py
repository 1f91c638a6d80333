"""Sorting by counting, digit by digit, as NumPy sorts."""

import numpy as np
import pytest
import torch

from sar.kernels.cpu import csr_view
from sar.kernels.cpu.csr_view import sorted_places


@pytest.mark.parametrize("bits", [2, 3, 22])
@pytest.mark.parametrize("count", [0, 1, 500])
@pytest.mark.parametrize("bound", [1, 8, 9, 100, 2**40])
def test_numbers_go_where_numpy_puts_them(monkeypatch, bits, count, bound):
    monkeypatch.setattr(csr_view, "DIGIT_BITS", bits)
    numbers = torch.randint(min(bound, 40), (count,), generator=torch.Generator().manual_seed(1)) * max(bound // 40, 1)
    numbers = numbers.to(torch.int32 if bound < 2**31 else torch.int64)
    places = sorted_places(numbers, bound)
    assert places.dtype == torch.int32
    assert places[torch.from_numpy(np.argsort(numbers.numpy(), kind="stable"))].tolist() == list(range(count))
