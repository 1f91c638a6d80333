"""Rows that are written to a message and read again: exact, or rounded to bfloat16."""

import pytest
import torch

from sar.comm.rows import RowFormat

WIDE = [torch.float32, torch.float64]


def travelled(column):
    """A column as it arrives in bfloat16, through a message that held other things before."""
    row = RowFormat.of([column], torch.bfloat16)
    message = torch.full((row.layout(len(column)).nbytes,), 255, dtype=torch.uint8)
    (place,) = row.layout(len(column)).views(message)
    place.copy_(column)
    return place.to(column.dtype)


@pytest.mark.parametrize("wide", WIDE, ids=str)
@pytest.mark.parametrize("factor", [1, 1e-8, 2.0**-100, 1e30])
def test_numbers_of_any_size_keep_their_digits(wide, factor):
    torch.manual_seed(0)
    sent = (torch.randn(50, 3, dtype=torch.float64) * factor).to(wide)
    found = travelled(sent)
    assert found.dtype == wide
    assert ((found - sent).abs() <= sent.abs() * 2**-8).all()
    assert not torch.equal(found, sent)


@pytest.mark.parametrize("wide", WIDE, ids=str)
def test_infinities_and_nan_arrive_and_leave_the_others_alone(wide):
    sent = torch.tensor([[torch.inf, -torch.inf, torch.nan], [3e-9, -0.0, 2e-9]], dtype=wide)
    found = travelled(sent)
    assert torch.equal(found[0, :2], sent[0, :2])
    assert found[0, 2].isnan()
    assert torch.allclose(found[1], sent[1], rtol=2**-8, atol=0)
    assert found[1, 1].signbit()
