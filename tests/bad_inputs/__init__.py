"""The catalogue of bad inputs: what a user gets wrong, the kind of error, and what it names as the fault.

Each file has `CASES` by name. Those in `fields` and `arguments` are calls on one worker; those in `set_up`,
`commands` and `directories` need no group, and take an empty folder that they are in.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Case(NamedTuple):
    """A call that must fail: words of its error that name the thing at fault, and the kind of error."""

    call: Callable[..., Any]
    words: str
    error: str


class Printed(Exception):
    """What a command said before it ended with another status than 0."""
