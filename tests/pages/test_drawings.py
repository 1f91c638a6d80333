"""The pictures in docs/pictures/ are what tools/drawings.py makes, and pages show them."""

import pytest

from tests.pages.blocks import PAGES
from tools import drawings


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_pictures_are_what_the_code_makes(name: str) -> None:
    message = "draw it anew: python -m tools.drawings"
    assert (drawings.FOLDER / f"{name}.svg").read_text() == drawings.DRAWINGS[name](), message


def test_every_picture_is_on_a_page() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    assert [name for name in drawings.DRAWINGS if f"pictures/{name}.svg)" not in pages] == []
    assert {file.stem for file in drawings.FOLDER.iterdir()} == set(drawings.DRAWINGS)
