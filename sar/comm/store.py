"""Waits for the job's key-value store, in bounded time.

[Note: a store that does not answer]
Requests to torch's store have no timeout. If the process that hosts it is frozen, or its host is gone, a request waits
forever, and blocks all others over the same connection. So requests run in a thread that is abandoned if no answer
comes. The interpreter briefly waits for such threads at exit, because an answer during shutdown would abort the
process.
"""

import atexit
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import Final, TypeVar
from weakref import WeakSet

from sar.errors import CommunicationTimeout
from sar.logging_setup import logger

T = TypeVar("T")

STORE_SECONDS = 5.0
"""Time limit for an answer of the store."""
HEARD_SECONDS: Final = 3.0
"""Time for which a process that hosts the store keeps it after an error, so that the others can read of it."""
EXIT_SECONDS: Final = HEARD_SECONDS + 2.0
"""Time for unanswered requests at the end of the process. They fail when the host of the store has ended."""
POLL_SECONDS: Final = 0.02
REPORT_SECONDS = 30.0
"""Length of a wait at which it is reported for the first time, and again each time it has doubled."""


class SilentStoreError(RuntimeError, TimeoutError):
    """The store does not answer, though it can be reached."""

    def __init__(self) -> None:
        why = "the process that hosts it, usually worker 0, is frozen, or its host has vanished."
        super().__init__(f"The job's store does not answer: {why}")


_threads: Final[WeakSet[threading.Thread]] = WeakSet()


def bounded(function: Callable[[], T], seconds: float = STORE_SECONDS) -> T:
    """The result of a function that makes requests; raises SilentStoreError if it takes longer than that."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="sar-store", daemon=True)
    _threads.add(thread)
    thread.start()
    futures.wait([future], seconds)
    if not future.done():
        raise SilentStoreError
    return future.result()


def unanswered() -> list[threading.Thread]:
    """Threads that wait for an answer of the store."""
    return [thread for thread in list(_threads) if thread.is_alive()]  # none in a forked process


@atexit.register
def _wait_for_threads() -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    for thread in unanswered():
        thread.join(max(0.0, deadline - time.monotonic()))


def poll(look: Callable[[], T | None], rank: int, what: Callable[[], str], seconds: float) -> T:
    """Call `look` until it returns anything but None and raises no OSError. Warns of long waits.

    Raises CommunicationTimeout after `seconds`. `look` itself has to return soon.
    """
    began, report_at, found = time.monotonic(), REPORT_SECONDS, ""
    while True:
        try:
            if (result := look()) is not None:
                return result
            found = ""
        except OSError as error:
            found = f" ({error.strerror or error})"
        waited = time.monotonic() - began
        if waited > seconds:
            raise CommunicationTimeout(
                f"Worker {rank} waited {seconds:g} s (at most Config.timeout) for {what()}{found}. Check that all "
                "workers run, with the same address, port, number of workers and SAR_JOB_ID, if that is set."
            )
        if waited >= report_at:
            report_at = 2 * waited
            logger.warning("Worker %d has waited %.0f s for %s%s", rank, waited, what(), found)
        time.sleep(min(max(waited / 20, POLL_SECONDS), 20 * POLL_SECONDS))
