"""The rows of the workers of one process in an exchange: reading, sending, and returning gradients.

[Note: rows of the same process]
The workers of one process (`Transport.local_peers`) take turns. In its turn, a worker processes the rows of the other
workers in its process, and then those of other processes as they arrive. During this turn the process sends rows of all
its workers to the current workers of other processes. Gradients are added in the same order in each epoch, so sums are
bitwise equal. Rows are available in one of two ways:

`RowsInPlace`: at one meeting, all workers let the others read their rows and add to the totals of gradients. A second
meeting ends an exchange that returns gradients, because only then a total is complete. With copies, training GAT in 8
partitions took 1.3 times the processor time. So we use this if the rows of all workers fit into memory, and if the
caller can read them by index (`LocalFields`).

`RowsInLetters`: otherwise, before the first meeting, each worker writes the rows that each reader needs, in order, and
readers read them tile by tile. Gradients return in the same way, and each worker sums its own after the second meeting.
A fifth of the rows, read in place, lies on two thirds of a file's pages, which every reader would read again. Letters
are like messages between processes, so results equal those of separate processes. If a backward fetches the rows again,
letters in files are kept until then, which saves writing them, and a meeting.
"""

import mmap
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from sar.comm.rows import RowFormat
from sar.comm.statistics import counters
from sar.comm.tiles import ExchangeSpec, HaloSlice, LocalFields, OwnRows, Tile
from sar.tensors.spillable import at_hand

BLOCK: Final = mmap.PAGESIZE
"""Sizes of letter buffers are multiples of this, as transfers without the page cache require."""


class Done:
    """Completed work."""

    def wait(self) -> None:
        """Return at once."""


class Letters:
    """Messages for other workers of the same process, by any key. This class keeps them in memory.

    Args:
        sizes: bytes of each message.
    """

    on_disk: ClassVar[bool] = False

    def __init__(self, sizes: Mapping[Any, int]) -> None:
        self._sizes = sizes
        self._messages: dict[Any, Tensor] = {}

    def write(self, key: Any, message: Tensor) -> Any:
        """Start to write a message, the first bytes of a buffer. It must not change before the work is waited for."""
        self._messages[key] = message[: self._sizes[key]].clone()
        return Done()

    def read(self, key: Any, message: Tensor) -> Any:
        """Start to read a message into a buffer; it is there when the returned work has been waited for."""
        message[: self._sizes[key]] = self._messages[key]
        return Done()


MakeLetters = Callable[[Mapping[Any, int]], Letters]
"""Creates space for messages of these sizes in bytes, by key."""
ContentsOf = Callable[[Sequence[Tensor]], Any]
"""A value that does not change while the tensors do not change; None if unknown."""


def rows_of_process(spec: ExchangeSpec, make_letters: MakeLetters, contents_of: ContentsOf) -> OwnRows:
    """Rows of the workers of a process, in place or in letters; the same on all of them."""
    plan, me = spec.plan, spec.group.rank
    bytes_out, bytes_back = (0 if form is None else form.row_bytes for form in (spec.out, spec.back))
    # Count the bytes that would travel between processes: of rows that this worker reads, and that others read.
    counts = plan.halo_counts
    received, sent = sum(of_owner[me] for of_owner in counts) - counts[me][me], sum(counts[me]) - counts[me][me]
    counters.bytes_sent += bytes_out * sent + bytes_back * received
    counters.bytes_received += bytes_out * received + bytes_back * sent
    rounds = spec.keep and (spec.settings.wire_dtype_features, spec.settings.wire_dtype_gradients) != (None, None)
    half = None if spec.returns is None else spec.returns.half  # which gradients need not be in place
    for form, tensors in ((spec.out, spec.fields), (spec.back, spec.returns and spec.returns.totals)):
        rounds = rounds or (form is not None and form.fields != RowFormat.of(tensors or (), half).fields)
    fits = plan.rows_of_process * (bytes_out + bytes_back) <= at_hand("cpu")
    if spec.local is not None and fits and not rounds:
        return RowsInPlace(spec, spec.local)
    return RowsInLetters(spec, make_letters, contents_of)


class RowsInPlace(OwnRows):
    """Rows and totals of all workers of the process, in place: see [Note: rows of the same process].

    [Note: reading ahead]
    Shared rows may be mapped from a file, and the first use of a page that the system has dropped waits for the disk.
    So before a tile is computed, we prefetch the next one and its gradients. We do not prefetch neighbouring rows: if
    memory is short, these would displace the rows of the next tiles.

    Args:
        local: further rows and totals that only workers of this process read and add to.
    """

    def __init__(self, spec: ExchangeSpec, local: LocalFields) -> None:
        super().__init__(spec)
        self._signature, self._fetches = spec.signature, spec.fields is not None
        rows = [] if spec.fields is None else [*spec.fields, *local.fields]
        totals = [total.detach() for total in (*self._totals[spec.group.rank], *local.totals)]
        self._shared = spec.group.share(rows, totals, spec.signature, in_order=spec.returns is not None)
        self._columns = {owner: [tensor.rows for tensor in shared.read] for owner, shared in self._shared.items()}
        self._totals = {owner: [tensor.rows for tensor in shared.added_to] for owner, shared in self._shared.items()}

    def tiles(self) -> Iterator[Tile]:
        plan, me = self._plan, self._group.rank
        halos = [plan.slices(owner, me)[0] for owner in self._shared if owner != me and plan.halo_counts[owner][me]]
        tiles = [(halo, plan.rows_of(halo), self._shared[halo.owner]) for halo in halos]
        for i, (halo, index, owner) in enumerate(tiles):
            for _, next_index, next_owner in tiles[0:2] if i == 0 else tiles[i + 1 : i + 2]:
                for tensor in (*next_owner.read, *next_owner.added_to):
                    tensor.will_need(next_index)
            rows, totals = ([tensor.rows for tensor in shared] for shared in owner)
            yield Tile(halo, rows if self._fetches else None, totals or None, index)

    def close(self) -> None:
        totals = self._shared[self._group.rank].added_to
        self._shared = {}
        self._columns, self._totals = {}, {}
        if self._returns is not None:
            self._group.share([], [], f"end of {self._signature}")
            for total in totals:
                total.will_need()


class RowsInLetters(OwnRows):
    """Rows that each worker of the process writes for each reader: see [Note: rows of the same process]."""

    def __init__(self, spec: ExchangeSpec, make_letters: MakeLetters, contents_of: ContentsOf) -> None:
        super().__init__(spec)
        self._make_letters, self._contents_of = make_letters, contents_of
        group, plan, layout, out, back = spec.group, spec.plan, spec.layout, spec.out, spec.back
        self._layout, self._pool, self._out, self._back, self._keep = layout, group.pool, out, back, spec.keep
        self._fields, self._signature = spec.fields or (), spec.signature
        self._peers = [rank for rank in group.local_peers if rank != group.rank]
        self._letters: Mapping[int, Letters] = {}  # rows, by owner
        self._returned: Letters | None = None  # gradients of rows that this worker has read or received
        self._writing: deque[tuple[Any, Tensor]] = deque()  # buffers that are written
        # All buffers have room for the largest tile, so that few serve all.
        rows = min(max(layout.local_rows, layout.tile_rows), max(map(max, plan.halo_counts)))
        self._room = max((form.layout(rows).nbytes for form in (out, back) if form is not None), default=0)
        if out is not None:
            self._letters = spec.letters or group.swap(self._write_rows(out), spec.signature)
            if spec.letters is not None and self._letters[group.rank].on_disk:
                spec.letters.update(self._letters)
        if back is not None:
            number, place = len(group.local_peers), group.rank % len(group.local_peers)
            pairs = [(owner, group.rank) for owner in self._peers]
            for reader in range(place, group.world_size, number):
                if reader != group.rank:
                    pairs += [(owner, reader) for owner in group.local_peers]
            self._returned = make_letters(self._sizes(pairs, back))

    # -- rows

    def gather(self, halo: HaloSlice, message: Tensor, places: Sequence[Tensor]) -> None:
        self._letters[halo.owner].read(halo, message).wait()

    def tiles(self) -> Iterator[Tile]:
        halos = [halo for owner in self._peers for halo in self._slices(owner, self._group.rank)]
        following = self._start_reading(halos[0]) if halos else None
        for i, halo in enumerate(halos):
            reading, following = following, self._start_reading(halos[i + 1]) if i + 1 < len(halos) else None
            rows = None
            if reading is not None:
                work, buffer, fields = reading
                work.wait()
                rows = [field.to(own.dtype) for field, own in zip(fields, self._fields, strict=True)]
            if self._returns is None or self._back is None or self._returned is None:
                yield Tile(halo, rows, None)
            else:
                message, places = self._buffer(halo, self._back)
                grads = self._returns.sums(places, message.device)
                yield Tile(halo, rows, grads)
                self._returns.write(grads, places)
                self._start_writing(self._returned, halo, message)
            if reading is not None and not self._keep:
                self._pool.give(buffer)

    def _write_rows(self, out: RowFormat) -> Letters:
        """Write the rows that each other worker reads, if they have changed."""
        me, others = self._group.rank, range(self._group.world_size)
        pairs = [(me, reader) for reader in others if reader != me]
        key = tuple(out.fields), self._layout.local_rows, self._layout.tile_rows
        version = self._contents_of(self._fields)
        if version is not None and (written := self._plan.letters.get(key)) is not None and written[0] == version:
            return written[1]
        letters = self._make_letters(self._sizes(pairs, out))
        for pair in pairs:
            for halo in self._slices(*pair):
                message, places = self._buffer(halo, out)
                super().gather(halo, message, places)
                self._start_writing(letters, halo, message)
        self._finish_writing(0)
        if version is not None:
            self._plan.letters.clear()  # earlier letters of unchanged rows
            self._plan.letters[key] = version, letters
        return letters

    # -- gradients

    def add(self, halo: HaloSlice, message: Tensor, places: Sequence[Tensor]) -> None:
        assert self._returned is not None
        self._returned.write(halo, message).wait()

    def close(self) -> None:
        """Add up the gradients that other workers have returned, in the order of their ranks."""
        self._letters = {}
        self._finish_writing(0)
        if self._back is None:
            return
        group, me = self._group, self._group.rank
        returned = group.swap(self._returned, f"end of {self._signature}")
        number = len(group.local_peers)
        for reader in range(group.world_size):
            for halo in self._slices(me, reader) if reader != me else ():
                message, places = self._buffer(halo, self._back)
                letters = returned[group.local_peers[reader % number]]
                assert letters is not None
                letters.read(halo, message).wait()
                super().add(halo, message, places)
                self._pool.give(message)
        self._pool.shrink(0)

    # -- letters

    def _slices(self, owner: int, reader: int) -> list[HaloSlice]:
        here = owner in self._group.local_peers and reader in self._group.local_peers
        return self._plan.slices(owner, reader, self._layout.local_rows if here else self._layout.tile_rows)

    def _sizes(self, pairs: Sequence[tuple[int, int]], form: RowFormat) -> dict[HaloSlice, int]:
        """Bytes of the messages from owners to readers, or back."""
        return {halo: form.layout(halo.end - halo.begin).nbytes for pair in pairs for halo in self._slices(*pair)}

    def _buffer(self, halo: HaloSlice, form: RowFormat, *, from_pool: bool = True) -> tuple[Tensor, list[Tensor]]:
        """A buffer for a message, and its fields, (rows, ...) each."""
        layout = form.layout(halo.end - halo.begin)
        nbytes = -(-(self._room if from_pool else layout.nbytes) // BLOCK) * BLOCK
        buffer = self._pool.take(nbytes) if from_pool else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return buffer, layout.views(buffer)

    def _start_reading(self, halo: HaloSlice) -> tuple[Any, Tensor, list[Tensor]] | None:
        if self._out is None:
            return None
        buffer, fields = self._buffer(halo, self._out, from_pool=not self._keep)
        return self._letters[halo.owner].read(halo, buffer), buffer, fields

    def _start_writing(self, letters: Letters, halo: HaloSlice, message: Tensor) -> None:
        self._writing.append((letters.write(halo, message), message))
        self._finish_writing(1)

    def _finish_writing(self, left: int) -> None:
        while len(self._writing) > left:
            work, message = self._writing.popleft()
            work.wait()
            self._pool.give(message)
