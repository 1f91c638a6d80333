"""The transport between workers of one process: they meet in turns, and read each other's tensors in place."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sar.comm.group import Group
from sar.comm.statistics import counters
from sar.comm.tiles import ExchangeSpec, OwnRows
from sar.comm.transport import Failure, Message, Shared, SharedTensor, Spilled, Transport, Wait
from sar.errors import ConfigError, PeerError
from sar.outofcore.letters import LettersInFile
from sar.outofcore.process_rows import Letters, rows_of_process
from sar.outofcore.residency import Residency
from sar.outofcore.turns import Turns
from sar.tensors.views import bytes_of, described, materialize

_REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


class InProcessTransport(Transport):
    """Transport of one of a process's V workers, in its thread: see [Note: workers of one process]."""

    def __init__(self, outer: Group, turns: Turns, place: int, others: Sequence[Residency] = ()) -> None:
        size = turns.size
        super().__init__(outer.rank * size + place, outer.world_size * size, outer.device)
        self.local_peers = range(outer.rank * size, (outer.rank + 1) * size)
        self._outer = outer  # group of the W processes
        self._turns = turns
        self._place = place  # index among its process's V workers
        self._residency = others[place] if others else None  # moves its tensors to a disk; None if they stay in memory
        self._others = others  # those of all workers of the process
        self._group: Group | None = None
        self._away = 0.0  # seconds in which others had the turn
        self._thread = threading.get_ident()

    @property
    def final(self) -> bool:
        return self._outer.final

    def clock(self) -> float:
        """Time in seconds without the turns of other workers."""
        return time.perf_counter() - self._away

    def spilled(self) -> Spilled | None:
        if self._residency is None:
            return None
        return Spilled(self._residency.left, self._residency.file.written, self._residency.file.read)

    # -- connections

    def connect(self, group: Group, limit: float) -> None:
        """Recover together with the other processes. Before the first error there is nothing to connect."""
        self._group = group
        if group.generation == 0:
            return
        try:
            self._turns.rejoin(self._place)
        except PeerError as gone:
            gone.final = True
            raise
        self._meet("a recovery", None, lambda _: self._outer.recover(0), in_order=True)

    def abort(self, generation: int, failure: Failure) -> None:
        self._turns.fail(PeerError(failure.here), self._place)
        self._outer.stop(failure)

    # -- meetings

    def _meet(self, kind: str, brought: Any, finish: Callable[[list[Any]], Any], *, in_order: bool = False) -> Any:
        """Meet the other workers of this process: see `Turns.meet`. Bytes that `finish` moves are not counted."""
        call = self._turns.latest[self._place] = self._call
        if threading.get_ident() != self._thread:
            raise ConfigError(
                f"A thread that worker {self.rank} has started makes a distributed call: {call}. Make them "
                "in the thread that runs the script."
            )
        left = None

        def leave() -> None:
            nonlocal left
            if self._residency is not None:
                self._residency.leave(self._turns.turn(self._place))
            left = time.perf_counter()

        def finish_for_all(brought: list[Any]) -> Any:
            with _uncounted(), _disable_current_modes():
                return finish(brought)

        result = self._turns.meet(self._place, kind, brought, finish_for_all, leave, afresh=in_order)
        if self._group is not None:
            step = ", sending rows" if kind.startswith("a gathering") else ""
            step = ", adding gradients" if call.startswith("end of") else step
            meeting = self._turns.turn(self._place)
            self._turns.progress.goes_on(meeting, self._group.agreed, self._group.call_id, step)
        if left is not None:
            self._away += time.perf_counter() - left
            if self._residency is not None:
                self._residency.arrive()
                following = self._others[(self._place + 1) % len(self._others)]
                following.prefetch(self._turns.turn(self._place) + 1)
        return result

    @property
    def _call(self) -> str:
        """Description of the distributed call that this worker is in."""
        return "" if self._group is None else self._group.waiting or ""

    def swap(self, brought: Any, *, in_order: bool) -> list[Any]:
        all_brought: list[Any] = self._meet("a swap", brought, lambda brought: brought, in_order=in_order)
        return all_brought

    def shared(self, read: Sequence[Tensor], added_to: Sequence[Tensor]) -> Shared:
        open_to_others = SharedTensor if self._residency is None else self._residency.open_to_others
        return Shared(self._publish(read), [open_to_others(total) for total in added_to])

    def rows_of_process(self, spec: ExchangeSpec) -> OwnRows:
        if self._residency is None:
            return rows_of_process(spec, Letters, lambda tensors: None)
        return rows_of_process(spec, partial(LettersInFile, self._residency.file), self._residency.contents)

    def _publish(self, tensors: Sequence[Tensor]) -> list[SharedTensor]:
        """Snapshots of tensors for other workers of the process to read."""
        if self._residency is None:
            return [SharedTensor(_copy(tensor)) for tensor in tensors]
        return [self._residency.publish(materialize(tensor)) for tensor in tensors]

    # -- operations

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """See `Transport.all_gather`. All workers of this process get the same tensors."""

        def finish(brought: list[Tensor]) -> list[Tensor]:
            if self._outer.world_size == 1:
                return brought
            return [row for stacked in self._outer.all_gather(torch.stack(brought), self._call) for row in stacked]

        gathered: list[Tensor] = self._meet(f"a gathering of {described(tensor)}", _copy(tensor), finish)
        return gathered

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        """See `Transport.all_reduce`. The workers' tensors are combined in the order of ranks."""
        combine = next((combine for reduction, combine in _REDUCTIONS.items() if op == reduction), None)
        if combine is None:
            raise ConfigError(f"Workers that share a process cannot combine tensors by {op}.")

        def finish(brought: list[SharedTensor]) -> Tensor:
            total = brought[0].rows.clone()
            for contribution in brought[1:]:
                combine(total, contribution.rows, out=total)  # type: ignore[call-arg]
            if self._outer.world_size > 1:
                self._outer.all_reduce(total, op, self._call)
            return total

        (own,) = self._publish([tensor])
        tensor.copy_(self._meet(f"a reduction by {op} of {described(tensor)}", own, finish))

    def broadcast(self, tensor: Tensor) -> None:

        def finish(brought: list[SharedTensor]) -> Tensor:
            data = brought[0].rows
            if self._outer.world_size > 1:
                data = data.clone()
                self._outer.broadcast(data, self._call)
            return data

        flat = tensor.view(-1)
        (own,) = self._publish([flat if self._place == 0 else flat[:0]])
        data = self._meet(f"a broadcast of {described(tensor)}", own, finish)
        if self.rank:
            flat.copy_(data)

    def post(self, inbound: Message | None, outbound: Message | None, tag: int) -> tuple[Wait | None, Wait | None]:
        """See `Transport.post`. Messages go between processes, whose workers of one place have their turns together."""
        size, call = self._turns.size, self._call
        receive = inbound and Message(inbound.peer // size, inbound.data)
        send = outbound and Message(outbound.peer // size, outbound.data)
        with _uncounted(messages=False):
            arrival, departure = self._outer.post(receive, send, tag, call)
        if receive is not None and arrival is not None:
            arrival = partial(self._outer.wait_for, arrival, call, peer=receive.peer)
        if send is not None and departure is not None:
            departure = partial(self._outer.wait_for, departure, call, peer=send.peer)
        return arrival, departure

    def all_to_all(self, buffers: Sequence[Tensor], into: Sequence[Tensor] | None) -> list[Tensor]:
        """See `Transport.all_to_all`. The workers meet once, and each pair of processes exchanges one message."""
        size = self._turns.size

        def finish(brought: list[list[SharedTensor]]) -> list[list[list[Tensor]]]:
            """Messages to the workers of this process, indexed [process][sender][receiver]."""
            tables, packed = [], []
            for process in range(self._outer.world_size):
                receivers = slice(process * size, (process + 1) * size)
                table = [[shared.rows for shared in sent[receivers]] for sent in brought]
                messages = [message for row in table for message in row] if process != self._outer.rank else []
                # One message to each process, with its size in bytes and the messages' lengths in front.
                lengths = torch.tensor([0, *map(len, messages)], dtype=torch.int64, device="cpu")
                lengths[0] = lengths.nbytes + lengths.sum()
                tables.append(table)
                packed.append(torch.cat([lengths.view(torch.uint8), *messages]))
            for process, message in enumerate(self._outer.exchange(self._call, packed)):
                if process != self._outer.rank:
                    head, rest = message.split([8 * (size * size + 1), len(message) - 8 * (size * size + 1)])
                    pieces = iter(rest.split(head.view(torch.int64).tolist()[1:]))
                    tables[process] = [[next(pieces) for _ in range(size)] for _ in range(size)]
            return tables

        own = self._publish([bytes_of(b if q != self.rank else b.new_empty(0)) for q, b in enumerate(buffers)])
        tables = self._meet("an exchange", own, finish)
        received = [sent[self._place] for table in tables for sent in table]
        if into is not None:
            for target, message in zip(into, received, strict=True):
                target.view(-1).view(torch.uint8)[: len(message)].copy_(message)
            received = [*into]
        received[self.rank] = buffers[self.rank]
        return received


@contextmanager
def _uncounted(*, messages: bool = True) -> Iterator[None]:
    """Context in which bytes and, if `messages`, messages are not counted as this worker's own."""
    before = counters.bytes_sent, counters.bytes_received, counters.messages_sent
    try:
        yield
    finally:
        counters.bytes_sent, counters.bytes_received = before[:2]
        if messages:
            counters.messages_sent = before[2]


def _copy(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    with _disable_current_modes():
        return tensor.clone(memory_format=torch.contiguous_format)
