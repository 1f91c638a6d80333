"""The job's store: bounded requests, and the notes, calls and signs of life that workers leave there.

[Note: a store that does not answer]
Requests to torch's store have no timeout. If the process that hosts it is frozen, or its host is gone, a request waits
for ever, and blocks all others over the same connection. So each request runs in a thread that is left behind if no
answer comes. At its end the interpreter waits a little for such threads, because an answer that comes during shutdown
would abort the process.
"""

import atexit
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakSet

import torch.distributed as dist

from sar.logging_setup import logger

T = TypeVar("T")

STORE_SECONDS = 5.0
"""Time limit for an answer of the store."""
HEARD_SECONDS: Final = 3.0
"""Time for which a process that hosts the store keeps it after an error, so that the others can read of it."""
EXIT_SECONDS: Final = HEARD_SECONDS + 2.0
"""Time for unanswered requests at the end of the process. They fail when the host of the store has ended."""
PATIENCE = 3.0
"""Seconds to wait for a text that a peer writes at about the same time, such as before it closes its connections."""
POLL_SECONDS: Final = 0.02
LEFT: Final = "has left"
"""The last sign of a worker that ends without an error."""


class SilentStoreError(RuntimeError):
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


@atexit.register
def _wait_for_threads() -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    for thread in list(_threads):
        if thread.is_alive():  # not in a forked process
            thread.join(max(0.0, deadline - time.monotonic()))


@dataclass(eq=False)
class BoundedStore:
    """A store whose requests are bounded, as all go through `ask`: see [Note: a store that does not answer]."""

    _store: dist.Store
    _seconds: float | None = None  # for an answer; None for `STORE_SECONDS`
    _unanswered: Future[Any] | None = None  # the latest request, if it has had no answer in time

    def ask(self, question: Callable[[dist.Store], T]) -> T:
        """The store's answer; raises SilentStoreError if it does not come in time."""
        if self._unanswered is not None and not self._unanswered.done():
            raise SilentStoreError
        asking = in_background(lambda: question(self._store))
        futures.wait([asking], self._seconds or STORE_SECONDS)
        if not asking.done():
            self._unanswered = asking
            raise SilentStoreError
        return asking.result()

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

    def absent(self, keys: Sequence[str]) -> list[int]:
        """Positions of the keys that do not exist."""
        if self.ask(lambda store: store.check(list(keys))):  # one question for all, however many workers there are
            return []
        return [position for position, text in enumerate(self.read(keys)) if text is None]


class Note(NamedTuple):
    """The reason why a worker gave up. The group cannot recover from a `final` note."""

    reason: str
    final: bool


class StoreNotes(BoundedStore):
    """One worker's view of the job's store, over a connection of its own if torch can make one.

    Methods raise RuntimeError if the store is gone or silent. `name` returns the name of a worker, for errors.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, name: Callable[[int], str]) -> None:
        self.rank, self.world_size, self.name = rank, world_size, name
        own = store.clone() if world_size > 1 and hasattr(store, "clone") else store
        super().__init__(dist.PrefixStore("sar", own))

    def leave_note(self, generation: int, reason: str, *, final: bool) -> None:
        """Write the reason why this worker gives up, unless the generation already has a note."""
        try:
            self.write_once(f"{generation}/note", json.dumps(Note(reason, final)))
        except RuntimeError:
            logger.warning("the store is gone; other workers will see only closed connections")

    def read_note(self, generation: int, patience: float = 0.0) -> Note | None:
        """The first note of a generation, if one appears within `patience` seconds."""
        [text] = self.read([f"{generation}/note"], patience)
        return None if text is None else Note(*json.loads(text))

    def whereabouts(self, generation: int, number: int, call: str) -> str:
        """Report this worker's call; return the calls that the others report within `PATIENCE`, a line for each."""
        keys = [f"{generation}/at/{number}/{rank}" for rank in range(self.world_size)]
        try:
            self.write(keys[self.rank], call)
            calls = self.read(keys, PATIENCE)
            gone = ["has ended" if sign == LEFT else "no answer" for sign in self.signs(range(self.world_size))]
        except RuntimeError:
            return "  the store cannot be reached: the process that hosts it, usually worker 0, has ended or is frozen"
        return "\n".join(f"  {self.name(rank)}: {current or gone[rank]}" for rank, current in enumerate(calls))

    def show_last(self) -> None:
        """Show that this worker ends without an error. `ask` cannot start a thread while the interpreter ends."""
        self._store.set(f"sign/{self.rank}", LEFT)

    def signs(self, ranks: Sequence[int]) -> list[str | None]:
        """The latest signs of life of these workers; None for those that have not shown any."""
        return self.read([f"sign/{rank}" for rank in ranks])
