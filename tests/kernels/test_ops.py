"""Shapes of messages, and which values a derivative reads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sar.errors import GraphError
from tests.kernels.oracle import message_shape

SHAPES = st.lists(st.sampled_from([0, 1, 2, 3]), max_size=4).map(tuple)


@given(st.sampled_from(["add", "sub", "mul", "div"]), SHAPES, SHAPES)
def test_shapes_broadcast_as_in_numpy(op: str, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> None:
    try:
        expected = np.broadcast_shapes(lhs, rhs)
    except ValueError:
        with pytest.raises(GraphError) as error:
            message_shape(op, lhs, rhs)
        assert str(lhs) in str(error.value)
        assert str(rhs) in str(error.value)
    else:
        assert message_shape(op, lhs, rhs) == expected


@given(SHAPES, SHAPES, st.integers(0, 4))
def test_dot_reduces_the_last_dimension(lhs: tuple[int, ...], rhs: tuple[int, ...], width: int) -> None:
    try:
        expected = np.broadcast_shapes(lhs, rhs)
    except ValueError:
        with pytest.raises(GraphError, match="dot"):
            message_shape("dot", (*lhs, width), (*rhs, width))
    else:
        assert message_shape("dot", (*lhs, width), (*rhs, width)) == (*expected, 1)


def test_shapes_of_copies_and_of_dot_products_of_numbers() -> None:
    assert message_shape("copy_lhs", (2, 3), None) == (2, 3)
    assert message_shape("dot", (), ()) == ()
    with pytest.raises(GraphError, match=r"\(2, 3\) and \(2, 1\)"):
        message_shape("dot", (2, 3), (2, 1))
