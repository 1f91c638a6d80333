"""Time as it passes, and as processors spend it on this process."""

import resource
import time
from typing import NamedTuple


class Time(NamedTuple):
    """Seconds that pass, and those that processors spend on all threads of this process: on the program, and on the
    system for it."""

    wall: float
    user: float
    system: float

    @classmethod
    def now(cls) -> "Time":
        """Since any moment."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return cls(time.perf_counter(), usage.ru_utime, usage.ru_stime)

    def since(self) -> "Time":
        """From this moment to now."""
        return Time(*(now - then for now, then in zip(Time.now(), self, strict=True)))

    @property
    def processor(self) -> float:
        return self.user + self.system
