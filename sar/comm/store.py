"""The job's key-value store, with requests that are bounded in time.

[Note: a store that does not answer]
Requests to torch's store have no timeout. If the process that hosts it is frozen, or its host is gone, a request waits
for ever, and blocks all others over the same connection. So each request runs in a thread that is left behind if no
answer comes. At its end the interpreter waits a little for such threads, because an answer that comes during shutdown
would abort the process.
"""

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any, Final, TypeVar
from weakref import WeakSet

import torch.distributed as dist

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


def in_background(function: Callable[[], T]) -> Future[T]:
    """Run a function in a thread that may be left behind: see [Note: a store that does not answer]."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="sar-store", daemon=True)
    _threads.add(thread)
    thread.start()
    return future


def bounded(function: Callable[[], T], seconds: float) -> T:
    """The result of a function that makes requests; raises SilentStoreError if it takes longer than that."""
    running = in_background(function)
    futures.wait([running], seconds)
    if not running.done():
        raise SilentStoreError
    return running.result()


@atexit.register
def _wait_for_threads() -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    for thread in list(_threads):
        if thread.is_alive():  # not in a forked process
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


class JobStore:
    """A part of the job's store. All methods raise SilentStoreError, or RuntimeError if the store is gone."""

    def __init__(self, store: dist.Store, prefix: str) -> None:
        self._store = dist.PrefixStore(prefix, store)
        self._unanswered: Future[Any] | None = None  # the latest request, if it has had no answer in time

    def ask(self, question: Callable[[dist.Store], T]) -> T:
        """The store's answer: see [Note: a store that does not answer]."""
        if self._unanswered is None or self._unanswered.done():
            asking = in_background(lambda: question(self._store))
            futures.wait([asking], STORE_SECONDS)
            if asking.done():
                return asking.result()
            self._unanswered = asking
        raise SilentStoreError

    def write(self, key: str, text: str) -> None:
        """Set the value of a key."""
        self.ask(lambda store: store.set(key, text))

    def write_once(self, key: str, text: str) -> str:
        """Set the value of a key unless it has one; return its value."""
        return self.ask(lambda store: store.compare_set(key, "", text)).decode()

    def read(self, keys: Sequence[str], patience: float = 0.0) -> list[str | None]:
        """The values of these keys; waits up to `patience` seconds until all exist."""

        def values(store: dist.Store) -> list[str | None]:
            return [store.get(key).decode() if store.check([key]) else None for key in keys]

        deadline = time.monotonic() + patience
        while None in (texts := self.ask(values)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return texts

    def write_at_exit(self, key: str) -> None:
        """Set a key while the interpreter ends, when no thread can start. The store does not confirm it."""
        if self._unanswered is None or self._unanswered.done():  # else it would wait for the request before it
            self._store.set(key, "")
