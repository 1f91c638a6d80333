"""What is written to a message and read again: exact, or rounded relative to the greatest number of the message."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sar.comm.rows import ALIGNMENT, FieldFormat, RowFormat

CPU = torch.device("cpu")
WIDE = [torch.float32, torch.float64]
HALF_DIGITS = {torch.float16: 2**-11, torch.bfloat16: 2**-8}


def travelled(columns, dtype):
    """The columns as they arrive, through a message that held other things before."""
    row, rows = RowFormat.of(columns).narrowed(dtype), len(columns[0])
    message = torch.full((row.layout(rows).nbytes,), 255, dtype=torch.uint8)
    for column, place in zip(columns, row.rows(message, rows), strict=True):
        place.write(column.clone())
    return [place.read(CPU, column.dtype) for column, place in zip(columns, row.rows(message, rows), strict=True)]


def numbers(dtype):
    info = torch.finfo(dtype)
    exponents = st.integers(-1073 if dtype == torch.float64 else -148, 1023 if dtype == torch.float64 else 127)
    return st.builds(
        lambda sign, digits, exponent: min(sign * digits * 2.0**exponent, info.max, key=abs),
        st.sampled_from([1, -1]),
        st.floats(1, 2, exclude_max=True),
        exponents,
    )


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@given(data=st.data())
def test_float16_keeps_its_digits_whatever_the_size_of_the_numbers(dtype, data):
    """Relative to each number, down to a 2^28th of the message's greatest; below, relative to that."""
    base = data.draw(numbers(dtype))
    shares = data.draw(st.lists(st.floats(-1, 1) | st.sampled_from([0.0, 2.0**-20, -(2.0**-40)]), max_size=12))
    sent = torch.tensor([base, *(base * share for share in shares)], dtype=torch.float64).to(dtype)
    (found,) = travelled([sent], torch.float16)
    peak = sent.abs().max().double()
    error = (found.double() - sent.double()).abs()
    digits = 2**-11 * (1 + 2**-12)  # float64 is rounded on its way through float32
    least = torch.finfo(dtype).smallest_normal * 2**-23  # the wide type's own end
    assert (error <= torch.clamp(sent.double().abs() * digits, min=max(float(peak) * 2**-39, least))).all()
    assert found.isfinite().all()


@pytest.mark.parametrize("wide", WIDE, ids=str)
@pytest.mark.parametrize("half", HALF_DIGITS, ids=str)
@pytest.mark.parametrize("factor", [1, 1e-8, 2.0**-130, 1e30])
def test_numbers_of_one_size(wide, half, factor):
    """A half precision's digits, for float16 although its own range is 6e-8 to 65504."""
    torch.manual_seed(0)
    sent = (torch.randn(50, 3, dtype=torch.float64) * factor).to(wide)
    (found,) = travelled([sent], half)
    assert found.dtype == wide
    if half is torch.bfloat16 and wide is torch.float32 and factor < 1e-38:
        assert (found - sent).abs().max() <= 2**-134  # of which float32's smallest are no part either
        return
    assert ((found - sent).abs() <= sent.abs() * HALF_DIGITS[half] * (1 + 2**-12) + 2**-39 * sent.abs().max()).all()
    assert not torch.equal(found, sent)


@pytest.mark.parametrize("half", HALF_DIGITS, ids=str)
@pytest.mark.parametrize("wide", WIDE, ids=str)
def test_infinities_and_nan_arrive_and_leave_the_others_alone(wide, half):
    sent = torch.tensor([[torch.inf, -torch.inf, torch.nan], [3e-9, -0.0, 2e-9]], dtype=wide)
    (found,) = travelled([sent], half)
    assert torch.equal(found[0, :2], sent[0, :2])
    assert found[0, 2].isnan()
    assert torch.allclose(found[1], sent[1], rtol=HALF_DIGITS[half], atol=0)
    for only in (torch.inf, -torch.inf, 0.0, -0.0):
        same = torch.full((2, 2), only, dtype=wide)
        (found,) = travelled([same], half)
        assert torch.equal(found, same)
        assert torch.equal(found.signbit(), same.signbit())


def test_each_field_has_its_own_scale():
    columns = [torch.full((3, 2), 1e-8), torch.full((3,), 1e8), torch.arange(3), torch.rand(3, 0)]
    found = travelled(columns, torch.float16)
    for value, column in zip(found, columns, strict=True):
        assert torch.allclose(value, column, rtol=2**-11, atol=0)


@pytest.mark.parametrize(
    "field, half, header",
    [
        (FieldFormat(torch.float32, (3,)), torch.float16, ALIGNMENT),
        (FieldFormat(torch.float64, (3,)), torch.float16, ALIGNMENT),
        (FieldFormat(torch.float64, (3,)), torch.bfloat16, ALIGNMENT),
        (FieldFormat(torch.float32, (3,)), torch.bfloat16, 0),  # of the same range
        (FieldFormat(torch.float16, (3,)), torch.float16, 0),
        (FieldFormat(torch.bfloat16, (3,)), torch.float16, 0),
        (FieldFormat(torch.int64, (3,)), torch.float16, 0),
        (FieldFormat(torch.float32, (0,)), torch.float16, 0),
    ],
    ids=str,
)
def test_what_a_message_takes(field, half, header):
    """Only fields that lose range have a scale; without narrowing there is none."""
    narrowed = RowFormat((field,)).narrowed(half)
    (kept,) = narrowed.fields
    size = -(-8 * prod(kept.shape) * kept.dtype.itemsize // ALIGNMENT) * ALIGNMENT
    assert narrowed.layout(8).nbytes == size + header
    assert RowFormat((field,)).narrowed(None).fields == (field,)
    assert not field.scaled
