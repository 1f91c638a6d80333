"""The exchange of one distributed call: tiles of rows to the workers that read them, and gradients back.

[Note: one exchange]
An exchange goes through the plan's steps once. In each step, this worker receives one tile of rows and sends one. In a
backward it may also return the gradients of the tile it received, and add up those of the tile it sent.

`pipeline_depth` tiles are in flight while one is computed: step i + depth is posted before the wait for step i. Buffers
go back to a pool as soon as both the reader and the transport are done with them. So at most 2 * (depth + 1) exist at a
time, or twice as many if one exchange both fetches rows and returns gradients. `Settings.tile_rows` chooses tiles for
which they fit `Config.comm_buffer_bytes`. After the last step we keep an eighth of that, because fresh pages for each
exchange took 6 to 8 % of an epoch's processor time on a small graph. We return the rest to the system, because the
layers' own tensors are largest between exchanges.

A worker computes its own edges while the first messages travel: rows, or, in an exchange without rows, the gradients of
the first tiles. At the start, more tiles of rows are in flight, because they may use the buffers of gradients and of
the tile that is computed, too. For the same reason we wait for gradients only when their buffers are needed, after
posting more rows.

[Note: rows of a device]
If rows are on a device and travel through CPU memory, each message has pinned memory of its own, from torch, which uses
it again once the device has read it. So copies to the device are only queued. Rows to send are gathered and copied in a
second stream, and the host waits for this stream before it posts: tile k + 1 is gathered while tile k is computed. The
host waits for the gradients of a tile in the stream that computes them.

[Note: address]
A transport may match a message by sender and tag. The tag holds the number of the agreed call, the direction (rows out
or gradients back) and the tile's index in its round; the pair of workers determines the round. So a message can only
meet the receive it was meant for, in whatever order the two ends post.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sar.comm.group import Group
from sar.comm.halo_plan import HaloPlan, HaloSlice, Step
from sar.comm.rows import BufferPool, RowFormat
from sar.comm.same_process import SharedRows
from sar.comm.settings import SMALL_TILE, Settings
from sar.comm.tiles import OWN_ROWS, GradientReturn, LocalFields, Tile
from sar.comm.transport import Message
from sar.tensor_views import to_device

OUT, BACK = 0, 1
"""Direction of a message: rows to a reader, or gradients to the owner of the rows."""

KEPT_SHARE = 8
"""Divisor of `Config.comm_buffer_bytes`: the buffers that a worker keeps between exchanges."""


class Layout(NamedTuple):
    """The tiles of an exchange, from the widest row of either direction, so that forward and backward agree."""

    steps: list[Step]
    depth: int  # steps in flight while one is computed
    first: int  # steps whose rows are posted at the start, before any buffer holds gradients
    local_rows: int  # rows of a tile that is copied within the process; larger, because only one exists at a time

    @classmethod
    def of(cls, plan: HaloPlan, settings: Settings, widest: RowFormat, *, both_ways: bool = True) -> "Layout":
        """The layout for rows of at most `widest`; `both_ways` if one exchange may fetch rows and return gradients."""
        steps = plan.schedule(settings.tile_rows(widest, plan.mean_rows, both_ways=both_ways))
        depth = len(steps) if settings.one_shot else settings.depth
        row_bytes = max(widest.row_bytes, 1)
        rows = min(settings.buffer_bytes // 4 // row_bytes, max(plan.mean_rows // 2, SMALL_TILE // row_bytes))
        return cls(steps, depth, (2 if both_ways else 1) * depth + 1, 1 << max(rows, 1).bit_length() - 1)


@dataclass(eq=False, slots=True)
class _InFlight:
    """A buffer with the rows of a slice, or their gradients, and the work to wait for before it may be used again."""

    halo: HaloSlice
    peer: int
    buffer: Tensor
    nbytes: int  # of the message, at the start of the buffer
    fields: list[Tensor]
    work: Any = None


NOTHING = nullcontext()


@cache
def side_stream(device: torch.device) -> Any:
    """The stream for copies; one for each device, because torch reuses freed memory only on the stream it came from."""
    return getattr(torch, device.type).Stream(device)


_Transfer = tuple[_InFlight | None, _InFlight | None]
"""A buffer being received and one being sent, posted together. The queue keeps both alive until the wait."""


@dataclass(eq=False)
class Exchange:
    """One pass through a layout, in the forward or the backward of a call that the workers have agreed on."""

    group: Group
    plan: HaloPlan
    settings: Settings
    layout: Layout
    pool: BufferPool
    signature: str  # text of the call, for errors
    _rows_in_flight: deque[_Transfer] = field(init=False, default_factory=deque)
    _grads_in_flight: deque[_Transfer] = field(init=False, default_factory=deque)
    _posted: int = field(init=False, default=0)  # steps whose rows have been posted

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

        The first transfers are posted at once, the rest as the iterator is consumed. The caller computes its own edges
        when `OWN_ROWS` comes.

        Args:
            device: device on which rows and gradients are computed.
            fields: this worker's rows that others read, (N_src, ...) each; None to fetch nothing.
            keep: leave the fetched rows to the caller, instead of reusing their buffers after each step. In a backward,
                whether the forward has done so.
            local: further fields for workers of the same process, if the caller can read their rows in place, by
                `Tile.sources`; None if it cannot.
            returns: accumulates the returned gradients; None to return none.
            own_first: yield `OWN_ROWS` first, as happens anyway if rows are fetched.
        """
        group, settings = self.group, self.settings
        crosses = device.type not in ("cpu", "meta") and group.device.type == "cpu"
        self._number = group.calls  # number of the agreed call, part of the address of its messages
        self.device = device
        self.streams = getattr(torch, device.type) if crosses else None  # torch's module for [Note: rows of a device]
        self.fields, self.keep, self.returns = fields, keep, returns
        self.out = None if fields is None else RowFormat.of(fields).narrowed(settings.wire_features)
        self.back = None if returns is None else RowFormat.of(returns.totals).narrowed(settings.wire_gradients)
        # Columns to send and totals to add to, by owner: this worker's, or those of all workers of its process.
        self._columns: Mapping[int, Sequence[Tensor]] = {group.rank: fields or ()}
        self._totals: Mapping[int, Sequence[Tensor]] = {group.rank: () if returns is None else returns.totals}
        shared = None
        if len(group.local_peers) > 1:
            shared = SharedRows(
                group,
                self.plan,
                settings,
                self.signature,
                fields=fields,
                local=local,
                returns=returns,
                keep=keep,
                tile_rows=self.layout.local_rows,
            )
            self._columns, self._totals = shared.columns, shared.totals
            own_first = True
        self._aside: AbstractContextManager[Any] = NOTHING  # the stream that gathers rows
        if self.streams is not None and fields is not None:
            stream = side_stream(device)
            stream.wait_stream(self.streams.current_stream(device))
            self._aside = self.streams.stream(stream)
        if fields is not None:
            self._post_rows(self.layout.first)
        return self._walk(shared, own_first or fields is not None)

    def _walk(self, shared: SharedRows | None, own_first: bool) -> Iterator[Tile]:
        """Yield `OWN_ROWS`, tiles of this process's other workers, and tiles of other processes as they arrive."""
        steps, depth, returns = self.layout.steps, self.layout.depth, self.returns
        own_after = -1 if own_first else depth + 1
        if own_first:
            yield OWN_ROWS
        if shared is not None:
            yield from shared.tiles()
        for i, step in enumerate(steps):
            if i == own_after:
                yield OWN_ROWS
            rows = grads = returned = None
            if self.fields is not None:
                if self._posted < i + depth + 1:
                    self._post_rows(i + depth + 1)
                inbound, outbound = self._rows_in_flight[0]
                if inbound is not None:
                    self._wait(inbound)
                    columns = zip(inbound.fields, self.fields, strict=True)
                    rows = [to_device(column, self.device).to(own.dtype) for column, own in columns]
            if returns is not None:
                self._add_returned(depth)
                grads = []
                if step.receive is not None:
                    returned = self._buffer(step.receive, self.back)
                    grads = [  # views of the message if they need no conversion
                        place.fill_(returns.start)
                        if _is_alike(place, self.device, total.dtype)
                        else torch.full(place.shape, returns.start, dtype=total.dtype, device=self.device)
                        for place, total in zip(returned.fields, returns.totals, strict=True)
                    ]
            if step.receive is not None:
                yield Tile(step.receive, rows, grads)
            if returns is not None:
                # Send the gradients of the received tile, and post the receive for those of the tile that was sent.
                for grad, place in zip(grads or (), returned.fields if returned is not None else (), strict=True):
                    if not _is_alike(place, grad.device, grad.dtype):
                        place.copy_(grad, non_blocking=True)
                arriving = None if step.send is None else self._buffer(step.send, self.back)
                self._grads_in_flight.append(self._post(step.place, BACK, arriving, returned))
            if self.fields is not None:
                inbound, outbound = self._rows_in_flight.popleft()
                self._wait(outbound)
                self._give(outbound, None if self.keep else inbound)
        if own_after >= len(steps):
            yield OWN_ROWS
        if returns is not None:
            self._add_returned(0)
        # Workers that share a process would each keep buffers while they wait for their turns.
        self.pool.shrink(self.settings.buffer_bytes // KEPT_SHARE if shared is None else 0)
        if shared is not None:
            shared.close()

    # -- rows

    def _post_rows(self, steps: int) -> None:
        """Gather and post rows until `steps` steps have been posted."""
        with self._aside:
            for step in self.layout.steps[self._posted : steps]:
                inbound = outbound = None
                if step.receive is not None:
                    inbound = self._buffer(step.receive, self.out, from_pool=not self.keep)
                if step.send is not None:
                    outbound = self._buffer(step.send, self.out)
                    index = self.plan.rows_of(step.send)
                    for column, place in zip(self._columns[step.send.owner], outbound.fields, strict=False):
                        index = index.to(column.device)
                        if _is_alike(place, column.device, column.dtype):
                            torch.index_select(column, 0, index, out=place)
                        else:
                            place.copy_(column.index_select(0, index), non_blocking=True)
                self._rows_in_flight.append(self._post(step.place, OUT, inbound, outbound))
        self._posted = steps

    # -- gradients

    def _add_returned(self, in_flight: int) -> None:
        """Add returned gradients to the totals until at most `in_flight` transfers are left."""
        while len(self._grads_in_flight) > in_flight:
            inbound, outbound = self._grads_in_flight.popleft()
            self._wait(inbound)
            if inbound is not None and self.returns is not None:
                index = self.plan.rows_of(inbound.halo)
                for total, place in zip(self._totals[inbound.halo.owner], inbound.fields, strict=False):
                    self.returns.add(index.to(total.device), to_device(place, total.device).to(total.dtype), total)
            self._wait(outbound)
            self._give(outbound, inbound)

    # -- messages

    def _buffer(self, halo: HaloSlice, row: RowFormat | None, *, from_pool: bool = True) -> _InFlight:
        """A buffer for the rows of a slice, from the pool unless the caller will keep it."""
        assert row is not None
        nbytes = row.layout(halo.end - halo.begin).nbytes
        if self.streams is not None:
            pin = self.streams is torch.cuda
            buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pin)
        elif from_pool:
            buffer = self.pool.take(nbytes)
        else:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.group.device)
        peer = halo.owner if halo.reader == self.group.rank else halo.reader
        return _InFlight(halo, peer, buffer, nbytes, row.rows(buffer, halo.end - halo.begin))

    def _give(self, *parcels: _InFlight | None) -> None:
        """Return buffers to the pool."""
        for parcel in parcels if self.streams is None else ():
            if parcel is not None:
                self.pool.give(parcel.buffer)

    def _post(self, place: int, direction: int, inbound: _InFlight | None, outbound: _InFlight | None) -> _Transfer:
        """Post one message each way: see [Note: address]."""
        if self.streams is not None and outbound is not None:
            self.streams.current_stream(self.device).synchronize()
        tag = (self._number % 2**12) << 19 | direction << 18 | place % 2**18
        receive = send = None
        if inbound is not None and inbound.nbytes:
            receive = Message(inbound.peer, inbound.buffer[: inbound.nbytes])
        if outbound is not None and outbound.nbytes:
            send = Message(outbound.peer, outbound.buffer[: outbound.nbytes])
        works = self.group.post(receive, send, tag, self.signature)
        if inbound is not None:
            inbound.work = works[0]
        if outbound is not None:
            outbound.work = works[1]
        return inbound, outbound

    def _wait(self, parcel: _InFlight | None) -> None:
        """Wait until a message has arrived, or has been sent."""
        if parcel is not None and parcel.work is not None:
            self.group.wait(parcel.work, parcel.peer, self.signature)


def _is_alike(place: Tensor, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether values on this device in this dtype can be written to a message and read without a conversion."""
    return (place.device, place.dtype) == (device, dtype)
