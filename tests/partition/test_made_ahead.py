"""One thread makes the next item while another uses the last one."""

import threading

import pytest

from sar.partition.assign.external_csr import made_ahead


def test_items_are_the_same_and_come_in_order():
    assert list(made_ahead(iter(range(5)))) == [0, 1, 2, 3, 4]
    assert list(made_ahead(iter([]))) == []


def test_the_next_item_is_made_while_one_is_in_use():
    second_begun = threading.Event()

    def items():
        yield "first"
        second_begun.set()
        yield "second"

    for item in made_ahead(items()):
        assert second_begun.wait(60), item


def test_an_error_reaches_who_takes_the_items():
    def items():
        yield 1
        raise ValueError("no more")

    made = made_ahead(items())
    assert next(made) == 1
    with pytest.raises(ValueError, match="no more"):
        next(made)
