"""Counters of what was moved and how long it waited, and who hears of distributed calls: the log and profiles."""

import logging
import time
from dataclasses import dataclass, replace
from operator import add, sub
from typing import Protocol

from sar.logging_setup import logger


@dataclass
class Statistics:
    """What this worker moved since the process started.

    bytes_sent, bytes_received: payload of point-to-point messages and collectives, without headers; where workers
        share a process, also the rows that they read of each other.
    messages_sent: point-to-point messages.
    seconds_waited: time the main thread was blocked on other workers.
    seconds_late: of which until all workers had come to a call; the rest, until messages had come.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    seconds_waited: float = 0.0
    seconds_late: float = 0.0

    def __sub__(self, earlier: "Statistics") -> "Statistics":
        return Statistics(*map(sub, vars(self).values(), vars(earlier).values()))

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(*map(add, vars(self).values(), vars(other).values()))


counters = Statistics()


def statistics() -> Statistics:
    """Return a snapshot of this worker's counters; subtract two snapshots to get what lies between them."""
    return replace(counters)


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
        name = self._call.partition(", graph ")[0][:MOST_CHARACTERS]
        told = name, seconds, moved.seconds_waited, moved.bytes_sent, moved.bytes_received
        logger.debug("%s: %.4f s, of which %.4f waiting; %d bytes sent, %d received", *told)
