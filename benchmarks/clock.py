"""Time as it passes, and as processors spend it on this process."""

import time
from typing import NamedTuple


class Time(NamedTuple):
    """Seconds that pass, and those that processors spend on all threads of this process, in the system too."""

    wall: float
    processor: float

    @classmethod
    def now(cls) -> "Time":
        """Since any moment."""
        return cls(time.perf_counter(), time.process_time())

    def since(self) -> "Time":
        """From this moment to now."""
        return Time(*(now - then for now, then in zip(Time.now(), self, strict=True)))
