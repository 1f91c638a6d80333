"""The catalogue of bad inputs: what a user gets wrong, and what sar says to it, word for word.

Each file has `CASES` by name. Those in `fields` and `arguments` are calls on one worker; those in `set_up`,
`commands` and `directories` need no group, and take an empty folder that they are in.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Case(NamedTuple):
    """A call that must fail: what its error says, in which "..." stands for anything, and the kind of error."""

    call: Callable[..., Any]
    message: str
    error: str


class Printed(Exception):
    """What a command said before it ended with another status than 0."""
