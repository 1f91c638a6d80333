"""Counters of what was moved and how long it waited, for users to print."""

from dataclasses import astuple, dataclass, replace
from operator import sub


@dataclass
class Statistics:
    """What this worker moved since the process started.

    bytes_sent, bytes_received: payload of point-to-point messages and collectives, without headers.
    messages_sent: point-to-point messages.
    seconds_waited: time the main thread was blocked on other workers.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    seconds_waited: float = 0.0

    def __sub__(self, earlier: "Statistics") -> "Statistics":
        return Statistics(*map(sub, astuple(self), astuple(earlier)))


counters = Statistics()


def statistics() -> Statistics:
    """Return a snapshot of this worker's counters; subtract two snapshots to get what lies between them."""
    return replace(counters)
