"""The workers' own process group: agreement before every call, bounded waits, and errors that reach every worker.

[Note: agreement and failure]
A transport may abort the process when a peer sends more than was posted, or return garbage with success when it sends
less, as gloo does. So nothing is posted before all workers have said, in one all-gather of a few bytes, that they make
the same call, equal to the letter: `Group.agree`. Its n-th use on one worker meets the n-th on every other one.

A wait ends in one of five ways:
- The data arrives.
- `Config.timeout` passes.
- The peer's process dies, which closes its connections.
- The peer raises an error, and closes its connections (`Group.abort`).
- A peer has shown no sign of life for long, and a worker closes its own connections for that ([Note: signs of life]).

`abort` first leaves a note with the reason in the store. A worker that loses a connection looks for the note, closes
its own connections, so that those who wait for *it* hear of it, too, and raises. Nobody polls while data is on its way.

[Note: recovery]
After an error the group is stopped on every worker: each further call raises at once, or, on a worker that has not
noticed yet, finds its connections closed. Had the workers gone on by themselves, one's next step could have met the
step that another one repeats. To go on, all call `Group.recover`. It begins a new *generation*, with connections of its
own, so that no message of the old one can arrive, and they agree on the step to go on from. A worker that makes another
call instead gets an error. One that fails before the new connections are there leaves its note in the new generation,
where those who wait for it look. A death is final.

[Note: one thread at a time]
Two threads of a worker whose calls overlap would be in another order on another worker. So a call belongs to the thread
that agreed on it until its innermost `guard` ends, and a call of another thread meanwhile stops the group. One after
the other they are fine: autograd runs backwards on CUDA devices in a thread of its own.
"""

import hashlib
import secrets
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Final, Generic, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import _StopRecomputationError

from sar.comm.replicas import Replicas
from sar.comm.statistics import FollowedCall, counters, followed
from sar.comm.transport import LEFT_EARLY, Message, Shared, Transport, Wait
from sar.config import Config
from sar.errors import CommunicationError, ConfigError, DisagreementError, PeerError
from sar.ranges import named, traced
from sar.tensor_views import materialize

T = TypeVar("T")

REBUILD_TIMEOUT: Final = 300.0
"""Seconds that the other workers have to come back after an error."""

CONNECTING: Final = "connecting"

FORKED: Final = (
    "This process was forked from a worker, whose connections and threads it does not have, so it cannot make "
    "distributed calls. Make them in the worker itself; a torch DataLoader whose dataset does needs num_workers=0."
)


class Group:
    """One worker's end of the group; its transport connects, together with all others, on first use."""

    def __init__(self, transport: Transport) -> None:
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.device = transport.device
        self.local_peers, self.clock, self.spilled = transport.local_peers, transport.clock, transport.spilled
        self.generation = 0  # counts recoveries; equal on all workers
        self.calls = 0  # agreed on in this generation; equal on all workers
        self._wait: tuple[str, int | None, float] | None = None  # the call it waits in, for which peer, since when
        self.stopped: str | None = None  # what ended this generation
        self.final = False  # whether the group cannot recover
        self.replicas: Replicas | None = None  # where models are to be compared: see [Note: replicas]
        self._transport = transport
        self._connected = False  # in this generation
        self._alone = len(transport.local_peers) == 1  # in its process; else the group of the processes counts
        self._known = True  # whether a call has raised what stopped the group
        self._owner: tuple[int, str] | None = None  # the thread in a call, and the call
        self._followed: list[FollowedCall] = []  # calls in progress, the innermost last
        self.paused: Paused[Any] | None = None  # the rest of the latest call
        self._latest = "no distributed call yet"
        self._lock = threading.Lock()

    def stand_for(self, workers: int) -> None:
        """Speak, in errors, of processes with so many workers each."""
        self._transport.each = workers

    @property
    def name(self) -> str:
        """This worker in words."""
        return self._transport.name(self.rank)

    # -- the group and its generations

    @property
    def transport(self) -> Transport:
        """What carries bytes, with the connections of this generation, which all workers make together on first use."""
        connected = self._connected
        if self.stopped is not None:
            raise self._stop_error()
        if not connected:
            self._connect(Config.timeout)
        return self._transport

    def check(self) -> None:
        """Raise what has stopped this generation, if anything has."""
        if self.stopped is not None:
            raise self._stop_error()

    @property
    def call_id(self) -> int:
        """A number of up to 61 bits for the latest agreed call: equal on all workers, and of no other call."""
        return self.generation << 32 | self.calls

    @property
    def waiting(self) -> Wait | None:
        """What this worker waits for."""
        if self._wait is None:
            return None
        call, peer, began = self._wait
        return Wait(call, ("all workers" if call == CONNECTING else self._who(peer)), began)

    def _who(self, peer: int | None) -> str:
        return "another worker" if peer is None else self._transport.name(peer)

    @property
    def whereabouts(self) -> str:
        """What this worker does, in words."""
        return f"not waiting; its latest call: {self._latest}" if self.waiting is None else str(self.waiting)

    def recover(self, step: int) -> int:
        """Go on after an error, with all other workers, from the least of their steps: see [Note: recovery]."""
        if self.world_size == 1:
            return step
        if self.final:
            raise self._stop_error()
        if self.stopped is None:  # an error of others has not come here yet; or there is none, which they then hear
            self.abort(sys.exc_info()[1] or CommunicationError(f"Worker {self.rank} called sar.recover({step})."))
        self.paused = None
        with self._lock:
            self.generation += 1
            self.stopped = None
            self._connected = False
        if self.replicas is not None:
            self.replicas.forget_steps()  # that only some workers took, and that are to be repeated
        with self.guard():
            self._connect(min(Config.timeout, REBUILD_TIMEOUT))
            return min(self.agree("recover", step))

    def _connect(self, limit: float) -> None:
        """Make this generation's connections, once all workers are about to."""
        before, self._wait = self._wait, (CONNECTING, None, time.monotonic())
        try:
            self._transport.connect(self, limit)
        finally:
            self._wait = before
        self.calls = 0
        self._connected = True

    def abort(self, error: BaseException, *, final: bool = False) -> None:
        """Tell all workers that this one cannot go on, and why; once. See [Note: agreement and failure]."""
        told = f"{self.name.capitalize()} raised {type(error).__name__}: {error}"
        own = str(error) if isinstance(error, CommunicationError) else told
        self._stop(self.generation, own, told, final=final, known=True)

    def stop(self, generation: int, reason: str, *, final: bool) -> None:
        """As `abort`, for the liveness thread; the next call raises. Does nothing where the generation is over."""
        self._stop(generation, reason, reason, final=final, known=False)

    def _stop(self, generation: int, own: str, told: str, *, final: bool, known: bool) -> None:
        with self._lock:
            if self.world_size == 1 or generation != self.generation:
                return
            if self.stopped is not None:
                self._known |= known
                return
            self.stopped, self.final, self._known = own, final or self._transport.final, known
        self._transport.abort(generation, own, told, final=self.final)

    def _stop_error(self) -> CommunicationError:
        """The error of a call after the group has stopped."""
        known, self._known = self._known, True
        if self.stopped is FORKED:
            return CommunicationError(FORKED)
        if self.final:
            return PeerError(f"{self.stopped}\nThis is final: restart all workers.")
        if not known:
            return PeerError(f"{self.stopped}")
        return CommunicationError(
            f"An earlier error has stopped distributed calls on all workers: {self.stopped}\n"
            "To go on, call sar.recover() on every worker, or restart all."
        )

    def leave_to_parent(self) -> None:
        """Make every further call raise, in a process that was forked from this worker's."""
        self._lock, self._owner, self.paused = threading.Lock(), None, None
        if self.world_size > 1:
            self.stopped, self.final = FORKED, True

    def close(self) -> None:
        """Leave the group for good; peers that still wait for this worker see it end."""
        self.stopped, self.final = f"Worker {self.rank} has left.", True
        self._transport.close()

    def guard(self) -> "Guard":
        """A context for distributed calls; see `Guard`."""
        return Guard(self)

    # -- agreement

    def agree(self, call: str, flags: int = 0) -> list[int]:
        """Check that every worker makes the same call, as errors tell it; return everybody's flags, by rank.

        Flags are up to 63 bits that may differ between workers.
        """
        self.follow(call)
        if self.world_size == 1:
            return [flags]
        if self.paused is not None:
            self.paused.finish()
        self._claim(call)
        digest = int.from_bytes(hashlib.blake2b(call.encode(), digest_size=8).digest(), "little", signed=True)
        model = 0 if self.replicas is None else self.replicas.take_checksum()
        before = counters.seconds_waited
        gathered = torch.stack(self.all_gather(torch.tensor([digest, flags, model], device="cpu"), call))
        counters.seconds_late += counters.seconds_waited - before
        self.calls += 1
        self._latest = call
        digests, flags_by_rank, models = gathered.T.tolist()
        if set(digests) != {digest}:
            with self.guard():
                raise DisagreementError(
                    "The workers are not in the same distributed call, or not on the same graph:\n"
                    f"{self._transport.whereabouts(self, call)}\n"
                    "Every worker must make the same calls in the same order, with the same widths, dtypes and Config, "
                    f"and its loss must reach every one of them (times 0 if need be). {LEFT_EARLY}"
                )
        if self.replicas is not None and set(models) != {model}:
            with self.guard():
                self.replicas.compare(models)
        return list(flags_by_rank)

    def pause(self, steps: Generator[None, None, T]) -> "Paused[T]":
        """Run an agreed call until it yields. Its caller runs the rest, or else the next agreement does."""
        next(steps)
        self.paused = Paused(self, steps)
        return self.paused

    def follow(self, call: str) -> None:
        """Tell those who follow calls that one begins, which ends with the innermost `guard`."""
        if followed():
            self._followed.append(FollowedCall(call))

    def _claim(self, call: str) -> None:
        """Make this thread the one in a call: see [Note: one thread at a time]."""
        me = threading.get_ident()
        with self._lock:
            if self._owner is None or self._owner[0] == me:
                self._owner = (me, call)
                return
            other = self._owner[1]
        clash = ConfigError(
            f"Two threads of worker {self.rank} make distributed calls at the same time, so that their order is left "
            f"to chance: one is in {other}, and another calls {call}. Let one thread make them all."
        )
        self.abort(clash)
        raise clash

    def all_gather(self, tensor: Tensor, call: str) -> list[Tensor]:
        """Gather one small tensor, on the CPU or the group's device, of equal shape on all; inside an agreed call."""
        if self.world_size == 1:
            return [tensor]
        gathered = self.wait_for(self.transport.all_gather, call, materialize(tensor))
        counters.bytes_sent += tensor.nbytes * (self.world_size - 1)
        counters.bytes_received += tensor.nbytes * (self.world_size - 1)
        return gathered

    def gather_numbers(self, own: int | Sequence[int], call: str) -> list[Any]:
        """Each worker's number, or equally many numbers, by rank; otherwise as `all_gather`."""
        return [theirs.tolist() for theirs in self.all_gather(torch.tensor(own, device="cpu"), call)]

    def all_reduce(self, tensor: Tensor, op: Any, call: str) -> None:
        """Combine a contiguous tensor over all workers, in place; only inside an agreed call."""
        self.wait_for(self.transport.all_reduce, call, tensor, op)
        counters.bytes_sent += tensor.nbytes
        counters.bytes_received += tensor.nbytes

    def broadcast(self, tensor: Tensor, call: str) -> None:
        """Give all workers the contiguous tensor of worker 0, in place; only inside an agreed call."""
        self.wait_for(self.transport.broadcast, call, tensor)
        counters.bytes_sent += tensor.nbytes if self.rank == 0 else 0
        counters.bytes_received += tensor.nbytes if self.rank != 0 else 0

    def post(self, inbound: Message | None, outbound: Message | None, tag: int, call: str) -> tuple[Any, Any]:
        """Begin to receive one message and to send one; gives what `wait` takes for each. Inside an agreed call."""
        if self._alone and inbound is not None:
            counters.bytes_received += inbound.data.nbytes
        if self._alone and outbound is not None:
            counters.bytes_sent += outbound.data.nbytes
            counters.messages_sent += 1
        given = inbound or outbound
        if given is None:
            return None, None
        return self.wait_for(self.transport.post, call, inbound, outbound, tag, peer=given.peer)

    def wait(self, work: Any, peer: int, call: str) -> None:
        """Wait for what `post` gave for a message with this worker."""
        self.wait_for(self.transport.wait, call, work, peer, peer=peer)

    def exchange(self, call: str, buffers: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Send `buffers[q]` to every worker q; return what every worker sent to this one, its own buffer as it is.

        Several such exchanges make up one call, on which the workers have to agree before the first. `into` is where to
        put what each worker sends. Without it buffers are bytes in CPU memory, which begin with their number, int64.
        """
        return self._transport.all_to_all(self, call, buffers, into)

    def start_exchange(
        self, call: str, buffers: Sequence[Tensor], into: Sequence[Tensor]
    ) -> Callable[[], list[Tensor]]:
        """As `exchange`, but what it returns waits, and other calls may come before: in this generation, by all alike.

        Buffers must live, and stay as they are, until then.
        """
        return self._transport.start_all_to_all(self, call, buffers, into)

    def share(
        self, read: Sequence[Tensor], added_to: Sequence[Tensor], call: str, *, in_order: bool = False
    ) -> dict[int, Shared]:
        """What each of `local_peers` shares, by rank, with these tensors of this worker; see `Transport.share`."""
        if self._alone:
            return {self.rank: self._transport.share(read, added_to, in_order=in_order)[0]}
        shared = self.wait_for(partial(self.transport.share, read, added_to, in_order=in_order), call)
        return dict(zip(self.local_peers, shared, strict=True))

    def new_name(self, call: str) -> str:
        """A name that worker 0 draws for all, and that no other job has; only inside an agreed call.

        A number that counts would not do: a restarted job has the store and the files of the one before it.
        """
        return f"{self.gather_numbers(secrets.randbits(62), call)[0]:x}"

    # -- waiting

    def wait_for(self, operation: Callable[..., T], call: str, *operands: Any, peer: int | None = None) -> T:
        """Run a blocking operation of the transport, and turn its failures into errors that say what is known.

        The operation has to respect `Config.timeout` itself. `peer` is the one worker it depends on, if it is one.
        """
        before, self._wait = self._wait, (call, peer, time.monotonic())  # for the liveness thread
        start = time.perf_counter()
        try:
            if traced():
                with named(f"wait for {self._who(peer)}"):
                    return operation(*operands)
            return operation(*operands)
        except CommunicationError as error:  # which says all that is known
            self.abort(error)
            raise
        except RuntimeError as error:
            self._explain(error, call, self._who(peer))
        finally:
            self._wait = before
            if self._alone:
                counters.seconds_waited += time.perf_counter() - start

    def _explain(self, error: RuntimeError, call: str, who: str) -> NoReturn:
        """Raise the error that a failed wait means; closes this worker's connections first."""
        if self.stopped is not None:  # by another thread
            known = self._stop_error()
            raise type(known)(f"{known}\n({self.name.capitalize()} was waiting for {who} in: {call})") from error
        explained = self._transport.explain(error, self, call, who)
        if explained is None:
            raise error
        found, final = explained
        self.abort(found, final=final)
        raise found from error


class Guard:
    """Passes an error raised inside on to all other workers, once, and ends the call that was agreed on inside."""

    __slots__ = ("_group", "_outer", "_owner")

    def __init__(self, group: Group) -> None:
        self._group = group

    def __enter__(self) -> Group:
        group = self._group
        owner = group._owner
        self._owner = owner if owner is not None and owner[0] == threading.get_ident() else None
        self._outer = len(group._followed)
        return group

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        group = self._group
        # Checkpoints of torch leave a forward by an error, once they have seen enough of it.
        if error is not None and not isinstance(error, _StopRecomputationError):
            group.abort(error)
        while len(group._followed) > self._outer:
            group._followed.pop().end()
        if group._owner is not None and group._owner[0] == threading.get_ident():
            group._owner = self._owner


class Paused(Generic[T]):
    """The rest of an agreed call, for which other workers may wait."""

    def __init__(self, group: Group, steps: Generator[None, None, T]) -> None:
        self._group = group
        self._steps: Generator[None, None, T] | None = steps
        self._result: Any = None

    def finish(self) -> T:
        """Run the rest, unless that has been done, and return the result of the call."""
        if self._group.paused is self:
            self._group.paused = None
        steps, self._steps = self._steps, None
        if steps is not None:
            self._group.check()
            with torch.no_grad():
                try:
                    while True:
                        next(steps)
                except StopIteration as end:
                    self._result = end.value
        result: T = self._result
        return result
