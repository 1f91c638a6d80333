"""Counters of traffic and waiting times, and the listeners to distributed calls: the log and profiles."""

import time
from dataclasses import dataclass, replace
from operator import add, sub
from typing import Protocol

from sar.logging_setup import logger


@dataclass
class Statistics:
    """This worker's traffic and waiting times since the process started.

    bytes_sent, bytes_received: payload of point-to-point messages and collectives, without headers. Includes rows that
        workers in one process read from each other.
    messages_sent: number of point-to-point messages.
    seconds_waited: time the main thread was blocked on other workers.
    seconds_late: the part of `seconds_waited` before other workers reached a call; the rest is waiting for messages.
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
    """Return a snapshot of this worker's counters. Subtract two snapshots to measure an interval."""
    return replace(counters)


BACKWARD = "backward of "
"""Prefix of the text of a call in a backward; the text of its forward follows."""
MOST_CHARACTERS = 200
"""Characters of a call in the log."""


class Listener(Protocol):
    """Callbacks for each call of this process. Calls may be nested."""

    def begins(self, call: str) -> None:
        """Called when a call begins, with the text that workers compare."""

    def ends(self, call: str) -> None:
        """Called when the latest call that has begun ends."""


listeners: list[Listener] = []


class FollowedCall:
    """Tells listeners of one call, and logs its traffic and waiting times at its end."""

    def __init__(self, call: str) -> None:
        self._call = call
        self._start, self._before = time.perf_counter(), statistics()
        for listener in listeners:
            listener.begins(call)

    def end(self) -> None:
        """Tell listeners and the log that the call has ended."""
        for listener in listeners:
            listener.ends(self._call)
        moved, seconds = statistics() - self._before, time.perf_counter() - self._start
        name = self._call.partition(", graph ")[0][:MOST_CHARACTERS]
        entry = name, seconds, moved.seconds_waited, moved.bytes_sent, moved.bytes_received
        logger.debug("%s: %.4f s, of which %.4f waiting; %d bytes sent, %d received", *entry)
