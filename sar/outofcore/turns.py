"""The turns of the workers of a process, and the meetings at which the turn passes.

[Note: turns]
A distributed call is a meeting: it is complete when all V workers have arrived. The n-th meeting of one worker is the
n-th of every other. The last worker to arrive runs the part that involves other processes, and goes on without leaving
memory. At its next meeting the turn passes to the next worker, in the order of ranks, whose meeting is complete.

An error ends the meeting in which others wait. The turn still passes: each worker, in its turn, raises the error from
that meeting, or from its next one. If all workers catch it, they may `rejoin`, unless a worker has ended. It is also an
error if a worker returns while others wait for it. Only Ctrl-C and a worker that is stuck in its turn end all at once.

A thread that gets the turn wakes up on the processor of the thread before it: until it is awake, its affinity allows no
other. The system would choose an idle processor, whose caches are cold, and every processor that a process has used
must be interrupted when memory is unmapped.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sar.errors import CommunicationError, PeerError
from sar.outofcore.progress import Progress

_sched_getcpu = ctypes.CDLL(None).sched_getcpu  # number of this thread's processor


class Swapped(NamedTuple):
    """Getter and setter of a piece of process-wide state that belongs to the worker whose turn it is."""

    take: Callable[[], Any]
    put: Callable[[Any], None]
    begin: Callable[[Any], None] | None = None  # sets the initial value; None if `put` does


@dataclass
class _Meeting:
    """The n-th meeting of all workers: their contributions, and the result that the last to arrive computes."""

    kind: str
    first: int  # the first worker to arrive
    brought: list[Any]
    arrived: int = 0
    result: Any = None


class Turns:
    """Passes the turn among `size` threads at their meetings ([Note: turns]), and swaps `swapped` with it."""

    def __init__(self, size: int, first: int, swapped: Sequence[Swapped] = ()) -> None:
        self.size = size
        self.first = first  # the global rank of worker 0, for errors
        self.latest = ["no distributed call yet"] * size  # latest call of each worker, for errors
        self.passes = 0  # how often the turn has passed
        self.holder = 0
        self.progress = Progress(size, shown=first == 0)
        self._sleepers: dict[int, tuple[int, set[int]]] = {}  # waiting worker -> its thread, and its processors
        self._swapped = swapped
        self._at_start = [state.take() for state in swapped]
        lock = threading.RLock()
        self._moved = [threading.Condition(lock) for _ in range(size)]  # one each, to wake only the next worker
        self.ended_by: CommunicationError | None = None  # the error that ends all workers at once
        self._error: CommunicationError | None = None
        self._rejoined: set[int] = set()  # workers that have recovered from the error
        self._meetings: dict[int, _Meeting] = {}
        self._number = [0] * size  # number of each worker's latest meeting
        self._complete = 0
        self._ended: set[int] = set()

    @property
    def final(self) -> bool:
        """Whether there is an error from which the workers cannot recover."""
        return self.ended_by is not None or (self._error is not None and bool(self._ended))

    # -- the life of a worker's thread

    def begin(self, who: int) -> None:
        """Wait for the first turn, and restore the state of the process from before the first turn of all."""
        self._wait(who)
        for state, value in zip(self._swapped, self._at_start, strict=True):
            (state.begin or state.put)(value)
        self.progress.goes_on(0)
        if self.final:
            self._check(who)

    def end(self, who: int) -> None:
        """Leave the turns for good, and pass the turn on."""
        with self._moved[who]:
            self._ended.add(who)
            if self.holder == who:
                self._pass_on(who)

    def fail(self, error: CommunicationError, who: int | None = None, *, now: bool = False) -> None:
        """Make all workers raise an error, each in its turn or all of them now. A later error does not replace it."""
        with self._moved[0]:
            if self._error is None or who in self._rejoined:
                self._break(error)
            if now:
                self.ended_by = self.ended_by or error
                for condition in self._moved:
                    condition.notify()

    def rejoin(self, who: int) -> None:
        """Recover from an error: see [Note: turns]. Raises a PeerError if a worker has ended."""
        if self.final:
            raise PeerError(f"{self.ended_by or self._error}\n{self._gone}: start again, from a checkpoint.")
        self._rejoined.add(who)
        if len(self._rejoined) == self.size:
            self._error = None
            self._rejoined.clear()

    # -- meetings

    def meet(
        self,
        who: int,
        kind: str,
        brought: Any,
        finish: Callable[[list[Any]], Any],
        leave: Callable[[], None],
        *,
        afresh: bool = False,
    ) -> Any:
        """Meet all other workers of the process; the turn may pass. All get the same object, the result of `finish`.

        Args:
            kind: description of the meeting, equal on all workers.
            brought: this worker's contribution, which others read while this worker is out of memory.
            finish: called by the last worker to arrive, with the contributions of all, by rank.
            leave: called before the turn passes.
            afresh: if True, the turn begins with worker 0. Otherwise it stays with the last worker to arrive, which may
                differ between processes.
        """
        self._check(who)
        self._number[who] += 1
        number = self._number[who]
        meeting = self._meetings.setdefault(number, _Meeting(kind, who, [None] * self.size))
        if meeting.kind != kind:
            raise PeerError(
                f"Worker {self.first + who} is in {kind}, but worker {self.first + meeting.first} in "
                f"{meeting.kind}. Every worker must make the same calls in the same order."
            )
        meeting.brought[who] = brought
        meeting.arrived += 1
        last = meeting.arrived == self.size
        if last:
            meeting.result = finish(meeting.brought)
            self._complete = number
            del self._meetings[number]
            if not afresh or who == 0:
                return meeting.result
        leave()
        saved = [state.take() for state in self._swapped]
        with self._moved[who]:
            self._pass_on(self.size - 1 if last else who)
        self._wait(who)
        for state, value in zip(self._swapped, saved, strict=True):
            state.put(value)
        if number > self._complete:
            self._check(who)
        return meeting.result

    def turn(self, who: int) -> int:
        """Number of a worker's latest meeting."""
        return self._number[who]

    def _check(self, who: int) -> None:
        if self._error is not None and who not in self._rejoined:
            raise type(self._error)(str(self._error))

    def _break(self, error: CommunicationError) -> None:
        """End the open meeting, if there is one. The next meeting gets its number."""
        self._error = error
        self._rejoined.clear()
        self._meetings.clear()
        self._number = [self._complete] * self.size

    def _pass_on(self, who: int) -> None:
        """Pass the turn to the next worker that can run. If none can and some have not ended, set an error."""
        self.passes += 1
        following = [(who + step) % self.size for step in range(1, self.size + 1)]
        waiting = [other for other in following if other not in self._ended]
        able = [other for other in waiting if self._number[other] <= self._complete]
        if waiting and not able:
            calls = "\n".join(f"  worker {self.first + other}: {self.latest[other]}" for other in sorted(waiting))
            before = "" if self._error is None else f"\nBefore that: {self._error}"
            self._break(PeerError(f"{self._gone}, while others wait for it in a call:\n{calls}{before}"))
        self.holder = (able or waiting or [who])[0]
        thread, allowed = self._sleepers.get(self.holder, (0, set()))
        if (processor := _sched_getcpu()) in allowed:
            os.sched_setaffinity(thread, {processor})
        self._moved[self.holder].notify()

    @property
    def _gone(self) -> str:
        if self.ended_by is not None:
            return "All workers of the process have to end"
        ranks = ", ".join(str(self.first + other) for other in sorted(self._ended))
        return f"Worker{'s' * (len(self._ended) > 1)} {ranks} {'have' if len(self._ended) > 1 else 'has'} ended"

    def _wait(self, who: int) -> None:
        with self._moved[who]:
            allowed = os.sched_getaffinity(0)
            self._sleepers[who] = threading.get_native_id(), allowed
            while self.holder != who and self.ended_by is None:
                self._moved[who].wait()
            del self._sleepers[who]
        os.sched_setaffinity(0, allowed)
        if self.ended_by is not None:
            raise type(self.ended_by)(str(self.ended_by))
