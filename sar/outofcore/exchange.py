"""A sweep among virtual workers: rows of the same process are read where they lie, others travel.

[Note: sweeps in turns]
All V workers of a process publish their rows at one meeting, and where gradients return, their totals. Then each in
its turn walks all source workers: those of its own process from the published rows, those of other processes as they
arrive. In that turn the process sends the rows of all its V workers to the workers of the other processes that have
their turn, too, which is an exchange among W processes like any other. Gradients are added to the total of the rows'
owner, by whoever has the turn, beginning with worker 0: in the same order in each epoch, to the last bit. A second
meeting ends a sweep that returns gradients; only then a total is complete.
A caller that can (`local`) reads the rows where they lie and adds to totals itself, without copies of either. Other
rows that do not leave the process are rounded as those that do (`Config.wire_dtype_features`), so that the results are
those of p processes.

[Note: reading ahead]
Published rows are mapped and not in memory: the first use of a page that the system has dropped would wait for the
disk. So before a tile is computed the system is asked for the next one, and for where its gradients go. Nothing else is
read: with each page that it finds missing the system would read its neighbours, too, up to several MB, and where memory
is short these take the place of what is needed next.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sar.comm.buffers import BufferPool
from sar.comm.exchange import Exchange, GradientReturn, LocalFields, Tile
from sar.comm.halo_plan import HaloPlan, HaloSlice, Step, halo_slice
from sar.comm.rows import RowFormat
from sar.comm.settings import SMALL_TILE, UNLIMITED_ROWS, Settings
from sar.comm.statistics import counters
from sar.outofcore.group import VirtualGroup
from sar.outofcore.spill import Published
from sar.raw_memory import flat


class _Shared(NamedTuple):
    """What a worker brings to a sweep: its fields, and totals of their gradients."""

    fields: list[Published]
    totals: list[Published]


def _tile_rows(settings: Settings, row: RowFormat, mean_rows: int) -> int:
    """Rows in a tile that does not travel: there is one at a time, so it may be larger than `Settings.tile_rows`."""
    row_bytes = max(row.row_bytes, 1)
    rows = min(settings.buffer_bytes // 4 // row_bytes, max(mean_rows // 2, SMALL_TILE // row_bytes))
    return 1 << max(rows, 1).bit_length() - 1


class _Room:
    """One buffer for the rows of all local tiles of a sweep, one after the other.

    Args:
        pool: where it comes from.
        like: tensors with such rows.
        most: rows of the largest tile.
        wire: half precision in which rows travel between processes.

    Attributes:
        wire: the format in which they do.
    """

    def __init__(self, pool: BufferPool, like: Sequence[Tensor], most: int, wire: torch.dtype | None) -> None:
        self._pool = pool
        self._like = like
        self._form = RowFormat.of(like)
        self.wire = self._form.narrowed(wire)
        self._most = most
        self._buffer: Tensor | None = None
        self._fields: list[Tensor] = []

    def again(self, rows: int) -> list[Tensor]:
        """Room for so many rows of each tensor, in place of those before."""
        if self._buffer is None:
            self._buffer = self._pool.take(self._form.message_bytes(self._most))
            self._fields = [field.values for field in self._form.rows(self._buffer, self._most)]
        return [field[:rows] for field in self._fields]

    def anew(self, rows: int) -> list[Tensor]:
        """Room that the caller may keep."""
        return [torch.empty(rows, *one.shape[1:], dtype=one.dtype) for one in self._like]

    def give_back(self) -> None:
        self._pool.give(self._buffer)
        self._buffer, self._fields = None, []


class VirtualExchange(Exchange):
    """The messages of one call of a virtual worker: see [Note: sweeps in turns]."""

    group: VirtualGroup

    def __init__(
        self, group: VirtualGroup, plan: HaloPlan, settings: Settings, widest: RowFormat, *args: Any, **options: Any
    ) -> None:
        super().__init__(group, plan, settings, widest, *args, **options)
        self.wire = group.outer
        self._tile_rows = _tile_rows(settings, widest, plan.mean_rows)
        self._shared: list[_Shared] = []

    def schedule(self, tile_rows: int) -> list[Step]:
        """What travels between processes while this worker has the turn; see [Note: sweeps in turns]."""
        outer, size, place = self.group.outer, self.group.turns.size, self.group.place
        counts = self.plan.halo_counts
        steps: list[Step] = []
        for k in range(1, outer.world_size):
            there, reader = (outer.rank - k) % outer.world_size, (outer.rank + k) % outer.world_size * size + place
            for u in range(size):
                source, own = there * size + u, outer.rank * size + u
                longest = max(
                    counts[(x - k) % outer.world_size * size + u][x * size + place] for x in range(outer.world_size)
                )
                for index in range(-(-longest // tile_rows)):
                    receive = halo_slice(source, index, tile_rows, counts[source][self.group.rank])
                    send = halo_slice(reader, index, tile_rows, counts[own][reader])
                    mine = None if send is None else send._replace(owner=u)
                    steps.append(Step(place << 12 | len(steps) % 2**12, receive, mine))
        return steps

    def _tiles_here(self, tile_rows: int) -> list[HaloSlice]:
        """The tiles that this worker reads of the others of its process."""
        tiles = []
        for source in map(self._rank_of, range(self.group.turns.size)):
            rows = self.plan.halo_counts[source][self.group.rank] if source != self.group.rank else 0
            found = (halo_slice(source, index, tile_rows, rows) for index in range(-(-rows // tile_rows)))
            tiles += [tile for tile in found if tile is not None]
        return tiles

    def exchange_tiles(
        self,
        device: torch.device,
        fields: list[Tensor] | None = None,
        *,
        keep: bool = False,
        local: LocalFields | None = None,
        returns: GradientReturn | None = None,
    ) -> Iterator[Tile]:
        """As `Exchange.exchange_tiles`."""
        group, rows = self.group, list(fields or [])
        totals = [] if returns is None else [total.detach() for total in returns.totals]
        forms = RowFormat.of(rows), RowFormat.of(totals)
        halves = self.settings.wire_features, self.settings.wire_gradients
        wire = forms[0].narrowed(halves[0]), forms[1].narrowed(halves[1])
        self._count(*wire)
        if wire != forms or (keep and halves != (None, None)):  # what one direction keeps has to fit the other
            local = None
        if local is not None:
            rows += local.fields if fields is not None else ()
            totals += (total.detach() for total in local.totals)
        shared = _Shared(group.publish(rows), group.open_to_others(totals))
        self._shared = group.share(shared, self.signature, afresh=returns is not None)
        travelling = super().exchange_tiles(device, fields, keep=keep, returns=returns)
        if local is not None:
            here = self._walk_in_place(fields is not None)
        else:
            here = self._walk_here(fields is not None, keep, returns)
        return self._walk_all(here, travelling, returns is not None)

    def _walk_all(self, here: Iterator[Tile], travelling: Iterator[Tile], returns: bool) -> Iterator[Tile]:
        yield from here
        yield from travelling
        totals, self._shared = self._shared[self.group.place].totals, []
        if returns:
            self.group.share(None, f"end of {self.signature}")
            for total in totals:
                total.will_need(0, len(total.rows))

    def _walk_in_place(self, fetch: bool) -> Iterator[Tile]:
        """The rows and totals of the workers of this process."""
        for tile, index, owner in self._asked_ahead(self._tiles_here(UNLIMITED_ROWS)):
            rows, totals = ([one.rows for one in shared] for shared in owner)
            yield Tile(tile, rows if fetch else None, totals or None, index)

    def _walk_here(self, fetch: bool, keep: bool, returns: GradientReturn | None) -> Iterator[Tile]:
        """The tiles of the workers of this process."""
        tiles = self._tiles_here(self._tile_rows)
        most = max((tile.rows for tile in tiles), default=0)
        mine = [one.rows for one in self._shared[self.group.place].fields]
        fetched = _Room(self.pool, mine, most, self.settings.wire_features)
        returned = _Room(self.pool, [] if returns is None else returns.totals, most, self.settings.wire_gradients)
        for tile, index, owner in self._asked_ahead(tiles):
            rows = grads = None
            if fetch:
                rows = fetched.anew(tile.rows) if keep else fetched.again(tile.rows)
                for one, out in zip(owner.fields, rows, strict=True):
                    torch.index_select(one.rows, 0, index, out=out)
                fetched.wire.round(rows)
            if returns is not None:
                grads = [one.fill_(returns.start) for one in returned.again(tile.rows)]
            yield Tile(tile, rows, grads)
            if returns is not None and grads is not None:
                returned.wire.round(grads)
                for total, grad in zip(owner.totals, grads, strict=True):
                    returns.add(index, grad, total.rows)
        fetched.give_back()
        returned.give_back()

    def _count(self, out: RowFormat, back: RowFormat) -> None:
        """Count what would travel if all workers were processes: rows read, and own rows that others read."""
        counts, me = self.plan.halo_counts, self.group.rank
        others = [rank for rank in range(self.group.world_size) if rank != me]
        read, given = sum(counts[rank][me] for rank in others), sum(counts[me][rank] for rank in others)
        for form, sent, received in ((out, given, read), (back, read, given)):
            counters.bytes_sent += form.row_bytes * sent
            counters.bytes_received += form.row_bytes * received

    def post(self, *args: Any) -> None:
        """As `Exchange.post`, for all workers of this process; each counts its own (`_count`)."""
        moved = counters.bytes_sent, counters.bytes_received
        super().post(*args)
        counters.bytes_sent, counters.bytes_received = moved

    def _asked_ahead(self, tiles: list[HaloSlice]) -> Iterator[tuple[HaloSlice, Tensor, _Shared]]:
        """Each tile, its rows, and what their owner has shared; see [Note: reading ahead]."""
        owners = [self._shared[tile.peer % self.group.turns.size] for tile in tiles]
        found = list(
            zip(tiles, (self._rows_of(tile.peer, self.group.rank, tile) for tile in tiles), owners, strict=True)
        )
        ahead = iter(found)
        self._read_ahead(next(ahead, None))
        for this in found:
            self._read_ahead(next(ahead, None))
            yield this

    def _read_ahead(self, asked: tuple[HaloSlice, Tensor, _Shared] | None) -> None:
        if asked is None:
            return
        _, rows, owner = asked
        in_file = [one for one in (*owner.fields, *owner.totals) if one.slot is not None]
        if in_file:
            of_these = flat(rows)
            first, end = int(of_these.min()), int(of_these.max()) + 1
            for one in in_file:
                one.will_need(first, end)

    def _rank_of(self, place: int) -> int:
        return self.group.outer.rank * self.group.turns.size + place

    def _rows_of(self, owner: int, reader: int, tile: HaloSlice) -> Tensor:
        """The rows in a tile of those that some worker reads of a worker of this process."""
        begin = sum(self.plan.halo_counts[owner][:reader])
        return self.plan.rows_here[owner % self.group.turns.size][begin + tile.begin : begin + tile.end]

    # -- for those of other processes

    def own_rows(self, tile: HaloSlice) -> Tensor:
        return self._rows_of(self._rank_of(tile.owner), tile.peer, tile)

    def fields_of(self, tile: HaloSlice, fields: list[Tensor]) -> list[Tensor]:
        return [one.rows for one in self._shared[tile.owner].fields[: len(fields)]]

    def totals_of(self, tile: HaloSlice, returns: GradientReturn) -> Sequence[Tensor]:
        return [one.rows for one in self._shared[tile.owner].totals[: len(returns.totals)]]

    def process_of(self, worker: int) -> int:
        return worker // self.group.turns.size
