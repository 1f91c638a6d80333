"""The pages list the layers and functions that tests compare with one machine."""

import pytest

from tests.parity.tables import TABLES, with_table


@pytest.mark.parametrize("name", TABLES)
def test_a_page_lists_what_is_compared(name):
    page, text = with_table(name)
    assert page.read_text() == text, "python -m tests.parity.tables writes it"
