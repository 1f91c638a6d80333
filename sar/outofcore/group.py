"""The group as one virtual worker sees it: p = W x V workers, of which V meet in this process."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sar.comm.group import Group
from sar.comm.replicas import all_gather_text, described
from sar.comm.statistics import counters
from sar.errors import ConfigError, PeerError
from sar.outofcore.residency import Residency
from sar.outofcore.spill import Published
from sar.outofcore.turns import Turns
from sar.raw_memory import resolved

_REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


class VirtualGroup(Group):
    """One virtual worker's end of the group: see [Note: virtual workers].

    Args:
        outer: the group of the W processes.
        turns: of this process.
        place: which of its V workers this is.
        residency: what keeps its tensors on a disk; None where they stay in memory.
    """

    def __init__(self, outer: Group, turns: Turns, place: int, residency: Residency | None = None) -> None:
        size = turns.size
        super().__init__(dist.HashStore(), outer.rank * size + place, outer.world_size * size, outer.device)
        self.outer = outer
        self.turns = turns
        self.place = place
        self.residency = residency
        self._away = 0.0  # seconds in which others had the turn
        self._thread = threading.get_ident()

    # -- errors

    def _stop(self, generation: int, own: str, told: str, *, final: bool, known: bool) -> None:
        final = final or self.outer.final
        with self._lock:
            if self.stopped is None:
                self.stopped, self.final = own, final
        self.turns.fail(PeerError(own), self.place)
        self.outer.stop(self.outer.generation, told, final=final)

    def _go_on(self, step: int) -> int:
        try:
            self.turns.rejoin(self.place)
        except PeerError as gone:
            self.abort(gone, final=True)
            raise
        self.calls = 0
        least: int = self.meet("a recovery", "recover", step, lambda steps: self.outer.recover(min(steps)), afresh=True)
        return least

    def _whereabouts(self, call: str) -> str:
        texts = all_gather_text(partial(self.all_gather, call=call), call)
        return "\n".join(f"  worker {rank}: {text}" for rank, text in enumerate(texts))

    # -- meetings

    def meet(
        self, kind: str, call: str, brought: Any, finish: Callable[[list[Any]], Any], *, afresh: bool = False
    ) -> Any:
        """Meet the other workers of this process; see `Turns.meet`."""
        self.check()
        self.turns.latest[self.place] = call
        with self.guard(), self._waiting(call, "another virtual worker"):
            if threading.get_ident() != self._thread:
                raise ConfigError(
                    f"A thread that virtual worker {self.rank} has started makes a distributed call: {call}. Make them "
                    "in the thread that runs the script."
                )
            left = None

            def leave() -> None:
                nonlocal left
                if self.residency is not None:
                    self.residency.leave()
                left = time.perf_counter()

            result = self.turns.meet(self.place, kind, brought, finish, leave, afresh=afresh)
            if left is not None:
                self._away += time.perf_counter() - left
            return result

    def clock(self) -> float:
        """Seconds of this worker's turns."""
        return time.perf_counter() - self._away

    def all_gather(self, tensor: Tensor, call: str) -> list[Tensor]:
        """Gather one small CPU tensor of equal shape from every worker; only inside an agreed call."""

        def finish(brought: list[Tensor]) -> list[Tensor]:
            mine = torch.stack(brought)
            return [one for theirs in self.outer.all_gather(mine, call) for one in theirs]

        gathered = self.meet(f"a gathering of {described(tensor)}", call, _copy(tensor), _unseen(finish))
        counters.bytes_sent += tensor.nbytes * (self.world_size - 1)
        counters.bytes_received += tensor.nbytes * (self.world_size - 1)
        with _disable_current_modes():
            return [one.clone() for one in gathered]

    def all_reduce(self, tensor: Tensor, op: Any, call: str) -> None:
        """As `Group.all_reduce`, in the order of the workers."""
        combine = next((combine for known, combine in _REDUCTIONS.items() if op == known), None)
        if combine is None:
            raise ConfigError(f"Virtual workers cannot combine tensors by {op}.")

        def finish(brought: list[Published]) -> Tensor:
            total = brought[0].rows.clone()
            for one in brought[1:]:
                combine(total, one.rows, out=total)  # type: ignore[call-arg]
            if self.outer.world_size > 1:
                self.outer.all_reduce(total, op, call)
            return total

        kind, mine = f"a reduction by {op} of {described(tensor)}", self.publish([tensor])[0]
        tensor.copy_(self.wait_for(lambda: self.meet(kind, call, mine, _unseen(finish)), call))
        counters.bytes_sent += tensor.nbytes
        counters.bytes_received += tensor.nbytes

    def broadcast(self, tensor: Tensor, call: str) -> None:
        """As `Group.broadcast`."""

        def finish(brought: list[Published]) -> Tensor:
            given = brought[0].rows
            if self.outer.world_size > 1:
                given = given.clone()
                self.outer.broadcast(given, call)
            return given

        flat = tensor.view(-1)
        kind, mine = f"a broadcast of {described(tensor)}", self.publish([flat if self.place == 0 else flat[:0]])[0]
        given = self.wait_for(lambda: self.meet(kind, call, mine, _unseen(finish)), call)
        if self.rank:
            flat.copy_(given)
        counters.bytes_sent += tensor.nbytes if self.rank == 0 else 0
        counters.bytes_received += tensor.nbytes if self.rank != 0 else 0

    def publish(self, tensors: Sequence[Tensor]) -> list[Published]:
        """Rows of this worker for those of the same process to read."""
        if self.residency is None:
            return [Published(_copy(tensor)) for tensor in tensors]
        return [self.residency.publish(resolved(tensor)) for tensor in tensors]

    def open_to_others(self, totals: Sequence[Tensor]) -> list[Published]:
        """Tensors of this worker for those of the same process to add to."""
        if self.residency is None:
            return [Published(total) for total in totals]
        return [self.residency.open_to_others(total) for total in totals]

    def share(self, brought: Any, call: str, *, afresh: bool = False) -> list[Any]:
        """What each worker of this process brings, by place; `afresh` as in `Turns.meet`."""
        found: list[Any] = self.meet("a sharing", call, brought, lambda all_brought: all_brought, afresh=afresh)
        return found

    def exchange(self, call: str, buffers: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> list[Tensor]:
        """As `Group.exchange`."""
        arrived = self._exchange(call, buffers)
        received = list(arrived if into is None else into)
        received[self.rank] = buffers[self.rank]
        if into is not None:
            for source, message in enumerate(arrived):
                if source != self.rank:
                    received[source].view(-1).view(torch.uint8).copy_(message)
        return received

    def _exchange(self, call: str, buffers: Sequence[Tensor]) -> list[Tensor]:
        """The bytes that every worker sent to this one, by rank; `buffers[q]` goes to worker q, as bytes."""
        size, mine = (
            self.turns.size,
            self.publish([_bytes(b if q != self.rank else b.new_empty(0)) for q, b in enumerate(buffers)]),
        )

        def finish(brought: list[list[Published]]) -> list[list[list[Tensor]]]:
            """[process][from][to]: what the workers of each process send to those of this one."""
            tables = []
            for process in range(self.outer.world_size):
                there = slice(process * size, (process + 1) * size)
                tables.append([[one.rows for one in sent[there]] for sent in brought])
            messages = [torch.empty(0)] * len(tables)
            for process, table in enumerate(tables):
                messages[process] = _packed(table) if process != self.outer.rank else _packed([])
            for process, message in enumerate(self.outer.exchange(call, messages)):
                if process != self.outer.rank:
                    tables[process] = _unpacked(message, size)
            return tables

        tables = self.meet("an exchange", call, mine, _unseen(finish))
        found = [sent[self.place] for table in tables for sent in table]
        counters.bytes_sent += sum(len(one.rows) for one in mine)
        counters.bytes_received += sum(map(len, found))
        counters.messages_sent += sum(len(one.rows) > 0 for one in mine)
        return found


def _unseen(finish: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make what belongs to all workers without telling the one at work that it is its own, and that it moves bytes."""

    def call(brought: Any) -> Any:
        moved = counters.bytes_sent, counters.bytes_received, counters.messages_sent
        try:
            with _disable_current_modes():
                return finish(brought)
        finally:
            counters.bytes_sent, counters.bytes_received, counters.messages_sent = moved

    return call


def _copy(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    with _disable_current_modes():
        return tensor.clone(memory_format=torch.contiguous_format)


def _bytes(tensor: Tensor) -> Tensor:
    tensor = resolved(tensor.detach()).to("cpu").contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # one element may have any stride


def _packed(table: list[list[Tensor]]) -> Tensor:
    """Bytes that begin with their number: the lengths of messages, and the messages."""
    flat = [one for row in table for one in row]
    lengths = torch.tensor([0, *map(len, flat)], dtype=torch.int64)
    lengths[0] = lengths.nbytes + lengths.sum()
    return torch.cat([lengths.view(torch.uint8), *flat])


def _unpacked(message: Tensor, size: int) -> list[list[Tensor]]:
    lengths = message[: 8 * (size * size + 1)].view(torch.int64).tolist()[1:]
    pieces = iter(message[8 * (size * size + 1) :].split(lengths))
    return [[next(pieces) for _ in range(size)] for _ in range(size)]
