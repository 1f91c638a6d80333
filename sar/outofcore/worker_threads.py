"""The threads of a process's virtual workers: started, watched, and interrupted together.

[Note: watching turns]
The main thread waits for the workers. Where no turn passes and the process does not compute, it says so after
`STALL_SECONDS`, with the stack of every worker, and ends them after half of `Config.timeout`, before other processes
give this one up: most likely one waits for a lock that another has kept across a distributed call. Ctrl-C reaches the
main thread, which ends the workers, too. A thread that does not end then is left behind with the process.
"""

import ctypes
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from sar.comm.liveness import STALL_SECONDS
from sar.config import Config
from sar.errors import CommunicationTimeout, PeerError
from sar.logging_setup import logger
from sar.outofcore.turns import Turns

POLL_SECONDS = 0.1
GRACE = 10.0
"""Seconds that the workers have to end after an error."""
BUSY = 0.05
"""Of a processor: what a process uses at least that computes."""


class WorkerThreads:
    """Runs `work(place)` in a thread for each of the workers that share the turns.

    Attributes:
        results: what each has returned.
        failures: what each has raised, by place.
    """

    def __init__(self, turns: Turns, work: Callable[[int], Any]) -> None:
        self.turns = turns
        self.work = work
        self.results: list[Any] = [None] * turns.size
        self.failures: dict[int, BaseException] = {}
        self._threads = [
            threading.Thread(target=self._run, args=(place,), name=f"sar-worker-{turns.first + place}", daemon=True)
            for place in range(turns.size)
        ]

    def run(self, others_work: Callable[[], bool] = lambda: False) -> None:
        """Run all workers to their end; see [Note: watching turns].

        Args:
            others_work: whether this process waits for another one, which takes as long as it takes.

        Raises:
            KeyboardInterrupt: after Ctrl-C.
        """
        for thread in self._threads:
            thread.start()
        try:
            self._watch(others_work)
        except KeyboardInterrupt:
            self.turns.fail(PeerError("Ctrl-C has ended the virtual workers."), now=True)
            self._interrupt()
            self._end()
            raise
        self._end()

    @property
    def first_failure(self) -> tuple[int, BaseException] | None:
        """The failure that is no echo of another one."""
        return min(self.failures.items(), key=lambda one: isinstance(one[1], PeerError), default=None)

    def _run(self, place: int) -> None:
        try:
            self.turns.begin(place)
            self.results[place] = self.work(place)
        except BaseException as error:
            self.failures[place] = error
            what = "".join(traceback.format_exception_only(error)).strip()
            self.turns.fail(PeerError(f"Virtual worker {self.turns.first + place} raised {what}"))
        finally:
            self.turns.end(place)

    def _watch(self, others_work: Callable[[], bool]) -> None:
        idle = reported = 0.0
        passes, used, before = self.turns.passes, time.process_time(), time.monotonic()
        while any(thread.is_alive() for thread in self._threads):
            time.sleep(POLL_SECONDS)
            if self.turns.ended_by is not None:
                return
            now, cpu = time.monotonic(), time.process_time()
            if self.turns.passes != passes or others_work() or cpu - used > BUSY * (now - before):
                idle = reported = 0.0
            else:
                idle += now - before
            passes, used, before = self.turns.passes, cpu, now
            if idle >= Config.timeout / 2:
                self.turns.fail(CommunicationTimeout(self._stuck(idle)), now=True)
            elif idle >= max(STALL_SECONDS, 2 * reported):
                reported = idle
                print(f"{self._stuck(idle)}\n{self._stacks()}", file=sys.stderr, flush=True)

    def _stuck(self, seconds: float) -> str:
        holder = self.turns.first + self.turns.holder
        return (
            f"Virtual worker {holder} has the turn, and has not computed for {seconds:.0f} s; the others wait. Perhaps "
            "it waits for a lock that another worker keeps across a distributed call: release locks before such calls. "
            f"Its latest call: {self.turns.latest[self.turns.holder]}"
        )

    def _stacks(self) -> str:
        """Where each worker is, the innermost call last."""
        frames = sys._current_frames()
        stacks = [(thread.name, frames.get(thread.ident or 0)) for thread in self._threads]
        return "".join(f"{name}:\n{''.join(traceback.format_stack(frame))}" for name, frame in stacks if frame)

    def _end(self) -> None:
        """Wait for the threads to end, but not for ever."""
        deadline = time.monotonic() + (GRACE if self.turns.ended_by is not None else float("inf"))
        for thread in self._threads:
            thread.join(max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX)))
        for place, thread in enumerate(self._threads):
            if thread.is_alive():
                error = self.turns.ended_by
                self.failures.setdefault(place, error if error is not None else PeerError("still running"))
                logger.error("virtual worker %d does not end, and is left behind", self.turns.first + place)

    @property
    def some_left(self) -> bool:
        """Whether threads have been left behind."""
        return any(thread.is_alive() for thread in self._threads)

    def _interrupt(self) -> None:
        """Raise KeyboardInterrupt in what the workers run."""
        for thread in self._threads:
            if thread.is_alive() and thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt)
                )


def end_process(status: int) -> None:
    """End a process in which a thread has been left behind."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
