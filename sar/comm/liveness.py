"""The thread that shows this worker's signs of life, watches those of its neighbour, and reports long waits.

[Note: signs of life]
A process that is frozen, or whose host has vanished, closes no connection: a wait for it would last for
`Config.timeout`. So every worker writes a sign into the store every few seconds, which says what it does, and watches
the sign of the next worker in the ring. Where that stays as it is for `SILENCE_SECONDS`, or the store itself is as
silent, the watcher ends the group as if it had failed itself: its connections close, its own waits end, and the news
travels from there.

No clocks are compared: the watcher counts its own rounds. A round counts for little even where it took long, so that
nobody is accused by a worker that was itself frozen, as when a whole job is suspended and goes on. A computation that
holds Python's lock all the time silences its process; compilations and writers of files hold it for fractions of a
second.
"""

import threading
import time
import weakref
from typing import Final, NamedTuple, Protocol

from sar.comm.board import Board, SilentStoreError
from sar.errors import PeerError
from sar.logging_setup import logger

BEAT_SECONDS = 3.0
"""Between two signs of life."""
SILENCE_SECONDS = 45.0
"""After which a worker without a new sign is given up; above what any computation may hold Python's lock for."""
STALL_SECONDS = 30.0
"""Length of a wait that is reported; then again at twice that, and so on."""
LEFT: Final = "has left"
"""The last sign of a worker that ends as it should."""


class Wait(NamedTuple):
    """What this worker waits for.

    call: the distributed call.
    who: the worker or workers that it depends on, in words.
    began: by this process's monotonic clock.
    """

    call: str
    who: str
    began: float

    def __str__(self) -> str:
        return f"waiting for {self.who} for {time.monotonic() - self.began:.0f} s in: {self.call}"


class Watched(Protocol):
    """What the thread needs of a group."""

    waiting: Wait | None
    final: bool

    @property
    def whereabouts(self) -> str: ...

    def abort(self, error: BaseException, *, final: bool = False) -> None: ...


class Liveness:
    """See [Note: signs of life]. Ends with its group."""

    def __init__(self, group: Watched, board: Board) -> None:
        self._group = weakref.ref(group)
        self._board = board
        self._end = threading.Event()
        self._neighbour = (board.rank + 1) % board.world_size
        self._sign: str | None = None  # the neighbour's
        self._silence = 0.0  # since then, in seconds of this thread's own rounds
        self._store_silent = False
        self._reported = 0.0  # seconds of the present wait that have been reported
        self._thread = threading.Thread(target=self._run, name="sar-liveness", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; says that this worker leaves."""
        self._end.set()
        self._thread.join(BEAT_SECONDS)
        try:
            self._board.show(LEFT)
        except RuntimeError:
            logger.debug("the store is gone")

    def _run(self) -> None:
        number, before = 0, time.monotonic()
        while True:
            group = self._group()
            if group is None or group.final:
                return
            try:
                self._board.show(f"{number} {group.whereabouts}")
                self._listen()
                self._report_stall(group)
            except RuntimeError:
                logger.debug("the store is gone, and with it all signs of life")
                return
            if self._silence >= SILENCE_SECONDS:
                self._give_up(group)
                return
            del group  # so that a group that nobody uses goes
            if self._end.wait(BEAT_SECONDS):
                return
            number, now = number + 1, time.monotonic()
            self._silence += min(now - before, 2 * BEAT_SECONDS)
            before = now

    def _listen(self) -> None:
        """Look for a new sign of the neighbour; one that has not shown any yet is not silent."""
        try:
            [sign] = self._board.signs([self._neighbour])
        except SilentStoreError:
            self._store_silent = True
            return
        self._store_silent = False
        if sign != self._sign or sign in (None, LEFT):
            self._sign, self._silence = sign, 0.0

    def _give_up(self, group: Watched) -> None:
        if self._store_silent:
            found = (
                f"The job's store has not answered worker {self._board.rank} for {SILENCE_SECONDS:g} s: the process "
                "that hosts it, usually worker 0, is frozen, or its host has vanished."
            )
        else:
            last = (self._sign or "").partition(" ")[2]
            found = (
                f"Worker {self._neighbour} has shown no sign of life for {SILENCE_SECONDS:g} s: its process is frozen "
                f"or dead, or its host has vanished. When last heard of, it was {last}"
            )
        group.abort(PeerError(found), final=True)

    def _report_stall(self, group: Watched) -> None:
        """Warn of a long wait, once per doubling."""
        wait = group.waiting
        seconds = 0.0 if wait is None else time.monotonic() - wait.began
        if seconds < self._reported:
            self._reported = 0.0  # another wait
        if seconds < max(STALL_SECONDS, 2 * self._reported):
            return
        self._reported = seconds
        try:
            signs = self._board.signs(range(self._board.world_size))
        except SilentStoreError:
            signs = ["? unknown, as the store does not answer"] * self._board.world_size
        others = [
            f"  worker {rank}: {'no sign of life yet' if sign is None else sign.partition(' ')[2]}"
            for rank, sign in enumerate(signs)
            if rank != self._board.rank
        ]
        logger.warning("worker %d is %s\n%s", self._board.rank, wait, "\n".join(others))
