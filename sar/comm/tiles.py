"""Tiles of an exchange: a relation's halo lists, a call's settings, the tiles of both, and the rows that fill them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import accumulate, count, zip_longest
from operator import attrgetter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from sar.comm.group import Group
from sar.comm.rows import RowFormat
from sar.config import Config, GlobalConfig
from sar.tensors.id_arrays import pieces
from sar.tensors.spillable import moved_to_file
from sar.tensors.views import to_device

SCHEDULES = 8
"""Number of schedules, one per tile size, that a plan caches."""
UNLIMITED_ROWS = 2**62
ROWS_PER_TILE = 8  # tiles into which a worker's mean rows are cut at least, unless these get small
SMALL_TILE = 2**20
"""Size in bytes above which larger messages are hardly faster."""


class HaloSlice(NamedTuple):
    """Rows begin:end of the halo list of `owner`'s rows that `reader` reads. Only the last slice is below `size`."""

    owner: int
    reader: int
    begin: int
    end: int
    size: int


class Step(NamedTuple):
    """One step of the exchange: the tile this worker receives and the tile it sends, if any."""

    place: int  # index within its round; part of the message's address
    receive: HaloSlice | None
    send: HaloSlice | None


class HaloPlan:
    """One worker's halo lists of a relation. `halo_counts` and `mean_rows` are equal on all workers."""

    def __init__(
        self, rank: int, send_rows: list[Tensor], halo_counts: Tensor, mean_rows: int, local_rows: Sequence[Tensor] = ()
    ) -> None:
        self.rank = rank
        self.world_size = len(send_rows)
        # Rows of this worker that each worker q reads, ascending, (H_q,) int32 or int64.
        self.send_rows = [moved_to_file(rows) for rows in send_rows]
        self.halo_counts: list[list[int]] = halo_counts.tolist()  # [p][r]: the number of rows of p that r reads
        self.mean_rows = mean_rows  # rows of a worker, averaged over all workers
        self.local_rows = local_rows  # if several workers share a process, the `send_rows` of each, concatenated
        self._per_process = max(len(local_rows), 1)
        self.rows_of_process = mean_rows * self._per_process  # of all workers of a process; equal on all workers
        # Offset of each reader's rows in an owner's `local_rows`.
        self._begins = [list(accumulate(counts, initial=0)) for counts in self.halo_counts if local_rows]
        self._schedules: dict[int, list[Step]] = {}  # by rows of a tile; the latest used is last
        # Rows written for readers that have not changed, such as features, with the version of their contents.
        self.letters: dict[Any, tuple[Any, Any]] = {}

    def to(self, device: torch.device) -> "HaloPlan":
        """The plan on a device. If workers share a process it stays on the CPU, like the rows of waiting workers."""
        if self.local_rows:
            return self
        send_rows = [rows.to(device) for rows in self.send_rows]
        return HaloPlan(self.rank, send_rows, torch.tensor(self.halo_counts, device="cpu"), self.mean_rows)

    @classmethod
    def shared(
        cls, group: Group, send_rows: list[Tensor], halo_counts: Tensor, mean_rows: int, what: str
    ) -> "HaloPlan":
        """Build the plan, with the rows of the process's other workers; a collective call. `what` is for errors."""
        local_rows: list[Tensor] = []
        if len(group.local_peers) > 1:
            send_rows = [rows.cpu() for rows in send_rows]
            shared = group.share([torch.cat(send_rows)], [], f"halo lists of {what}")
            local_rows = [peer.read[0].rows for peer in shared.values()]
        return cls(group.rank, send_rows, halo_counts, mean_rows, local_rows)

    def rows_of(self, halo: HaloSlice) -> Tensor:
        """Indices of a slice in the owner's rows. The owner is this worker or another one of its process."""
        if halo.owner == self.rank:
            return self.send_rows[halo.reader][halo.begin : halo.end]
        before = self._begins[halo.owner][halo.reader]
        return self.local_rows[halo.owner % self._per_process][before + halo.begin : before + halo.end]

    def slices(self, owner: int, reader: int, tile_rows: int = UNLIMITED_ROWS) -> list[HaloSlice]:
        """Slices of at most `tile_rows` rows of the halo list of `owner`'s rows that `reader` reads."""
        cuts = pieces(self.halo_counts[owner][reader], tile_rows)
        return [HaloSlice(owner, reader, cut.start, cut.stop, tile_rows) for cut in cuts]

    def schedule(self, tile_rows: int) -> list[Step]:
        """All steps of an exchange with tiles of at most `tile_rows` rows; cached.

        In round k every process p reads from (p - k) mod W and sends to (p + k) mod W. The longest halo list of a round
        sets its number of steps *on every worker*. So all workers take the same sequence of steps, and the slowest
        worker never waits for a message that has not been posted.

        If several workers share a process, workers at the same position in their processes exchange at the same time.
        Such a worker receives the rows that it reads itself, and sends rows of all workers of its process.
        """
        if tile_rows in self._schedules:
            steps = self._schedules[tile_rows] = self._schedules.pop(tile_rows)  # now the latest used
            return steps
        size, counts = self._per_process, self.halo_counts
        process, place = divmod(self.rank, size)
        processes = self.world_size // size
        steps = []
        for k in range(1, processes):
            source, reader = (process - k) % processes * size, (process + k) % processes * size + place
            places = count(place, size)
            for u in range(size):
                longest = max(counts[(x - k) % processes * size + u][x * size + place] for x in range(processes))
                receives = self.slices(source + u, self.rank, tile_rows)
                sends = self.slices(process * size + u, reader, tile_rows)
                for _, receive, send in zip_longest(range(-(-longest // tile_rows)), receives, sends):
                    steps.append(Step(next(places), receive, send))
        self._schedules[tile_rows] = steps
        if len(self._schedules) > SCHEDULES:
            del self._schedules[next(iter(self._schedules))]
        return steps


class Settings(NamedTuple):
    """Snapshot of `Config` at the start of a call. Its backward runs under the same settings."""

    pipeline_depth: int
    comm_buffer_bytes: int
    max_collective_size: int
    disable_sr: bool  # keep fetched rows for the backward (modes 2 and 3)
    wire_dtype_features: torch.dtype | None
    wire_dtype_gradients: torch.dtype | None
    one_shot: bool = False  # post the whole exchange at once (mode 3)

    @classmethod
    def current(cls, *, one_shot: bool = False) -> "Settings":
        settings = cls(*_settings_of(Config))
        return settings._replace(disable_sr=True, one_shot=True) if one_shot else settings

    def __str__(self) -> str:
        """The mode, and the settings of `Config` that differ from their defaults."""
        values = zip(self._fields, self, _settings_of(GlobalConfig), strict=False)
        changed = (f"{name} {value}" for name, value, default in values if value != default)
        return ", ".join([f"mode {3 if self.one_shot else 2 if self.disable_sr else 1}", *changed])


_settings_of: Final = attrgetter(*Settings._fields[:-1])


def power_of_two(limit: int) -> int:
    """The largest power of two up to `limit`, at least 1."""
    return 1 << max(limit, 1).bit_length() - 1


class Layout(NamedTuple):
    """The tiles of an exchange, from the widest row of either direction, so that forward and backward agree."""

    steps: list[Step]
    depth: int  # steps in flight while one is computed
    first: int  # steps whose rows are posted at the start, before any buffer holds gradients
    tile_rows: int  # most rows of a tile
    local_rows: int  # of a tile within the process; larger, because few exist at a time

    @classmethod
    def of(cls, plan: HaloPlan, settings: Settings, widest: RowFormat, *, both_ways: bool = True) -> "Layout":
        """The layout for rows of at most `widest`; `both_ways` if one exchange may fetch rows and return gradients.

        A tile has a power of two of rows, so that layers of similar width share the tiles' edge blocks. Tiles above
        `SMALL_TILE` are a fraction of a worker's mean rows, so that buffers are a fraction of the memory of features.
        """
        ways, row_bytes = 2 if both_ways else 1, max(widest.row_bytes, 1)
        small = SMALL_TILE // row_bytes
        limits = [UNLIMITED_ROWS]
        if not settings.one_shot and widest.row_bytes:
            limits.append(settings.comm_buffer_bytes // (2 * ways * (settings.pipeline_depth + 1)) // row_bytes)
            limits.append(max(plan.mean_rows // ROWS_PER_TILE, small))
        if settings.max_collective_size and widest.row_elements:
            limits.append(settings.max_collective_size // widest.row_elements)
        tile_rows = power_of_two(min(limits))
        steps = plan.schedule(tile_rows)
        depth = len(steps) if settings.one_shot else settings.pipeline_depth
        local_rows = min(settings.comm_buffer_bytes // 4 // row_bytes, max(plan.mean_rows // 2, small))
        return cls(steps, depth, ways * depth + 1, tile_rows, power_of_two(local_rows))


class Tile(NamedTuple):
    """Rows of another worker on which the edges that read them can now be computed."""

    halo: HaloSlice | None  # position in the sender's halo list; None for this worker's own rows
    rows: list[Tensor] | None  # the fetched fields, (tile rows, ...) each; None in an exchange that fetches nothing
    # Sums of the rows' gradients, `GradientReturn.start` at first; None in an exchange that returns nothing.
    grads: list[Tensor] | None
    # If `rows` and `grads` have a row for each node of the sender: indices of the tile's rows, (tile rows,) ascending.
    sources: Tensor | None = None


OWN_ROWS = Tile(None, None, None)
"""Placeholder for computing the edges that read this worker's own rows."""


class LocalFields(NamedTuple):
    """Further fields for readers in the same process; remote readers compute them from the fields that travel."""

    fields: Sequence[Tensor] = ()  # fields of this worker, (N_src, ...) each
    totals: Sequence[Tensor] = ()  # totals of their gradients; see `GradientReturn`


class GradientReturn(NamedTuple):
    """Accumulates the gradients that other workers send for this worker's rows."""

    totals: Sequence[Tensor]  # (N_src, ...) each, from `empty_spillable`: workers of one process add to each other's
    # Called with indices of this worker's rows, (n,), one reader's gradients for them, (n, ...), and the total.
    add: Callable[[Tensor, Tensor, Tensor], object]
    start: float = 0.0  # the neutral element of `add`
    half: torch.dtype | None = None  # dtype of the rows if it is a half precision, in which gradients then travel

    def sums(self, places: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Tensors for a tile's gradients; `places` in a message themselves if they need no conversion."""
        return [
            place.fill_(self.start)
            if place.device == device and place.dtype == total.dtype
            else torch.full(place.shape, self.start, dtype=total.dtype, device=device)
            for place, total in zip(places, self.totals, strict=True)
        ]

    @staticmethod
    def write(grads: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        """Copy a tile's gradients to their places in a message, unless they are there."""
        for grad, place in zip(grads, places, strict=True):
            if place.device != grad.device or place.dtype != grad.dtype:
                place.copy_(grad, non_blocking=True)


@dataclass(eq=False)
class ExchangeSpec:
    """What one exchange moves, and how."""

    group: Group
    plan: HaloPlan
    settings: Settings  # the call's
    layout: Layout  # the tiles, by plan and settings
    signature: str  # text of the call, for errors
    device: torch.device  # on which rows and gradients are computed
    fields: Sequence[Tensor] | None = None  # this worker's rows that others read, (N_src, ...) each; None: no fetching
    _: KW_ONLY
    # Leave the fetched rows to the caller, instead of reusing their buffers after each step. In a backward, whether the
    # forward has done so.
    keep: bool = False
    # Further fields for workers of the same process, if the caller can read their rows in place, by `Tile.sources`;
    # None if it cannot.
    local: LocalFields | None = None
    returns: GradientReturn | None = None  # accumulates the returned gradients; None to return none
    own_first: bool = False  # yield `OWN_ROWS` first, as happens anyway if rows are fetched
    # In a forward, takes letters with the rows, by owner, if these are in files; in a backward, has those of the
    # forward. None if the backward does not fetch the rows again.
    letters: dict[int, Any] | None = None
    out: RowFormat | None = field(init=False)  # format of the rows in messages; None if none are fetched
    back: RowFormat | None = field(init=False)  # format of the gradients in messages; None if none return


class OwnRows:
    """The rows of a worker that is the only one of its process, and the totals of their gradients."""

    def __init__(self, spec: ExchangeSpec) -> None:
        self._group, self._plan, self._returns = spec.group, spec.plan, spec.returns
        # By owner: this worker, or all workers of its process.
        self._columns: Mapping[int, Sequence[Tensor]] = {spec.group.rank: spec.fields or ()}
        self._totals: Mapping[int, Sequence[Tensor]] = {
            spec.group.rank: () if spec.returns is None else spec.returns.totals
        }

    def gather(self, halo: HaloSlice, message: Tensor, places: Sequence[Tensor]) -> None:
        """Write rows of a worker of this process to a message; `places` are its fields, (rows, ...) each."""
        index = self._plan.rows_of(halo)
        for column, place in zip(self._columns[halo.owner], places, strict=False):
            index = index.to(column.device)
            if place.device == column.device and place.dtype == column.dtype:
                torch.index_select(column, 0, index, out=place)
            else:
                place.copy_(column.index_select(0, index), non_blocking=True)

    def add(self, halo: HaloSlice, message: Tensor, places: Sequence[Tensor]) -> None:
        """Add the gradients that a reader in another process has returned to their owner's totals."""
        index = self._plan.rows_of(halo)
        for total, place in zip(self._totals[halo.owner], places, strict=False):
            assert self._returns is not None
            self._returns.add(index.to(total.device), to_device(place, total.device).to(total.dtype), total)

    def tiles(self) -> Iterator[Tile]:
        """Iterate over the rows that this worker reads of others in its process."""
        return iter(())

    def close(self) -> None:
        """Release the rows. If gradients return, the totals are complete afterwards."""
