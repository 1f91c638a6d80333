"""Who hears of distributed calls as they begin and end: the log at level DEBUG, and profiles."""

import logging
import time
from typing import Protocol

from sar.comm.statistics import statistics
from sar.logging_setup import logger

BACKWARD = "backward of "
"""How the text of a call in a backward begins; that of its forward follows."""
MOST_CHARACTERS = 200
"""Of a call in the log."""


class Listener(Protocol):
    """Hears of each call of this process; of one inside another, between the beginning and the end of that."""

    def begins(self, call: str) -> None:
        """A call begins, whose text workers compare."""

    def ends(self, call: str) -> None:
        """The latest call that has begun is over."""


listeners: list[Listener] = []


def followed() -> bool:
    """Whether anybody wants to hear of calls."""
    return bool(listeners) or logger.isEnabledFor(logging.DEBUG)


class FollowedCall:
    """One call, from its agreement on."""

    def __init__(self, call: str) -> None:
        self._call = call
        self._start, self._before = time.perf_counter(), statistics()
        for listener in listeners:
            listener.begins(call)

    def end(self) -> None:
        """Tell everybody that the call is over."""
        for listener in listeners:
            listener.ends(self._call)
        moved, seconds = statistics() - self._before, time.perf_counter() - self._start
        logger.debug(
            "%s: %.4f s, of which %.4f waiting; %d bytes sent, %d received",
            self._call.partition(", graph ")[0][:MOST_CHARACTERS],
            seconds,
            moved.seconds_waited,
            moved.bytes_sent,
            moved.bytes_received,
        )
