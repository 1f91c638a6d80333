"""The exchange of one distributed call: tiles of rows to the workers that read them, and gradients back.

[Note: one exchange]
An exchange goes through the plan's steps once. In each step, this worker receives one tile of rows and sends one. In a
backward it may also return the gradients of the tile it received, and add up those of the tile it sent.

`pipeline_depth` tiles are in flight while one is computed: step i + depth is posted before the wait for step i. Buffers
go back to a pool as soon as both the reader and the transport are done with them. So at most 2 * (depth + 1) exist at a
time, or twice as many if one exchange both fetches rows and returns gradients. `Layout.of` chooses tiles for
which they fit `Config.comm_buffer_bytes`. After the last step we keep an eighth of that, because fresh pages for each
exchange took 6 to 8 % of an epoch's processor time on a small graph. We return the rest to the system, because the
layers' own tensors are largest between exchanges.

A worker computes its own edges while the first messages travel: rows, or, in an exchange without rows, the gradients of
the first tiles. At the start, more tiles of rows are in flight, because they may also use the buffers of gradients and
of the computed tile. For the same reason we wait for gradients only when their buffers are needed, after posting more
rows.

[Note: rows of a device]
If rows are on a device and travel through CPU memory, each message has separate pinned memory, which torch reuses once
the device has read it. So copies to the device are only queued. Rows to send are gathered and copied in a
second stream, and the host waits for this stream before it posts: tile k + 1 is gathered while tile k is computed. The
host waits for the gradients of a tile in the stream that computes them.

[Note: address]
A transport may match a message by sender and tag. The tag holds the number of the agreed call, the direction (rows out
or gradients back) and the tile's index in its round; the pair of workers determines the round. So a message can only
meet the receive it was meant for, in whatever order the two ends post.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sar.comm.rows import RowFormat
from sar.comm.tiles import OWN_ROWS, ExchangeSpec, HaloSlice, OwnRows, Tile
from sar.comm.transport import Message, Wait
from sar.tensors.views import to_device

OUT, BACK = 0, 1
"""Direction of a message: rows to a reader, or gradients to the owner of the rows."""

KEPT_SHARE = 8
"""Divisor of `Config.comm_buffer_bytes`: the buffers that a worker keeps between exchanges."""


@dataclass(eq=False, slots=True)
class _InFlight:
    """A buffer with the rows of a slice, or their gradients, and the wait before it may be used again."""

    halo: HaloSlice
    peer: int
    message: Message | None  # the used bytes of the buffer; None for a slice of rows without elements
    buffer: Tensor
    fields: list[Tensor]  # views of the buffer, (rows, ...) each
    wait: Wait | None = None


_Transfer = tuple[_InFlight | None, _InFlight | None]
"""A buffer being received and one being sent, posted together. The queue keeps both alive until the wait."""


@cache
def side_stream(device: torch.device) -> Any:
    """The stream for copies; one for each device, because torch reuses freed memory only on the stream it came from."""
    return getattr(torch, device.type).Stream(device)


@dataclass(eq=False)
class Exchange(ExchangeSpec):
    """One pass through a layout, in the forward or the backward of a call that the workers have agreed on.

    The first transfers are posted at once, the rest as `tiles` is consumed: see [Note: one exchange].
    """

    def __post_init__(self) -> None:
        self.out = None if self.fields is None else RowFormat.of(self.fields, self.settings.wire_dtype_features)
        self.back = None
        if self.returns is not None:
            self.back = RowFormat.of(self.returns.totals, self.returns.half or self.settings.wire_dtype_gradients)
        alone = len(self.group.local_peers) == 1
        # Rows of this worker, or of all workers of its process.
        self._rows: OwnRows = OwnRows(self) if alone else self.group.rows_of_process(self)
        # Workers that share a process would each keep buffers while they wait for their turns.
        self._bytes_to_keep = self.settings.comm_buffer_bytes // KEPT_SHARE if alone else 0
        # The step before which own edges are computed. Without rows, gradients of the first tiles travel meanwhile.
        first = self.own_first or self.fields is not None or not alone
        self._own_before = 0 if first else min(self.layout.depth + 1, len(self.layout.steps))
        self._tag = (self.group.call_id % 2**12) << 19  # the number of the agreed call, of [Note: address]
        self._streams: Any = None  # torch's module for [Note: rows of a device]
        self._aside: AbstractContextManager[Any] = nullcontext()  # the stream that gathers rows
        if self.device.type not in ("cpu", "meta") and self.group.device.type == "cpu":
            self._streams = getattr(torch, self.device.type)
            if self.fields is not None:
                stream = side_stream(self.device)
                stream.wait_stream(self._streams.current_stream(self.device))
                self._aside = self._streams.stream(stream)
        self._posted = 0  # steps whose rows have been posted
        self._rows_in_flight: deque[_Transfer] = deque()
        self._grads_in_flight: deque[_Transfer] = deque()
        self._returned: _InFlight | None = None  # the gradients of the tile that is computed
        if self.fields is not None:
            self._post_rows(self.layout.first)

    def tiles(self) -> Iterator[Tile]:
        """Iterate over tiles of this process's other workers, and those of other processes as they arrive.

        `OWN_ROWS` is among them, for the caller to compute its own edges.
        """
        if self._own_before == 0:
            yield OWN_ROWS
        yield from self._rows.tiles()
        for i in range(len(self.layout.steps)):
            if i == self._own_before > 0:
                yield OWN_ROWS
            tile = self.receive(i)
            if tile is not None:
                yield tile
            self.give_back(i, tile)
        if self._own_before == len(self.layout.steps) > 0:
            yield OWN_ROWS
        if self.returns is not None:
            self._add_returned(0)
        self.group.pool.shrink(self._bytes_to_keep)
        self._rows.close()

    def receive(self, i: int) -> Tile | None:
        """The tile that this worker receives in step i, once it has arrived. Posts the rows of the next steps."""
        step, depth = self.layout.steps[i], self.layout.depth
        rows = grads = None
        if self.fields is not None:
            if self._posted < i + depth + 1:
                self._post_rows(i + depth + 1)
            inbound, _ = self._rows_in_flight[0]
            if inbound is not None:
                if inbound.wait is not None:
                    self.group.wait_for(inbound.wait, self.signature, peer=inbound.peer)
                rows = []
                for column, own in zip(inbound.fields, self.fields, strict=True):
                    here = column if column.device == self.device else to_device(column, self.device)
                    rows.append(here.to(own.dtype))
        if self.returns is not None:
            self._add_returned(depth)
            if step.receive is not None:
                self._returned = self._buffer(step.receive, self.back)
                grads = self.returns.sums(self._returned.fields, self.device)
        return None if step.receive is None else Tile(step.receive, rows, grads)

    def give_back(self, i: int, tile: Tile | None) -> None:
        """Return the gradients of the tile received in step i, and its buffers, to where they came from."""
        if self.returns is not None:
            # Send the gradients of the received tile, and post the receive for those of the tile that was sent.
            step, returned, self._returned = self.layout.steps[i], self._returned, None
            if tile is not None and returned is not None:
                self.returns.write(tile.grads or (), returned.fields)
            arriving = None if step.send is None else self._buffer(step.send, self.back)
            self._grads_in_flight.append(self._post(step.place, BACK, arriving, returned))
        if self.fields is not None:
            inbound, outbound = self._rows_in_flight.popleft()
            self._free(outbound, None if self.keep else inbound)

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
                    self._rows.gather(step.send, outbound.buffer, outbound.fields)
                self._rows_in_flight.append(self._post(step.place, OUT, inbound, outbound))
        self._posted = steps

    # -- gradients

    def _add_returned(self, in_flight: int) -> None:
        """Add returned gradients to the totals until at most `in_flight` transfers are left."""
        while len(self._grads_in_flight) > in_flight:
            inbound, outbound = self._grads_in_flight.popleft()
            if inbound is not None and self.returns is not None:
                if inbound.wait is not None:
                    self.group.wait_for(inbound.wait, self.signature, peer=inbound.peer)
                self._rows.add(inbound.halo, inbound.buffer, inbound.fields)
            self._free(outbound, inbound)

    # -- messages

    def _buffer(self, halo: HaloSlice, row: RowFormat | None, *, from_pool: bool = True) -> _InFlight:
        """A buffer for the rows of a slice, from the pool unless the caller will keep it."""
        assert row is not None
        layout = row.layout(halo.end - halo.begin)
        if self._streams is not None:
            pin = self._streams is torch.cuda
            buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device="cpu", pin_memory=pin)
        elif from_pool:
            buffer = self.group.pool.take(layout.nbytes)
        else:
            buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=self.group.device)
        peer = halo.owner if halo.reader == self.group.rank else halo.reader
        message = Message(peer, buffer[: layout.nbytes]) if layout.nbytes else None
        return _InFlight(halo, peer, message, buffer, layout.views(buffer))

    def _post(self, place: int, direction: int, inbound: _InFlight | None, outbound: _InFlight | None) -> _Transfer:
        """Post one message each way: see [Note: address]."""
        if self._streams is not None and outbound is not None:
            self._streams.current_stream(self.device).synchronize()
        receive = None if inbound is None else inbound.message
        send = None if outbound is None else outbound.message
        waits = self.group.post(receive, send, self._tag | direction << 18 | place % 2**18, self.signature)
        for each, wait in zip((inbound, outbound), waits, strict=True):
            if each is not None:
                each.wait = wait
        return inbound, outbound

    def _free(self, sent: _InFlight | None, received: _InFlight | None) -> None:
        """Wait until a message has been sent, and return its buffer to the pool, and that of one that has arrived."""
        if sent is not None and sent.wait is not None:
            self.group.wait_for(sent.wait, self.signature, peer=sent.peer)
        for each in (sent, received) if self._streams is None else ():
            if each is not None:
                self.group.pool.give(each.buffer)
