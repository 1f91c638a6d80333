"""The workers' own process group: agreement before every call, bounded waits, and errors that reach every worker.

[Note: agreement and failure]
gloo pairs messages by order of arrival, aborts the process when a peer sends more than was posted and returns garbage
with success when it sends less. So nothing is posted before all workers have said, in one all-gather of a few bytes,
that they make the same call: `Group.agree`. Its n-th use on one worker meets the n-th on every other one; what they
describe must be equal to the letter.

A wait ends in one of four ways. The data arrives; `Config.timeout` passes; the peer's connection closes because its
process died; or the peer itself closed its connections because it raised an error (`Group.abort`). gloo has no call
for the last: a receive that times out closes every connection of its group, so that is what `abort` does, after it has
left a note with the reason in the store. Whoever loses a connection looks for the note, closes its own connections
(so that the news travels on to those who wait for *it*), and raises. No thread watches, and nobody polls while data is
on its way.

After an error the group is gone on every worker. The next distributed call builds a new one, of the next *generation*;
a worker that has not yet noticed finds its old connections closed at its next call. A worker that fails again before
the new group exists leaves its note in the new generation, where those who wait for the group look. Only a death is
final.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.utils.checkpoint import _StopRecomputationError

from sar.comm.statistics import counters
from sar.config import Config
from sar.errors import CommunicationError, CommunicationTimeout, DisagreementError, PeerError
from sar.logging_setup import logger

T = TypeVar("T")

NOTE_KEY: Final = "abort"
NOTE_PATIENCE: Final = 3.0
"""Seconds to look for a peer's note after its connection closed: it writes the note first, but the store may lag."""
POLL_SECONDS: Final = 0.02
REBUILD_TIMEOUT: Final = 300.0
"""Seconds that the other workers have to come back after an error."""
CLOSING_TAG: Final = 2**31 - 1


class Group:
    """One worker's end of the group: rank, size, a gloo group of its own, and the store for notes.

    Args:
        store: the key-value store of the job.
        rank: this worker.
        world_size: number of workers.
        device: device on which payloads travel (the CPU for gloo).
        nccl: process group for payloads on CUDA devices; None to use the gloo group.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        device: torch.device,
        nccl: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.nccl = nccl
        self.generation = 0
        self.calls = 0  # agreed on in this generation; equal on all workers
        self._root_store = store
        self._gloo: Any = None
        self._fatal: str | None = None

    # -- the group and its generations

    @property
    def gloo(self) -> Any:
        """The gloo group of this generation; built, together with all other workers, on first use."""
        if self._fatal is not None:
            raise PeerError(f"{self._fatal}\nThis is final: restart all workers.")
        if self._gloo is None:
            limit = Config.timeout if self.generation == 0 else min(Config.timeout, REBUILD_TIMEOUT)
            try:
                self._wait_for_all(limit)
                self._gloo = dist.ProcessGroupGloo(self._store, self.rank, self.world_size, timedelta(seconds=limit))
            except RuntimeError as error:
                if isinstance(error, CommunicationError):
                    raise
                why = str(error).partition("\n")[0]
                self._fatal = (
                    f"Worker {self.rank} could not connect to all {self.world_size} workers: {why} "
                    "Check that all are running; if they are, check SAR_SOCKET_NAME."
                )
                raise CommunicationTimeout(self._fatal) from error
            self.calls = 0
        return self._gloo

    @property
    def _store(self) -> dist.Store:
        return dist.PrefixStore(f"sar/{self.generation}", self._root_store)

    @property
    def call_id(self) -> int:
        """A number of up to 61 bits for the latest agreed call: equal on all workers, and of no other call."""
        return self.generation << 32 | self.calls

    def _wait_for_all(self, limit: float) -> None:
        """Wait until every worker is about to build this generation's group, or one of them has failed before that."""
        deadline = time.monotonic() + limit
        self._store.set(f"ready/{self.rank}", "")
        keys = [f"ready/{rank}" for rank in range(self.world_size)]
        while True:
            note = self._read_note(0)
            if note is not None:
                found = PeerError(f"Worker {note['rank']} raised {note['error']}: {note['message']}")
                self._fatal = str(found) if note["fatal"] else None
                self.abort(found)
                raise found
            if self._store.check(keys):
                return
            if time.monotonic() > deadline:
                absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                late = CommunicationTimeout(f"workers {absent} did not come within {limit:.0f} s.")
                self._leave_note(late, fatal=True)
                raise RuntimeError(str(late))
            time.sleep(POLL_SECONDS)

    def abort(self, error: BaseException, *, fatal: bool = False) -> None:
        """Tell all workers that this one cannot go on, and why: see [Note: agreement and failure]."""
        if self.world_size > 1:
            self._leave_note(error, fatal)
        if self._gloo is not None:  # only built where there are others
            peer = (self.rank + 1) % self.world_size
            try:
                self._gloo.recv([torch.empty(1, dtype=torch.uint8)], peer, CLOSING_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError:
                logger.debug("closed the connections of generation %d", self.generation)
        self._gloo = None
        self.generation += 1

    def close(self) -> None:
        """Leave the group for good; peers that still wait for this worker see it end."""
        self._fatal = f"Worker {self.rank} has left."
        self._gloo = None

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Pass an error raised inside on to all other workers, once."""
        generation = self.generation
        try:
            yield
        except _StopRecomputationError:  # how torch's checkpointing leaves a forward that it has seen enough of
            raise
        except BaseException as error:
            if self.generation == generation:
                self.abort(error)
            raise

    # -- agreement

    def agree(self, call: str, flags: int = 0) -> list[int]:
        """Check that every worker makes the same call; return everybody's flags, by rank.

        Args:
            call: signature of the call: what this worker is about to do, as errors tell it.
            flags: up to 63 bits that may differ between workers.

        Raises:
            DisagreementError: where the workers' signatures differ.
            PeerError, CommunicationTimeout: where a worker is gone or does not come.
        """
        if self.world_size == 1:
            return [flags]
        digest = int.from_bytes(hashlib.blake2b(call.encode(), digest_size=8).digest(), "little", signed=True)
        gathered = self.all_gather(torch.tensor([digest, flags]), call)
        self.calls += 1
        if any(int(theirs[0]) != digest for theirs in gathered):
            with self.guard():
                raise DisagreementError(
                    "The workers are not in the same distributed call, or not on the same graph:\n"
                    f"{self._whereabouts(call)}\n"
                    "Every worker must make the same calls in the same order, with the same widths, dtypes and Config, "
                    "and its loss must reach every one of them (times 0 if need be)."
                )
        return [int(theirs[1]) for theirs in gathered]

    def all_gather(self, tensor: Tensor, call: str) -> list[Tensor]:
        """Gather one small CPU tensor of equal shape from every worker; only inside an agreed call."""
        if self.world_size == 1:
            return [tensor]
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=Config.timeout)
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self.wait_for(lambda: self.gloo.allgather([gathered], [tensor], options).wait(), call)
        counters.bytes_sent += tensor.nbytes * (self.world_size - 1)
        counters.bytes_received += tensor.nbytes * (self.world_size - 1)
        return gathered

    # -- waiting

    def wait_for(self, operation: Callable[[], T], call: str, peer: int | None = None) -> T:
        """Run a blocking gloo operation, and turn its failures into errors that say what is known.

        Args:
            operation: what blocks; it has to respect `Config.timeout` itself.
            call: the distributed call it belongs to.
            peer: the worker that it depends on, where there is just one.
        """
        start = time.perf_counter()
        try:
            return operation()
        except RuntimeError as error:
            if isinstance(error, CommunicationError):
                raise
            self._explain(error, call, peer)
        finally:
            counters.seconds_waited += time.perf_counter() - start

    def _explain(self, error: RuntimeError, call: str, peer: int | None) -> NoReturn:
        """Raise the error that a failed wait means; closes this worker's connections first."""
        self._report(call)
        who = "another worker" if peer is None else f"worker {peer}"
        timed_out = any(words in str(error).lower() for words in ("timed out", "timeout"))
        note = self._read_note(0 if timed_out else NOTE_PATIENCE)
        found: CommunicationError
        if note is not None:
            found = PeerError(
                f"Worker {note['rank']} raised {note['error']}: {note['message']}\n"
                f"(Worker {self.rank} was waiting for {who} in: {call})"
            )
        elif timed_out:
            waited = f"Worker {self.rank} waited {Config.timeout:g} s (Config.timeout) for {who} in: {call}"
            found = CommunicationTimeout(waited)
            # gloo has closed the connections already: leave the note before asking around.
            self._leave_note(found, fatal=False)
            found = CommunicationTimeout(f"{waited}\n{self._whereabouts(call)}")
        else:
            found = PeerError(
                f"The connection to {who} closed without a word: its process died or left while worker {self.rank} "
                f"waited in: {call}\nSee that worker's own output.\n{self._whereabouts(call)}"
            )
        fatal = bool(note["fatal"]) if note is not None else not timed_out
        if fatal:
            self._fatal = str(found)
        self.abort(found, fatal=fatal)
        raise found from error

    def _leave_note(self, error: BaseException, fatal: bool) -> None:
        """Write down why this worker gives up; the first note of a generation stays."""
        note = {"rank": self.rank, "error": type(error).__name__, "message": str(error), "fatal": fatal}
        try:
            self._store.compare_set(NOTE_KEY, "", json.dumps(note))
        except RuntimeError:
            logger.warning("the store is gone; other workers will see only closed connections")

    def _read_note(self, patience: float) -> dict[str, Any] | None:
        """The first note of this generation, if one appears within `patience` seconds."""
        try:
            if self._appears(NOTE_KEY, time.monotonic() + patience):
                note: dict[str, Any] = json.loads(self._store.get(NOTE_KEY))
                return note
        except RuntimeError:
            logger.debug("the store went with the worker that hosted it")
        return None

    def _appears(self, key: str, deadline: float) -> bool:
        """Whether a key is in this generation's part of the store, or comes there before the deadline."""
        while not self._store.check([key]):
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def _report(self, call: str) -> None:
        """Let the others find out, through the store, which call this worker is in."""
        try:
            self._store.set(f"at/{self.calls}/{self.rank}", call)
        except RuntimeError:
            logger.debug("the store is gone")

    def _whereabouts(self, call: str) -> str:
        """Say which call each worker is in, as far as they report it within `NOTE_PATIENCE`."""
        deadline = time.monotonic() + NOTE_PATIENCE
        lines = []
        self._report(call)
        try:
            for rank in range(self.world_size):
                key = f"at/{self.calls}/{rank}"
                known = self._appears(key, deadline)
                lines.append(f"  worker {rank}: {self._store.get(key).decode() if known else 'no answer'}")
        except RuntimeError:
            lines.append("  the store cannot be reached: the process that hosts it, usually worker 0, has ended")
        return "\n".join(lines)
