"""Counters of what was moved and how long it waited, for users to print."""

from dataclasses import dataclass, replace
from operator import add, sub


@dataclass
class Statistics:
    """What this worker moved since the process started.

    bytes_sent, bytes_received: payload of point-to-point messages and collectives, without headers; with virtual
        workers also the rows that they read of each other within a process.
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
