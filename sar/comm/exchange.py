"""What travels between workers during one distributed call: tiles of rows to their readers, and gradients back.

[Note: one exchange]
An exchange goes through the plan's steps once. In each step, this worker receives one tile of rows and sends one. In a
backward it may also return the gradients of the tile it received, and add up those of the tile it sent.

`pipeline_depth` tiles are in flight while one is computed: step i + depth is posted before step i is waited for.
Buffers go back to a pool as soon as both the reader and the transport are done with them. So at most 2 * (depth + 1)
exist at a time, or twice as many where one exchange both fetches rows and returns gradients, and `Settings.tile_rows`
makes their sum fit `Config.comm_buffer_bytes`. After the last step their memory goes back to the system, because the
layers' own tensors are largest between exchanges.

The own edges are computed while the first messages travel: rows, or where only gradients do, those of the first tiles.
Of rows there are more at first: the buffers of gradients and of the tile that is computed hold them, too, as no
gradients are on their way yet. For the same reason gradients are waited for only when their buffers are needed, after
more rows are posted.

[Note: rows of the same process]
Workers of one process (`Transport.local_peers`) have their turns one after the other. All let the others read their
rows at one meeting (`Group.share`), and where gradients return, add to their totals. Then each, in its turn, goes
through the rows of its process's other workers, and after that through those of other processes as they arrive. What a
process sends in that turn are rows of all its workers, to those workers of other processes that have their turn, too.
Gradients are added by whoever has the turn, beginning with the first worker: in the same order in each epoch, to the
last bit. A second meeting ends an exchange that returns gradients, because only then a total is complete.

A caller that can (`local`) reads the rows where they lie, and adds to totals itself. Otherwise rows are copied tile by
tile, and rounded as those that leave the process are, so that the results are those of as many processes.

[Note: reading ahead]
Where memory is left to a file, shared rows are mapped, and the first use of a page that the system has dropped would
wait for the disk. So before a tile is computed the system is asked for the next one, and for where its gradients go. It
does not read their neighbours, too: where memory is short these would take the place of what is needed next. It is no
longer asked once some turns have passed in which nothing was read from a disk, and again from the next time on.

[Note: rows of a device]
Where rows are on a device and travel through CPU memory, each message has pinned memory of its own, from torch, which
uses it again once the device has read it. So copies to the device are only queued. What is sent is gathered and copied
in a stream beside the one that computes, and the host waits for that before it posts: tile k + 1 while tile k is
computed. Gradients of a tile are waited for where they are computed.

[Note: address]
A transport may match a message by sender and tag. The tag holds the number of the agreed call, the direction (rows out
or gradients back) and the tile's index in its round; the pair of workers determines the round. So a message can only
meet the receive it was meant for, in whatever order the two ends post.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sar.comm.group import Group
from sar.comm.halo_plan import HaloPlan, HaloSlice, Step
from sar.comm.rows import BufferPool, FieldRows, RowFormat
from sar.comm.settings import SMALL_TILE, UNLIMITED_ROWS, Settings
from sar.comm.statistics import counters
from sar.comm.transport import Message, Shared
from sar.raw_memory import side_stream

OUT, BACK = 0, 1
"""Where a message goes: rows to a reader, or gradients to the owner of the rows."""


class Tile(NamedTuple):
    """Rows of another worker that have come, for the edges from them to be computed."""

    halo: HaloSlice | None  # which rows of the sender's halo list; None only where there is no sender
    rows: list[Tensor] | None  # the fetched fields, (tile rows, ...) each; None in an exchange that fetches nothing
    # Where the rows' gradients are added, `GradientReturn.start` at first; None in an exchange that returns nothing.
    grads: list[Tensor] | None
    # Where `rows` have a row for each of the sender's nodes, which of them the tile's are, (tile rows,) ascending;
    # `grads` are the sender's totals then.
    sources: Tensor | None = None


OWN_ROWS = Tile(None, None, None)
"""In the place of a tile, for edges that read this worker's own rows."""


class LocalFields(NamedTuple):
    """Extra columns for readers in the same process, behind those that travel; remote readers recompute them."""

    fields: Sequence[Tensor] = ()  # of this worker, (N_src, ...) each
    totals: Sequence[Tensor] = ()  # of their gradients; see `GradientReturn`


class GradientReturn(NamedTuple):
    """Where the gradients of this worker's rows that other workers make come together."""

    totals: Sequence[Tensor]  # (N_src, ...) each, of `empty_spillable`: workers of one process add to each other's
    # Called with rows of this worker, (n,), what one reader sends for them, (n, ...), and the total to change.
    add: Callable[[Tensor, Tensor, Tensor], None]
    start: float = 0.0  # what changes nothing when it is added


@dataclass
class _Parcel:
    """Rows of a slice, or their gradients, on their way: in which buffer, and what is to be waited for."""

    halo: HaloSlice
    row: RowFormat
    buffer: Tensor
    work: Any = None

    @property
    def fields(self) -> list[FieldRows]:
        return self.row.rows(self.buffer, self.halo.rows)


_Transfer = tuple[_Parcel | None, _Parcel | None]
"""What is received, and what is sent and kept alive until it has gone; posted together."""


@dataclass(eq=False)
class Exchange:
    """The tiles of one call: exchanged in its forward, and in each backward, each time after an agreement of its own.

    Tiles are alike in all exchanges, because they follow from the widest row that will travel, in either direction.
    `both_ways` says whether one exchange may fetch rows and return gradients.
    """

    group: Group
    plan: HaloPlan
    settings: Settings
    widest: InitVar[RowFormat]
    pool: BufferPool
    signature: str  # of the call, for errors
    both_ways: InitVar[bool] = True

    def __post_init__(self, widest: RowFormat, both_ways: bool) -> None:
        plan, settings = self.plan, self.settings
        self.steps = plan.schedule(settings.tile_rows(widest, plan.mean_rows, both_ways=both_ways))
        self.depth = len(self.steps) if settings.one_shot else settings.depth
        self.first = (2 if both_ways else 1) * self.depth + 1  # transfers of rows posted at once
        self._number = 0  # of the agreed call that the current exchange belongs to
        # Rows in a tile that does not travel: there is one at a time, so it may be larger than `Settings.tile_rows`.
        row_bytes = max(widest.row_bytes, 1)
        rows = min(settings.buffer_bytes // 4 // row_bytes, max(plan.mean_rows // 2, SMALL_TILE // row_bytes))
        self._local_rows = 1 << max(rows, 1).bit_length() - 1
        self.shared: dict[int, Shared] = {}  # what the workers of this process share, by rank
        self.device = self.group.device  # where rows are
        self.streams: Any = None  # torch's module for it, where rows do not travel there: see [Note: rows of a device]

    def exchange_tiles(
        self,
        device: torch.device,
        fields: list[Tensor] | None = None,
        *,
        keep: bool = False,
        local: LocalFields | None = None,
        returns: GradientReturn | None = None,
        own_first: bool = False,
    ) -> Iterator[Tile]:
        """Iterate over the tiles that this worker receives, and return gradients: see [Note: one exchange].

        The first transfers are posted at once, the rest as the iterator is consumed. `OWN_ROWS` stands where the own
        edges are to be computed.

        Args:
            device: where rows and gradients are computed on.
            fields: this worker's rows that others read, (N_src, ...) each; None to fetch nothing.
            keep: leave the fetched rows to the caller, instead of reusing their buffers after each step; in a backward,
                whether they were left to it.
            local: given where the caller can read the rows of workers of the same process where they lie, by
                `Tile.sources`; with the columns that only these need.
            returns: where gradients go; None to return none.
            own_first: let `OWN_ROWS` come first, as it does wherever rows are fetched.
        """
        self._number = self.group.calls
        crosses = device.type not in ("cpu", "meta") and self.group.device.type == "cpu"
        self.device, self.streams = device, getattr(torch, device.type) if crosses else None
        rows, totals = list(fields or ()), [] if returns is None else [total.detach() for total in returns.totals]
        several = len(self.group.local_peers) > 1
        if several:
            self._count(rows, totals)
            if local is not None and self._changes_on_its_way(rows, totals, keep=keep):
                local = None
            if local is not None:
                rows += local.fields if fields is not None else ()
                totals += (total.detach() for total in local.totals)
        self.shared = self.group.share(rows, totals, self.signature, in_order=returns is not None)
        outward = None if fields is None else _Outward(self, device, fields, keep)
        backward = None if returns is None else _Backward(self, device, returns)
        if outward is not None:
            outward.post(self.first)
        own_first = own_first or several or outward is not None
        here: Iterator[Tile] = iter(())
        if local is not None and several:
            here = self._read_in_place(fields is not None)
        elif several:
            here = self._copied(fields is not None, keep, returns)
        travelling = self._walk(outward, backward, own_after=-1 if own_first else self.depth + 1)
        return self._walk_all(own_first, here, travelling, meets=several and returns is not None)

    def _walk_all(
        self, own_first: bool, here: Iterator[Tile], travelling: Iterator[Tile], *, meets: bool
    ) -> Iterator[Tile]:
        """The tiles of this process, and then those of others; their buffers are gone before the workers meet."""
        totals = self.shared[self.group.rank].added_to
        if own_first:
            yield OWN_ROWS
        yield from here
        yield from travelling
        self.shared = {}
        if meets:
            self.group.share([], [], f"end of {self.signature}")
            for total in totals:
                total.will_need()

    def _walk(self, outward: "_Outward | None", backward: "_Backward | None", own_after: int) -> Iterator[Tile]:
        """The tiles that travel, and after so many steps, or the last one, the own edges; not where that is below 0."""
        for i, step in enumerate(self.steps):
            if i == own_after:
                yield OWN_ROWS
            rows = grads = None
            if outward is not None:
                outward.post(i + self.depth + 1)
                rows = outward.receive()
            if backward is not None:
                backward.accumulate_received(self.depth)
                grads = backward.start(step)
            if step.receive is not None:
                yield Tile(step.receive, rows, grads)
            if backward is not None:
                backward.post(step)
            if outward is not None:
                outward.finish()
        if own_after >= len(self.steps):
            yield OWN_ROWS
        if backward is not None:
            backward.accumulate_received(0)
        self.pool.clear()

    # -- rows of the same process

    def _count(self, rows: list[Tensor], totals: list[Tensor]) -> None:
        """Count what would travel between processes: rows that this worker reads, and its own that others read."""
        counts, me = self.plan.halo_counts, self.group.rank
        read, given = sum(of_owner[me] for of_owner in counts) - counts[me][me], sum(counts[me]) - counts[me][me]
        out = RowFormat.of(rows).narrowed(self.settings.wire_features).row_bytes
        back = RowFormat.of(totals).narrowed(self.settings.wire_gradients).row_bytes
        counters.bytes_sent += out * given + back * read
        counters.bytes_received += out * read + back * given

    def _changes_on_its_way(self, rows: list[Tensor], totals: list[Tensor], *, keep: bool) -> bool:
        """Whether rows are rounded in either direction, or kept by one for the other, which may be."""
        wires = self.settings.wire_features, self.settings.wire_gradients
        forms = RowFormat.of(rows), RowFormat.of(totals)
        rounded = any(form != form.narrowed(wire) for form, wire in zip(forms, wires, strict=True))
        return rounded or (keep and wires != (None, None))

    def _read_in_place(self, fetch: bool) -> Iterator[Tile]:
        """All rows and totals of each other worker of this process, and which of them it reads."""
        for halo, index, owner in self._asked_ahead(self.plan.local_slices(UNLIMITED_ROWS)):
            rows, totals = ([one.rows for one in shared] for shared in owner)
            yield Tile(halo, rows if fetch else None, totals or None, index)

    def _copied(self, fetch: bool, keep: bool, returns: GradientReturn | None) -> Iterator[Tile]:
        """Tiles of the other workers of this process, rounded, in buffers that tiles take turns in."""
        out, back = (RowFormat.of([one.rows for one in shared]) for shared in self.shared[self.group.rank])
        for halo, index, owner in self._asked_ahead(self.plan.local_slices(self._local_rows)):
            parcels = [self.parcel(halo, back), self.parcel(halo, out, from_pool=not keep)]
            grads, places = ([one.values for one in parcel.fields] for parcel in parcels)
            rows = [one.read(index, place) for one, place in zip(owner.read, places, strict=True)]
            out.narrowed(self.settings.wire_features).round(rows)
            if returns is not None:
                for grad in grads:
                    grad.fill_(returns.start)
            yield Tile(halo, rows if fetch else None, None if returns is None else grads)
            if returns is not None:
                back.narrowed(self.settings.wire_gradients).round(grads)
                for one, grad in zip(owner.added_to, grads, strict=True):
                    returns.add(index, grad, one.rows)
            for parcel in parcels[: 1 if keep else 2]:
                self.give(parcel)

    def _asked_ahead(self, halos: list[HaloSlice]) -> Iterator[tuple[HaloSlice, Tensor, Shared]]:
        """Each slice, its rows, and what their owner shares; see [Note: reading ahead]."""
        found = [(halo, self.plan.rows_of(halo), self.shared[halo.owner]) for halo in halos]
        for i, this in enumerate(found):
            for _, index, owner in found[0:2] if i == 0 else found[i + 1 : i + 2]:
                for one in (*owner.read, *owner.added_to):
                    one.will_need(index)
            yield this

    # -- rows that travel

    def parcel(self, halo: HaloSlice, row: RowFormat, *, from_pool: bool = True) -> _Parcel:
        """A parcel for a slice, with a buffer of the pool or one of its own."""
        size = row.message_bytes(halo.rows)
        if self.streams is not None:
            pin = self.streams is torch.cuda
            return _Parcel(halo, row, torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pin))
        if from_pool:
            return _Parcel(halo, row, self.pool.take(size))
        return _Parcel(halo, row, torch.empty(size, dtype=torch.uint8, device=self.group.device))

    def give(self, parcel: _Parcel | None) -> None:
        """Hand a parcel's buffer back."""
        self.pool.give(None if parcel is None or self.streams is not None else parcel.buffer)

    def post(self, place: int, direction: int, inbound: _Parcel | None, outbound: _Parcel | None) -> _Transfer:
        """Post one message each way: see [Note: address]."""
        if self.streams is not None and outbound is not None:
            self.streams.current_stream(self.device).synchronize()
        tag = (self._number % 2**12) << 19 | direction << 18 | place % 2**18
        works = self.group.post(self._message(inbound), self._message(outbound), tag, self.signature)
        for parcel, work in zip((inbound, outbound), works, strict=True):
            if parcel is not None:
                parcel.work = work
        return inbound, outbound

    def _message(self, parcel: _Parcel | None) -> Message | None:
        nbytes = 0 if parcel is None else parcel.row.message_bytes(parcel.halo.rows)
        return None if parcel is None or not nbytes else Message(self._peer(parcel.halo), parcel.buffer[:nbytes])

    def _peer(self, halo: HaloSlice) -> int:
        """With whom this worker exchanges rows or gradients of a slice."""
        return halo.owner if halo.reader == self.group.rank else halo.reader

    def wait(self, parcel: _Parcel | None) -> None:
        """Wait until a parcel is there, or has gone."""
        if parcel is not None and parcel.work is not None:
            self.group.wait(parcel.work, self._peer(parcel.halo), self.signature)


class _Outward:
    """The rows of one exchange, on their way to those who read them."""

    def __init__(self, exchange: Exchange, device: torch.device, fields: list[Tensor], keep: bool) -> None:
        self.exchange = exchange
        self.device = device
        self.fields = fields
        self.keep = keep
        self.row = RowFormat.of(fields).narrowed(exchange.settings.wire_features)
        self.posted = 0
        self.transfers: deque[_Transfer] = deque()
        self.aside: AbstractContextManager[Any] = nullcontext()  # the computing stream
        if exchange.streams is not None:
            stream = side_stream(device)
            stream.wait_stream(exchange.streams.current_stream(device))
            self.aside = exchange.streams.stream(stream)

    def post(self, steps: int) -> None:
        """Post transfers until `steps` of them have been."""
        exchange = self.exchange
        with self.aside:
            for step in exchange.steps[self.posted : steps]:
                inbound = outbound = None
                if step.receive is not None:
                    inbound = exchange.parcel(step.receive, self.row, from_pool=not self.keep)
                if step.send is not None:
                    outbound = exchange.parcel(step.send, self.row)
                    index = exchange.plan.rows_of(outbound.halo)
                    owned = exchange.shared[outbound.halo.owner].read[: len(self.fields)]
                    for column, rows in zip([one.rows for one in owned], outbound.fields, strict=True):
                        index = index.to(column.device)
                        if rows.are_like(column.device, column.dtype):
                            torch.index_select(column, 0, index, out=rows.values)
                        else:
                            rows.write(column.index_select(0, index))
                self.transfers.append(exchange.post(step.place, OUT, inbound, outbound))
        self.posted = max(self.posted, steps)

    def receive(self) -> list[Tensor] | None:
        """The rows of the oldest transfer, once they are there."""
        inbound, _ = self.transfers[0]
        self.exchange.wait(inbound)
        if inbound is None:
            return None
        return [rows.read(self.device, own.dtype) for rows, own in zip(inbound.fields, self.fields, strict=True)]

    def finish(self) -> None:
        """Let go of the oldest transfer, whose rows have been used."""
        inbound, outbound = self.transfers.popleft()
        self.exchange.wait(outbound)
        self.exchange.give(outbound)
        if not self.keep:
            self.exchange.give(inbound)


class _Backward:
    """The gradients of one exchange, on their way to the owners of the rows."""

    def __init__(self, exchange: Exchange, device: torch.device, returns: GradientReturn) -> None:
        self.exchange = exchange
        self.device = device
        self.returns = returns
        self.row = RowFormat.of(returns.totals).narrowed(exchange.settings.wire_gradients)
        self.transfers: deque[_Transfer] = deque()
        self.made: _Parcel | None = None
        self.grads: list[Tensor] = []

    def start(self, step: Step) -> list[Tensor]:
        """Where the gradients of the step's received tile go: the message itself, where it needs no conversion."""
        self.made, self.grads = None, []
        if step.receive is not None:
            self.made = self.exchange.parcel(step.receive, self.row)
            self.grads = [
                rows.values.fill_(self.returns.start)
                if rows.are_like(self.device, total.dtype)
                else torch.full(rows.values.shape, self.returns.start, dtype=total.dtype, device=self.device)
                for rows, total in zip(self.made.fields, self.returns.totals, strict=True)
            ]
        return self.grads

    def post(self, step: Step) -> None:
        """Send the gradients of the step's received tile, and expect those of the tile that it sent."""
        for grad, rows in zip(self.grads, self.made.fields if self.made is not None else (), strict=True):
            if not rows.are_like(grad.device, grad.dtype):
                rows.write(grad)
        inbound = None if step.send is None else self.exchange.parcel(step.send, self.row)
        self.transfers.append(self.exchange.post(step.place, BACK, inbound, self.made))

    def accumulate_received(self, in_flight: int) -> None:
        """Add up what has come, until no more than `in_flight` transfers are left."""
        while len(self.transfers) > in_flight:
            inbound, outbound = self.transfers.popleft()
            self.exchange.wait(inbound)
            if inbound is not None:
                index = self.exchange.plan.rows_of(inbound.halo)
                owned = self.exchange.shared[inbound.halo.owner].added_to[: len(self.returns.totals)]
                for total, rows in zip([one.rows for one in owned], inbound.fields, strict=True):
                    self.returns.add(index.to(total.device), rows.read(total.device, total.dtype), total)
            self.exchange.wait(outbound)
            self.exchange.give(outbound)
            self.exchange.give(inbound)
