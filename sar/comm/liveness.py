"""The thread that shows this worker's signs of life, watches those of its neighbour, and reports long waits.

[Note: signs of life]
A process that is frozen, or whose host has vanished, closes no connection: a wait for it would last for
`Config.timeout`. So every worker writes a sign, a text with its present call, into the store every few seconds, and
watches the sign of the next worker in the ring. If that sign does not change for `SILENCE_SECONDS`, or if the store
does not answer for as long, the watcher ends the group as if it had failed itself. Other workers may wait only for the
frozen one, whose connections stay open, so all look for notes, too.

Clocks are not compared: the watcher counts its own rounds. A long round counts as a short one, because the watcher may
itself have been frozen, as when a whole job is suspended and resumed.

A long call into C may hold Python's lock, so that no thread can show a sign. So the watcher asks a silent neighbour
over their connection. Every worker has posted sends to its watcher beforehand, and the transport's own thread, which
needs no lock, completes one for each receive that the watcher posts. In a frozen process that thread stops, too.
"""

import atexit
import contextlib
import threading
import time
import weakref
from typing import Any, Final

import torch
from torch import Tensor

from sar.comm.store_notes import LEFT, SilentStoreError, StoreNotes
from sar.comm.transport import Member, Message, Transport
from sar.logging_setup import logger

BEAT_SECONDS = 3.0
"""Interval between two signs of life."""
SILENCE_SECONDS = 120.0
"""Time without a new sign after which a worker is given up. It is asked after half of this time."""
ANSWERS: Final = 500
"""Sends that a worker posts beforehand, enough for hours with Python's lock held."""
ANSWER_TAG: Final = 2**31 - 2
STALL_SECONDS = 30.0
"""Length of a wait at which it is reported for the first time, and again each time it has doubled."""


class Answers:
    """Questions to the neighbour, and answers to the watcher, by the transport's threads: see [Note: signs of life].

    Create one right after the transport connects. Posted tensors stay alive until the connections close, as gloo needs.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._watcher = (transport.rank - 1) % transport.world_size
        self._neighbour = (transport.rank + 1) % transport.world_size
        self._posted: list[Any] = []
        self._answer: Tensor | None = None  # becomes 1 when the neighbour answers; None if it has not been asked
        self.offer(ANSWERS)

    def offer(self, count: int) -> None:
        """Post `count` more answers to questions of the watcher."""
        for _ in range(count):
            answer = torch.ones(1, dtype=torch.uint8, device="cpu")
            self._posted.append((answer, self._transport.post(None, Message(self._watcher, answer), ANSWER_TAG)))

    def heard(self, *, ask: bool) -> bool:
        """Whether the neighbour has answered the last question. If it has not been asked, and `ask`, ask it now."""
        if self._answer is not None and self._answer.item():
            self._answer = None
            return True
        if ask and self._answer is None:
            self._answer = torch.zeros(1, dtype=torch.uint8, device="cpu")
            posted = self._transport.post(Message(self._neighbour, self._answer), None, ANSWER_TAG)
            self._posted.append((self._answer, posted))
        return False


class Liveness:
    """The thread of [Note: signs of life]; it ends with its group. `answers` use the group's current connections."""

    def __init__(self, group: Member, notes: StoreNotes) -> None:
        self.answers: Answers | None = None
        self._group = weakref.ref(group)
        self._notes = notes
        self._neighbour = (notes.rank + 1) % notes.world_size
        self._end = threading.Event()
        self._sign: str | None = None  # latest sign of the neighbour
        self._silence = 0.0  # time since that sign, in seconds of this thread's own rounds
        self._reported = 0.0  # length of this worker's wait when it was last reported
        self._thread = threading.Thread(target=self._run, name="sar-liveness", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """End the thread, which shows a last sign that this worker leaves. Runs at exit at the latest."""
        atexit.unregister(self.close)
        if self._thread.is_alive():  # not in a forked process
            self._end.set()
            self._thread.join(BEAT_SECONDS)

    def _run(self) -> None:
        round_seconds, began, name = 0.0, time.monotonic(), self._notes.name
        while (group := self._group()) is not None and not group.final:
            try:
                self._exchange(group, f"{began} {group.whereabouts}", round_seconds)
                reason = (
                    f"{name(self._neighbour).capitalize()} has shown no sign of life for {SILENCE_SECONDS:g} s: its "
                    "process is frozen or dead, or its host has vanished. When last heard of, it was "
                    f"{(self._sign or '').partition(' ')[2]}"
                )
            except SilentStoreError as error:
                reason = str(error)
            except RuntimeError:
                if self._end.wait(2 * BEAT_SECONDS):  # let an error of a lost connection, which says more, be first
                    return
                reason = "The job's store is gone: the process that hosts it, usually worker 0, has ended."
                self._silence = SILENCE_SECONDS
            if self._silence >= SILENCE_SECONDS:
                group.stop(group.generation, reason, final=True)
                return
            del group  # do not keep an unused group alive
            if self._end.wait(BEAT_SECONDS):
                with contextlib.suppress(RuntimeError):
                    self._notes.show_last()
                return
            round_seconds = time.monotonic() - began
            self._silence += min(round_seconds, 2 * BEAT_SECONDS)
            began += round_seconds

    def _exchange(self, group: Member, own: str, round_seconds: float) -> None:
        """Show a sign; look for a note, and for a new sign of the neighbour, which is never silent before its first."""
        generation, answers, notes = group.generation, self.answers, self._notes
        notes.write(f"sign/{notes.rank}", own)
        note, [sign] = notes.read_note(generation), notes.signs([self._neighbour])
        if sign != self._sign or sign in (None, LEFT):
            self._sign, self._silence = sign, 0.0
        with contextlib.suppress(RuntimeError):  # raised if the connections are closed
            if answers is not None and round_seconds > SILENCE_SECONDS / 4:  # the watcher may have asked meanwhile
                answers.offer(1 + int(2 * round_seconds / SILENCE_SECONDS))
            if answers is not None and answers.heard(ask=self._silence >= SILENCE_SECONDS / 2):
                self._silence = 0.0
        if note is not None:
            group.stop(generation, note.reason, final=note.final)
        wait = group.waiting
        waited = 0.0 if wait is None else time.monotonic() - wait.began
        if waited < self._reported:  # another wait
            self._reported = 0.0
        if waited >= max(STALL_SECONDS, 2 * self._reported):
            self._reported = waited
            others = [
                f"  {notes.name(rank)}: {'no sign of life yet' if sign is None else sign.partition(' ')[2]}"
                for rank, sign in enumerate(notes.signs(range(notes.world_size)))
                if rank != notes.rank
            ]
            logger.warning("%s is %s\n%s", notes.name(notes.rank), wait, "\n".join(others))
