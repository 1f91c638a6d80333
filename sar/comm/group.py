"""The workers' own process group: agreement before every call, bounded waits, and errors that reach every worker.

[Note: agreement and failure]
If a peer sends more bytes than were posted, gloo aborts the process; if it sends fewer, gloo returns garbage with
success. So before anything is posted, all workers compare a digest of the call's text in one all-gather of a few bytes:
`Group.agree`. Its n-th use on one worker meets the n-th on every other one.

A wait ends in one of four ways:
- The data arrives.
- The peer's process dies, which closes its connections.
- The peer raises an error, and closes its connections (`Group.abort`).
- `Config.timeout` passes, because the peer is frozen, its host has vanished, or it takes that long.

`abort` first leaves a note with the reason in the store. A worker that loses a connection looks for the note, closes
its own connections, which passes the error to workers that wait for *it*, and raises. Nobody polls during transfers.

[Note: recovery]
After an error the group is stopped on every worker: each further call raises at once, or, on a worker that has not
noticed yet, finds its connections closed. If workers continued by themselves, one worker's next step could meet the
step that another one repeats. To resume, all workers call `Group.recover`. It begins a new *generation* with new
connections, in which no old message can arrive, and all agree on the step to resume from. A worker that makes another
call instead raises an error. A worker that fails before the new connections exist leaves a note in the new generation,
and the workers that wait for it read the note. A death is final.

[Note: one thread at a time]
If calls of two threads overlapped, their order could differ between workers. So a call belongs to the thread that
agreed on it until its innermost `guard` ends. A call of another thread before that stops the group. Threads may make
calls one after the other: autograd runs backwards on CUDA devices in a separate thread.
"""

import hashlib
import json
import logging
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import _StopRecomputationError

from sar.comm.replicas import Replicas
from sar.comm.rows import BufferPool
from sar.comm.statistics import FollowedCall, Statistics, counters, listeners
from sar.comm.transport import HEAD_BYTES, LEFT_EARLY, Failure, Message, Shared, Transport, Wait
from sar.config import Config
from sar.errors import CommunicationError, ConfigError, DisagreementError, PeerError
from sar.host.ranges import named, running_module, traced
from sar.host.signals import signal_noted
from sar.logging_setup import logger
from sar.tensors.views import materialize

T = TypeVar("T")

REBUILD_TIMEOUT: Final = 300.0
"""Seconds that the other workers have to call `recover` after an error."""

FORKED: Final = (
    "This process was forked from a worker, whose connections and threads it does not have, so it cannot make "
    "distributed calls. Make them in the worker itself; a torch DataLoader whose dataset does needs num_workers=0."
)


class Group:
    """One worker's end of the group. On first use its transport connects, together with those of all other workers.

    If not `counted`, its calls are left out of statistics, log and profiles, which follow those of the main thread.
    """

    def __init__(self, transport: Transport, *, pool: BufferPool | None = None, counted: bool = True) -> None:
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.device = transport.device
        self.local_peers, self.clock, self.spilled = transport.local_peers, transport.clock, transport.spilled
        self.rows_of_process = transport.rows_of_process
        self.pool = BufferPool(transport.device) if pool is None else pool  # message buffers of this worker's exchanges
        self.generation = 0  # counts recoveries; equal on all workers
        self.call_id = 0  # a unique number of up to 61 bits for the latest agreed call; equal on all workers
        self.waiting: str | None = None  # the call in which this worker waits for others
        self.failure: Failure | None = None  # why this generation has ended
        self.replicas: Replicas | None = None  # compares the workers' models: see [Note: replicas]
        # Called by `sync_params` and `gather_grads` with the model and the call's name; raise if they refuse the model.
        self.model_checks: set[Callable[[Any, str], None]] = set()
        self.own_sizes: set[int] = set()  # of this worker's nodes and edges, whose rows `sync_params` does not replace
        self.stopping = False  # whether a worker has reported a signal in an agreement: see `should_stop`
        self.has_summed = False  # whether the user has made a sum over workers, by which a loss may be divided
        self.counters = counters if counted else Statistics()
        self._transport = transport
        self._connected = False  # in this generation
        self._alone = len(transport.local_peers) == 1  # in its process; if not, the group of the processes counts bytes
        self._owner: tuple[int, str] | None = None  # the thread in a call, and the call
        self._followed: list[FollowedCall] = []  # calls in progress, the innermost last
        self._lock = threading.Lock()

    def stand_for(self, workers: int) -> None:
        """Set the number of workers per process, for error messages only."""
        self._transport.each = workers

    # -- the group and its generations

    @property
    def final(self) -> bool:
        """Whether the group has failed and cannot recover."""
        return self.failure is not None and self.failure.final

    def check_model(self, model: Any, call: str) -> None:
        """Raise an error if one of `model_checks` refuses a model."""
        for check in self.model_checks if self.world_size > 1 else ():
            check(model, call)

    @property
    def agreed(self) -> str:
        """The call in progress that the workers have agreed on last, or are about to; empty without one."""
        return "" if self._owner is None else self._owner[1]

    def recover(self, step: int) -> int:
        """Recover from an error together with all other workers; return the least of their steps ([Note: recovery])."""
        if self.world_size == 1:
            return step
        if self.failure is not None and self.failure.final:
            raise self._stop_error()
        if self.failure is None:  # another worker's error has not arrived yet, or there is none and we stop the others
            self.abort(sys.exc_info()[1] or CommunicationError(f"Worker {self.rank} called sar.recover({step})."))
        with self._lock:
            self.generation += 1
            self.call_id = self.generation << 32
            self.failure, self._connected = None, False
        if self.replicas is not None:
            self.replicas.forget_steps()  # only some workers may have taken them, and all will repeat them
        with self.guard():
            self._connect(min(Config.timeout, REBUILD_TIMEOUT))
            return min(self.agree("recover", step))

    def _connect(self, limit: float) -> None:
        """Connect in this generation, once all workers are ready to."""
        before, self.waiting = self.waiting, "connecting"
        try:
            self._transport.connect(self, limit)
        except CommunicationError as error:
            self.abort(error)
            raise
        finally:
            self.waiting = before
        self._connected = True

    def abort(self, error: BaseException, *, final: bool = False) -> None:
        """Tell all workers, once, why this one cannot continue: see [Note: agreement and failure]."""
        told = f"{self._transport.name(self.rank).capitalize()} raised {type(error).__name__}: {error}"
        if isinstance(error, CommunicationError):
            self.stop(Failure(str(error), told, final or error.final))
        else:
            self.stop(Failure(told, told, final))

    def stop(self, failure: Failure) -> None:
        """End this generation on all workers, from any thread. Does nothing if it has ended."""
        with self._lock:
            if self.world_size == 1 or self.failure is not None:
                return
            self.failure = failure = failure._replace(final=failure.final or self._transport.final)
        self._transport.abort(self.generation, failure)

    def _stop_error(self, place: str = "") -> CommunicationError:
        """The error that a call after a failure raises."""
        assert self.failure is not None
        here, _, final = self.failure
        if here is FORKED:
            error = CommunicationError(FORKED)
        elif final:
            error = PeerError(f"{here}\nThis is final: restart all workers.{place}")
        else:
            error = CommunicationError(
                f"An earlier error has stopped distributed calls on all workers: {here}\n"
                f"To go on, call sar.recover() on every worker, or restart all.{place}"
            )
        error.final = final
        return error

    def leave_to_parent(self) -> None:
        """Make every further call raise in a forked process, because its connections belong to the parent."""
        self._lock, self._owner = threading.Lock(), None
        if self.world_size > 1:
            self.failure = Failure(FORKED, FORKED, final=True)

    def close(self) -> None:
        """Leave the group for good. Waits of peers for this worker fail."""
        left = f"Worker {self.rank} has left."
        self.failure = Failure(left, left, final=True)
        self._transport.close()

    def guard(self) -> "Guard":
        """Context manager for distributed calls; see `Guard`."""
        return Guard(self)

    # -- agreement

    def agree(self, call: str, flags: int = 0) -> list[int]:
        """Check that every worker makes the same call; return all workers' flags, by rank.

        Workers compare `call`, which errors also show. Flags are up to 63 bits that may differ between workers.
        """
        self.follow(call)
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:  # as `is_transforming`
            refuse_transforms()
        if self.world_size == 1:
            return [flags]
        with self._lock:  # see [Note: one thread at a time]
            owner = self._owner
            if owner is None or owner[0] == threading.get_ident():
                owner = self._owner = (threading.get_ident(), call)
        if owner[0] != threading.get_ident():
            clash = ConfigError(
                f"Two threads of worker {self.rank} make distributed calls at the same time, so that their order is "
                f"left to chance: one is in {owner[1]}, and another calls {call}. Let one thread make them all."
            )
            self.abort(clash)
            raise clash
        digest = int.from_bytes(hashlib.blake2b(call.encode(), digest_size=8).digest(), "little", signed=True)
        model = 0 if self.replicas is None else self.replicas.take_checksum()
        before, own = self.counters.seconds_waited, torch.tensor([digest, flags, model, signal_noted()], device="cpu")
        gathered = torch.stack(self.wait_for(self._transport.all_gather, call, own))
        self.counters.seconds_late += self.counters.seconds_waited - before
        self.counters.bytes_sent += own.nbytes * (self.world_size - 1)
        self.counters.bytes_received += own.nbytes * (self.world_size - 1)
        self.call_id += 1
        digests, flags_by_rank, models, signals = gathered.T.tolist()
        self.stopping |= any(signals)
        if set(digests) != {digest}:
            with self.guard():
                name, kind = running_module()
                place = f", in {name or 'the model'} ({kind})" if kind else ""
                calls = self.gather_json(call + place, call)
                lines = "\n".join(f"  {self._transport.name(rank)}: {each}" for rank, each in enumerate(calls))
                raise DisagreementError(
                    f"The workers are not in the same distributed call, or not on the same graph:\n{lines}\n"
                    "Every worker must make the same calls in the same order, with the same widths, dtypes and Config, "
                    f"and its loss must reach every one of them (times 0 if need be). {LEFT_EARLY}"
                )
        if self.replicas is not None and set(models) != {model}:
            with self.guard():
                self.replicas.compare(models)
        return list(flags_by_rank)

    def follow(self, call: str) -> None:
        """Tell listeners that a call begins. It ends with the innermost `guard`."""
        if self.counters is counters and (listeners or logger.isEnabledFor(logging.DEBUG)):
            self._followed.append(FollowedCall(call))

    def all_gather(self, tensor: Tensor, call: str) -> list[Tensor]:
        """Gather one small tensor of equal shape, on the CPU or the group's device; only inside an agreed call."""
        if self.world_size == 1:
            return [tensor]
        gathered = self.wait_for(self._transport.all_gather, call, materialize(tensor))
        self.counters.bytes_sent += tensor.nbytes * (self.world_size - 1)
        self.counters.bytes_received += tensor.nbytes * (self.world_size - 1)
        return gathered

    def gather_numbers(self, own: int | Sequence[int], call: str) -> list[Any]:
        """Gather each worker's number, or equally many numbers, by rank; otherwise like `all_gather`."""
        return [numbers.tolist() for numbers in self.all_gather(torch.tensor(own, device="cpu"), call)]

    def gather_json(self, own: Any, call: str) -> list[Any]:
        """Gather each worker's value, by rank, through JSON; otherwise like `all_gather`."""
        text = torch.tensor(list(json.dumps(own).encode()), dtype=torch.uint8, device="cpu")
        lengths = self.gather_numbers(len(text), call)
        texts = self.all_gather(torch.cat([text, text.new_zeros(max(lengths) - len(text))]), call)
        return [json.loads(bytes(text[:length].tolist())) for text, length in zip(texts, lengths, strict=True)]

    def all_reduce(self, tensor: Tensor, op: Any, call: str) -> None:
        """Combine a contiguous tensor over all workers, in place; only inside an agreed call."""
        self.wait_for(self._transport.all_reduce, call, tensor, op)
        self.counters.bytes_sent += tensor.nbytes
        self.counters.bytes_received += tensor.nbytes

    def broadcast(self, tensor: Tensor, call: str) -> None:
        """Copy the contiguous tensor of worker 0 to all workers, in place; only inside an agreed call."""
        self.wait_for(self._transport.broadcast, call, tensor)
        self.counters.bytes_sent += tensor.nbytes if self.rank == 0 else 0
        self.counters.bytes_received += tensor.nbytes if self.rank != 0 else 0

    def post(
        self, inbound: Message | None, outbound: Message | None, tag: int, call: str
    ) -> tuple[Wait | None, Wait | None]:
        """Begin to receive one message and to send one; return operations for `wait_for`. Only in an agreed call."""
        message = inbound or outbound
        if message is None:
            return None, None
        if self._alone and inbound is not None:
            self.counters.bytes_received += inbound.data.nbytes
        if self._alone and outbound is not None:
            self.counters.bytes_sent += outbound.data.nbytes
            self.counters.messages_sent += 1
        return self.wait_for(self._transport.post, call, inbound, outbound, tag, peer=message.peer)

    def exchange(self, call: str, buffers: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Send `buffers[q]` to every worker q; return received buffers by rank. The worker's own buffer is not copied.

        The workers must have agreed on a call, which may have several such exchanges. Received data is written to
        `into`. Without it, buffers are bytes in CPU memory that begin with their number as an int64.
        """
        buffers = list(map(materialize, buffers))
        received = self.wait_for(self._transport.all_to_all, call, buffers, into)
        for other in set(range(self.world_size)) - {self.rank}:
            nbytes = buffers[other].nbytes
            self.counters.bytes_sent += nbytes
            self.counters.bytes_received += received[other].nbytes
            self.counters.messages_sent += (nbytes > 0) + (into is None and nbytes > HEAD_BYTES)
        return received

    def share(
        self, read: Sequence[Tensor], added_to: Sequence[Tensor], call: str, *, in_order: bool = False
    ) -> dict[int, Shared]:
        """Share tensors with `local_peers`, until all call this again; return the tensors of each, by rank.

        They read some tensors, which are constant, and add to others. With `in_order`, they continue in order of ranks.
        """
        return self.swap(self._transport.shared(read, added_to), call, in_order=in_order)

    def swap(self, brought: T, call: str, *, in_order: bool = False) -> dict[int, T]:
        """Gather the contributions of this process's workers, by rank; in an agreed call."""
        if self._alone:
            return {self.rank: brought}
        swapped = self.wait_for(partial(self._transport.swap, brought, in_order=in_order), call)
        return dict(zip(self.local_peers, swapped, strict=True))

    def new_name(self, call: str) -> str:
        """A random name, drawn by worker 0 for all workers and unique to this job; only inside an agreed call.

        A counter would not be unique, because a restarted job finds the store and the files of the run before it.
        """
        return f"{self.gather_numbers(secrets.randbits(62), call)[0]:x}"

    # -- waiting

    def wait_for(self, operation: Callable[..., T], call: str, *operands: Any, peer: int | None = None) -> T:
        """Run a blocking operation of the transport, and turn its failures into errors that name their cause.

        On first use in a generation, all workers connect together. The operation has to respect `Config.timeout`
        itself. `peer` is the worker it depends on, None for all.
        """
        if self.failure is not None:
            raise self._stop_error()
        if not self._connected:
            self._connect(Config.timeout)
        before, self.waiting = self.waiting, call
        start = time.perf_counter()
        try:
            if traced():
                with named(f"wait for {self._transport.name(peer)}"):
                    return operation(*operands)
            return operation(*operands)
        except CommunicationError as error:  # already names its cause
            self.abort(error)
            raise
        except RuntimeError as error:
            if self.failure is not None:  # of another thread
                me, who = self._transport.name(self.rank).capitalize(), self._transport.name(peer)
                raise self._stop_error(f"\n({me} was waiting for {who} in: {call})") from error
            cause = self._transport.explain(error, call, peer)
            if cause is None:
                raise
            self.abort(cause)  # closes this worker's connections
            raise cause from error
        finally:
            self.waiting = before
            if self._alone:
                self.counters.seconds_waited += time.perf_counter() - start


@dataclass(eq=False, slots=True)
class Guard:
    """Context that sends an error raised inside to all other workers, once, and ends the call agreed on inside."""

    _group: Group
    _owner: tuple[int, str] | None = field(init=False)  # owner of the call around this one
    _outer: int = field(init=False)  # number of calls in progress around this one

    def __enter__(self) -> Group:
        group = self._group
        owner = group._owner
        self._owner = owner if owner is not None and owner[0] == threading.get_ident() else None
        self._outer = len(group._followed)
        return group

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        group = self._group
        # Torch's checkpointing raises this error to stop a recomputation early; it is no failure.
        if error is not None and not isinstance(error, _StopRecomputationError):
            group.abort(error)
        while len(group._followed) > self._outer:
            group._followed.pop().end()
        if group._owner is not None and group._owner[0] == threading.get_ident():
            group._owner = self._owner


def is_transforming() -> bool:
    """Whether a transform of torch.func, or forward mode, is on."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def refuse_transforms(*inputs: Tensor | None) -> None:
    """Raise `ConfigError` inside a transform of torch.func, or for inputs with tangents of forward mode."""
    duals = [forward_ad.unpack_dual(x) for x in inputs if x is not None] if forward_ad._current_level >= 0 else []
    if torch._C._are_functorch_transforms_active() or any(dual.tangent is not None for dual in duals):
        raise ConfigError(
            "sar's distributed calls have no rules for torch.func's grad, vmap, jvp and the like, nor for forward "
            "mode. Use loss.backward() or torch.autograd.grad; torch.func.functional_call works."
        )
