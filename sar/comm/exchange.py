"""Everything that travels between workers during one distributed call: tiles out, tiles in, gradients home.

[Note: one sweep]
A sweep walks the plan's steps once. In each, this worker receives one tile of rows and sends one; in a backward it may
also send the gradients of the tile it received and take in those of the tile it sent. `pipeline_depth` tiles are in
flight while one is computed: step i + depth is posted before step i is waited for. Buffers come from a pool and are
handed back as soon as both the reader and the wire are done with them, so at most 2 * (depth + 1) exist at a time, or
twice as many where one sweep both fetches and sends home. The tile size makes their sum fit `Config.comm_buffer_bytes`,
whatever the number of workers, the halo and the width. When the sweep ends, their memory goes back to the system: the
layers' own tensors are at their largest between sweeps. At the start, while the own shard is computed, the buffers that
later hold the tile computed and gradients hold rows on their way: the own shard takes longer than a tile, and the wire
should not lie idle. So gradients are waited for as late as the buffers allow, after more rows are posted.

[Note: wire precision]
Features and gradients may travel in a half precision; they are widened on arrival, so that all sums are as they were.

[Note: address]
gloo matches a message by sender and tag. The tag holds the number of the agreed call, the direction (rows out or
gradients home) and the tile's index in its round; the pair of workers determines the round. So a message can only meet
the receive it was meant for, in whatever order the two ends post.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sar.comm.buffers import BufferPool
from sar.comm.group import Group
from sar.comm.plan import HaloPlan, Step, Tile
from sar.comm.rows import RowFormat
from sar.comm.statistics import counters
from sar.config import Config

UNLIMITED_ROWS = 2**62
ROWS_PER_TILE = 8  # a worker's rows in a tile's
SMALL_TILE = 2**20
"""Bytes from which on larger messages are hardly faster."""


class Direction(IntEnum):
    """Where a message goes: rows to a reader, or gradients to the owner of the rows."""

    OUT = 0
    HOME = 1


class Settings(NamedTuple):
    """`Config` as it was when a call started; its backward runs under the same settings."""

    depth: int
    buffer_bytes: int
    max_elements: int
    keep: bool  # keep fetched rows for the backward (modes 2 and 3)
    one_shot: bool  # post the whole exchange at once (mode 3)
    wire_features: torch.dtype | None
    wire_gradients: torch.dtype | None
    cache: bool  # of results on constant operands

    @classmethod
    def current(cls, *, one_shot: bool = False) -> "Settings":
        Config.validate()
        return cls(
            Config.pipeline_depth,
            Config.comm_buffer_bytes,
            Config.max_collective_size,
            Config.disable_sr or one_shot,
            one_shot,
            Config.wire_dtype_features,
            Config.wire_dtype_gradients,
            Config.cache_constant_inputs,
        )

    def tile_rows(self, row: RowFormat, mean_rows: int, *, both_ways: bool) -> int:
        """Rows in a tile: a power of two, so that layers of similar width share the tiles' edge blocks.

        Args:
            row: what travels of each row.
            mean_rows: rows of a worker, averaged over workers. Tiles are a fraction of that where they are not small
                anyway, so that buffers are a fraction of the memory that features take.
            both_ways: whether one sweep fetches rows and sends gradients home; else buffers for one of them do.
        """
        limits = [UNLIMITED_ROWS]
        if not self.one_shot and row.row_bytes:
            buffers = (4 if both_ways else 2) * (self.depth + 1)
            limits.append(self.buffer_bytes // buffers // row.row_bytes)
            limits.append(max(mean_rows // ROWS_PER_TILE, SMALL_TILE // row.row_bytes))
        if self.max_elements and row.row_elements:
            limits.append(self.max_elements // row.row_elements)
        return 1 << max(min(limits), 1).bit_length() - 1


class Portion(NamedTuple):
    """One tile as the engine's computation sees it.

    tile: its place in the sender's halo list.
    rows: the fetched fields, (tile rows, ...) each; None in a sweep that fetches nothing.
    grads: zeros to add the rows' gradients to, (tile rows, ...) each; None in a sweep that returns nothing.
    """

    tile: Tile
    rows: list[Tensor] | None
    grads: list[Tensor] | None


@dataclass
class _Transfer:
    """One message each way, posted together."""

    receive: Tile | None
    received: Tensor | None
    receive_work: Any
    send: Tile | None
    sent: Tensor | None  # kept alive until the send is waited for
    send_work: Any


class Exchange:
    """The messages of one call: a sweep for its forward, and one for each backward, each after its own agreement.

    Args:
        group: this worker's end of the group.
        plan: halo lists of the relation.
        settings: as agreed.
        widest: the widest row that will travel, in either direction; from it, tiles are alike in all sweeps.
        pool: buffers to use.
        call: the call in words, for errors.
        both_ways: whether one sweep may fetch rows and send gradients home.
    """

    def __init__(
        self,
        group: Group,
        plan: HaloPlan,
        settings: Settings,
        widest: RowFormat,
        pool: BufferPool,
        call: str,
        *,
        both_ways: bool = True,
    ) -> None:
        self.group = group
        self.plan = plan
        self.settings = settings
        self.steps = plan.schedule(settings.tile_rows(widest, plan.mean_rows, both_ways=both_ways))
        self.depth = len(self.steps) if settings.one_shot else settings.depth
        self.first = (2 if both_ways else 1) * self.depth + 1  # transfers of rows posted at once
        self.pool = pool
        self.call = call
        self._number = 0  # of the agreed call that the current sweep belongs to

    def sweep(
        self,
        device: torch.device,
        fields: list[Tensor] | None = None,
        *,
        keep: bool = False,
        grads: RowFormat | None = None,
        deliver: Callable[[Tensor, list[Tensor]], None] | None = None,
        reverse: bool = False,
    ) -> Iterator[Portion]:
        """Fetch tiles and send gradients home, step by step: see [Note: one sweep].

        The first transfers are posted at once, the rest as the iterator is consumed.

        Args:
            device: where rows and gradients are computed on.
            fields: this worker's rows that others read, (N_src, ...) each; None to fetch nothing.
            keep: leave the fetched rows to the caller, instead of reusing their buffers after each step.
            grads: format of the gradients to send home; None to send none.
            deliver: called with rows of this worker, (n,), and their gradients from one reader, (n, ...) each.
            reverse: walk the steps from the last to the first.

        Returns:
            An iterator over the tiles that this worker receives.
        """
        self._number = self.group.calls
        rows = RowFormat.of(fields).narrowed(self.settings.wire_features) if fields is not None else None
        steps = self.steps[::-1] if reverse else self.steps
        outward: deque[_Transfer] = deque()
        if fields is not None and rows is not None:
            for step in steps[: self.first]:
                outward.append(self._post_rows(step, fields, rows, keep))
        return self._walk(steps, device, fields, rows, outward, keep, grads, deliver)

    def _walk(
        self,
        steps: list[Step],
        device: torch.device,
        fields: list[Tensor] | None,
        rows: RowFormat | None,
        outward: deque[_Transfer],
        keep: bool,
        grads: RowFormat | None,
        deliver: Callable[[Tensor, list[Tensor]], None] | None,
    ) -> Iterator[Portion]:
        homeward: deque[_Transfer] = deque()
        home = grads.narrowed(self.settings.wire_gradients) if grads is not None else None
        posted = len(outward)
        for i, step in enumerate(steps):
            fetched, transfer = None, None
            if fields is not None and rows is not None:
                while posted < min(i + self.depth + 1, len(steps)):
                    outward.append(self._post_rows(steps[posted], fields, rows, keep))
                    posted += 1
                transfer = outward.popleft()
                self._wait_receive(transfer)
                if step.receive is not None:
                    assert transfer.received is not None
                    views = rows.views(transfer.received, _rows(step.receive))
                    fetched = [v.to(device, field.dtype) for v, field in zip(views, fields, strict=True)]
            if grads is not None and home is not None and len(homeward) > self.depth:
                self._take_home(homeward.popleft(), device, grads, home, deliver)
            returned, message = None, None
            if grads is not None and home is not None and step.receive is not None:
                message = self.pool.take(home.message_bytes(_rows(step.receive)))
                views = home.views(message, _rows(step.receive))
                returned = [v.to(device, field.dtype).zero_() for v, field in zip(views, grads.fields, strict=True)]
            if step.receive is not None:
                yield Portion(step.receive, fetched, returned)
            if grads is not None and home is not None:
                homeward.append(self._post_grads(step, home, message, returned))
            if transfer is not None:
                self._wait_send(transfer)
                if not keep:
                    self.pool.give(transfer.received)
        while homeward:
            assert grads is not None
            assert home is not None
            self._take_home(homeward.popleft(), device, grads, home, deliver)
        self.pool.clear()

    # -- posting

    def _post_rows(self, step: Step, fields: list[Tensor], rows: RowFormat, keep: bool) -> _Transfer:
        received = sent = None
        if step.receive is not None:
            size = rows.message_bytes(_rows(step.receive))
            received = torch.empty(size, dtype=torch.uint8, device=self.group.device) if keep else self.pool.take(size)
        if step.send is not None:
            sent = self.pool.take(rows.message_bytes(_rows(step.send)))
            index = self._own_rows(step.send)
            for field, view in zip(fields, rows.views(sent, _rows(step.send)), strict=True):
                if (field.device, field.dtype) == (view.device, view.dtype):
                    torch.index_select(field, 0, index, out=view)
                else:
                    view.copy_(field.index_select(0, index))
        return self._post(step.place, Direction.OUT, rows, step.receive, received, step.send, sent)

    def _post_grads(
        self, step: Step, grads: RowFormat, message: Tensor | None, values: list[Tensor] | None
    ) -> _Transfer:
        received = None
        if message is not None and step.receive is not None and values is not None:
            for value, view in zip(values, grads.views(message, _rows(step.receive)), strict=True):
                if (value.device, value.dtype) != (view.device, view.dtype):
                    view.copy_(value)
        if step.send is not None:
            received = self.pool.take(grads.message_bytes(_rows(step.send)))
        return self._post(step.place, Direction.HOME, grads, step.send, received, step.receive, message)

    def _post(
        self,
        index: int,
        direction: Direction,
        row: RowFormat,
        receive: Tile | None,
        received: Tensor | None,
        send: Tile | None,
        sent: Tensor | None,
    ) -> _Transfer:
        """Post one message each way: see [Note: address]."""
        tag = (self._number % 2**12) << 19 | direction << 18 | index % 2**18
        inbound = received[: row.message_bytes(_rows(receive))] if received is not None and receive else None
        outbound = sent[: row.message_bytes(_rows(send))] if sent is not None and send else None
        transfer = _Transfer(receive, received, None, send, sent, None)
        if self.group.nccl is not None:
            _post_nccl(self.group.nccl, transfer, inbound, outbound)
        else:
            if inbound is not None and receive is not None and inbound.nbytes:
                transfer.receive_work = self._gloo("recv", inbound, receive.peer, tag)
            if outbound is not None and send is not None and outbound.nbytes:
                transfer.send_work = self._gloo("send", outbound, send.peer, tag)
        if inbound is not None:
            counters.bytes_received += inbound.nbytes
        if outbound is not None:
            counters.bytes_sent += outbound.nbytes
            counters.messages_sent += 1
        return transfer

    def _gloo(self, verb: str, message: Tensor, peer: int, tag: int) -> Any:
        return self.group.wait_for(lambda: getattr(self.group.gloo, verb)([message], peer, tag), self.call, peer)

    def _own_rows(self, tile: Tile) -> Tensor:
        return self.plan.send_rows[tile.peer][tile.begin : tile.end]

    # -- waiting

    def _wait_receive(self, transfer: _Transfer) -> None:
        if transfer.receive_work is not None and transfer.receive is not None:
            self._wait(transfer.receive_work, transfer.receive.peer)

    def _wait_send(self, transfer: _Transfer) -> None:
        if transfer.send_work is not None and transfer.send is not None:
            self._wait(transfer.send_work, transfer.send.peer)
        self.pool.give(transfer.sent)

    def _wait(self, work: Any, peer: int) -> None:
        limit = timedelta(seconds=Config.timeout)
        self.group.wait_for(lambda: work.wait(limit), self.call, peer)

    def _take_home(
        self,
        transfer: _Transfer,
        device: torch.device,
        grads: RowFormat,
        home: RowFormat,
        deliver: Callable[[Tensor, list[Tensor]], None] | None,
    ) -> None:
        self._wait_receive(transfer)
        if transfer.receive is not None and transfer.received is not None and deliver is not None:
            views = home.views(transfer.received, _rows(transfer.receive))
            values = [v.to(device, field.dtype) for v, field in zip(views, grads.fields, strict=True)]
            deliver(self._own_rows(transfer.receive), values)
        self._wait_send(transfer)
        self.pool.give(transfer.received)


def _rows(tile: Tile) -> int:
    return tile.end - tile.begin


def _post_nccl(nccl: dist.ProcessGroup, transfer: _Transfer, inbound: Tensor | None, outbound: Tensor | None) -> None:
    """Post both ways in one batch. NCCL matches by order, which the common sequence of steps makes equal on both ends.

    Untested with more than one worker: it needs two GPUs.
    """
    operations = []
    if inbound is not None and transfer.receive is not None and inbound.nbytes:
        source = dist.get_global_rank(nccl, transfer.receive.peer)
        operations.append(dist.P2POp(dist.irecv, inbound, source, nccl))
    if outbound is not None and transfer.send is not None and outbound.nbytes:
        reader = dist.get_global_rank(nccl, transfer.send.peer)
        operations.append(dist.P2POp(dist.isend, outbound, reader, nccl))
    works = dist.batch_isend_irecv(operations) if operations else []
    if works:
        transfer.receive_work = works[0]
        transfer.send_work = works[-1]
