"""The thread that samples batches ahead of the loop over them, for loaders with `num_workers`.

[Note: a thread ahead]
Sampling a batch takes several exchanges among all workers. So the threads of all workers form a second group, with
connections of its own: its messages cannot meet those of training. Before each batch the threads agree on it, and each
says whether its worker has left the loop. If any has, none of them samples that batch, so that no thread waits for one
that has stopped; a worker that goes on regardless gets an error. An error in a thread stops the second group, so that
all threads hear of it, and each raises it in the loop of its own worker.

Kernels and waits release Python's lock, so a thread is enough to use another core.
"""

import atexit
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from sar.comm import session
from sar.comm.group import Group
from sar.comm.transport import LEFT_EARLY
from sar.errors import ConfigError, DisagreementError
from sar.sampling.batch import Batch, SamplingSource, start_batch

POLL_SECONDS: Final = 1.0
EXIT_SECONDS: Final = 5.0  # how long the interpreter waits for a thread when it exits


class SamplingThread(threading.Thread):
    """Samples one epoch after the other, up to `ahead` batches ahead: see [Note: a thread ahead].

    Made by all workers together, inside `group.guard()`; ends after `end`, or an error.
    """

    def __init__(self, ahead: int) -> None:
        super().__init__(name="sar-sampling", daemon=True)
        group, call = session.current_group(), f"starting a thread that samples {ahead} batches ahead"
        if len(group.local_peers) > 1:
            raise ConfigError(
                "Workers that share a process (SAR_RESIDENT) cannot sample batches ahead; leave num_workers at 0."
            )
        group.agree(call)
        name = group.new_name(call)
        self.number = int(name, 16)  # equal on all workers
        self.group = session.group_beside(f"sampling/{name}")
        self._ahead = ahead
        self._epochs: queue.SimpleQueue[_Epoch | None] = queue.SimpleQueue()
        self._sampling: _Epoch | None = None
        self.start()

    def run(self) -> None:
        while self.group.stopped is None and (epoch := self._epochs.get()) is not None:
            epoch.make(self.group)
            del epoch  # with its batches
        self.group.close()

    def sample(self, source: SamplingSource, batches: Sequence[tuple[Tensor, int]]) -> Iterator[Batch]:
        """Sample an epoch, batches of these seeds and keys; errors of this thread and of others are raised here."""
        epoch = self._sampling = _Epoch(source, batches, threading.Semaphore(self._ahead))
        self._epochs.put(epoch)
        try:
            for _ in batches:
                with session.current_group().guard() as group:
                    while (batch := epoch.receive()) is None:  # the thread's own waits are bounded
                        group.check()
                    if isinstance(batch, BaseException):
                        group.abort(batch, final=epoch.final)
                        raise batch
                yield batch
        finally:
            epoch.leave()
            self._sampling = None

    def end(self) -> None:
        """Let the thread end: at once, or if an epoch is not finished, as soon as the other workers know."""
        self._epochs.put(None)
        if self._sampling is not None:
            self._sampling.leave()


@dataclass(eq=False)
class _Epoch:
    """The batches of an epoch on their way from the thread to the loop."""

    source: SamplingSource
    batches: Sequence[tuple[Tensor, int]]  # seeds and key of each
    allowed: threading.Semaphore  # batches that the thread may still make
    made: "queue.SimpleQueue[Batch | BaseException]" = field(default_factory=queue.SimpleQueue)
    left: bool = False  # whether the loop has been left
    final: bool = False  # whether an error is final, as a death is

    def make(self, group: Group) -> None:
        """Sample the batches, in the thread; an error takes the place of a batch."""
        try:
            for seeds, key in self.batches:
                self.allowed.acquire()
                with group.guard():
                    left = group.agree(f"{self.source.graph.signature}: a batch ahead", self.left)
                    if any(left):
                        workers = [rank for rank, has_left in enumerate(left) if has_left]
                        self.made.put(DisagreementError(f"Workers {workers} have left the loop. {LEFT_EARLY}"))
                        return
                    self.made.put(start_batch(group, self.source, seeds, key)())
        except BaseException as error:
            self.final = group.final
            self.made.put(error)

    def receive(self) -> Batch | BaseException | None:
        """The next batch, or the error in its place; None if there is none yet."""
        try:
            batch = self.made.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return None
        self.allowed.release()
        return batch

    def leave(self) -> None:
        """Let the thread tell the others that no more batches are wanted."""
        self.left = True
        self.allowed.release()


@atexit.register
def _end_all() -> None:
    """End all threads before the interpreter does, which would interrupt them anywhere."""
    for thread in threading.enumerate():
        if isinstance(thread, SamplingThread):
            thread.end()
            thread.join(EXIT_SECONDS)
