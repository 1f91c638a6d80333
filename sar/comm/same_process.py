"""The exchange of rows between workers that share a process: read in place or copied, without messages.

[Note: rows of the same process]
The workers of one process (`Transport.local_peers`) have their turns one after the other. All let the others read their
rows at one meeting (`Group.share`) and, if gradients return, add to their totals. Then each, in its turn, goes through
the rows of its process's other workers, and after that through those of other processes as they arrive. In that turn
the process sends rows of all its workers, to the workers of other processes that have their turn, too. Gradients are
added by the worker that has the turn, beginning with the first one: in the same order in each epoch, to the last bit. A
second meeting ends an exchange that returns gradients, because only then a total is complete.

A caller that can (`LocalFields`) reads the rows in place and adds to totals itself: with copies, training GAT in 8
partitions took 1.3 times the processor time. Otherwise rows are copied tile by tile, and rounded as those that leave
the process are, so that results equal those of as many processes.

[Note: reading ahead]
Out of core, shared rows are mapped from a file, and the first use of a page that the system has dropped waits for the
disk. So before a tile is computed, we prefetch the next one and its gradients. We do not prefetch neighbouring rows: if
memory is short, these would displace the rows of the next tiles. Prefetching stops after some turns without reads from
a disk, and starts again with the next read.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from sar.comm.group import Group
from sar.comm.rows import RowFormat
from sar.comm.statistics import counters
from sar.comm.tiles import UNLIMITED_ROWS, GradientReturn, HaloPlan, LocalFields, Settings, Tile


class SharedRows:
    """The rows that the workers of this process share in one exchange, and the totals of their gradients.

    Args:
        fields: rows that travel; None to fetch nothing.
        local: further rows that only workers of this process read; None if the caller cannot read rows in place.
        returns: accumulates the returned gradients; None to return none.
        keep: whether the caller keeps the rows it fetches, or has kept them in the forward.
        tile_rows: rows of a tile that is copied.
    """

    def __init__(
        self,
        group: Group,
        plan: HaloPlan,
        settings: Settings,
        signature: str,
        fields: Sequence[Tensor] | None,
        local: LocalFields | None,
        returns: GradientReturn | None,
        *,
        keep: bool,
        tile_rows: int,
    ) -> None:
        self._group, self._plan, self._signature, self._returns = group, plan, signature, returns
        self._fetches, self._tile_rows = fields is not None, tile_rows
        rows, totals = list(fields or ()), [total.detach() for total in returns.totals] if returns is not None else []
        formats = RowFormat.of(rows), RowFormat.of(totals)
        wires = settings.wire_features, settings.wire_gradients
        self._out, self._back = (form.narrowed(wire) for form, wire in zip(formats, wires, strict=True))
        # Count the bytes that would travel between processes: of rows that this worker reads, and that others read.
        counts, me = plan.halo_counts, group.rank
        received, sent = sum(of_owner[me] for of_owner in counts) - counts[me][me], sum(counts[me]) - counts[me][me]
        counters.bytes_sent += self._out.row_bytes * sent + self._back.row_bytes * received
        counters.bytes_received += self._out.row_bytes * received + self._back.row_bytes * sent
        narrowed = [form.fields for form in formats] != [self._out.fields, self._back.fields]
        rounded = narrowed or (keep and wires != (None, None))
        self._in_place = local is not None and not rounded
        if local is not None and self._in_place:
            rows += local.fields if self._fetches else ()
            totals += (total.detach() for total in local.totals)
        self._shared = group.share(rows, totals, signature, in_order=returns is not None)
        self.columns = {owner: [tensor.rows for tensor in shared.read] for owner, shared in self._shared.items()}
        self.totals = {owner: [tensor.rows for tensor in shared.added_to] for owner, shared in self._shared.items()}

    def tiles(self) -> Iterator[Tile]:
        """Iterate over the rows that this worker reads of others in its process: see [Note: reading ahead]."""
        slices = self._plan.local_slices(UNLIMITED_ROWS if self._in_place else self._tile_rows)
        tiles = [(halo, self._plan.rows_of(halo), self._shared[halo.owner]) for halo in slices]
        for i, (halo, index, owner) in enumerate(tiles):
            for _, next_index, next_owner in tiles[0:2] if i == 0 else tiles[i + 1 : i + 2]:
                for tensor in (*next_owner.read, *next_owner.added_to):
                    tensor.will_need(next_index)
            if self._in_place:
                rows, totals = ([tensor.rows for tensor in shared] for shared in owner)
                yield Tile(halo, rows if self._fetches else None, totals or None, index)
                continue
            rows = [column.read(index) for column in owner.read]
            self._out.round(rows)
            if self._returns is None:
                yield Tile(halo, rows if self._fetches else None, None)
                continue
            totals = [column.rows for column in owner.added_to]
            grads = [total.new_full((len(index), *total.shape[1:]), self._returns.start) for total in totals]
            yield Tile(halo, rows if self._fetches else None, grads)
            self._back.round(grads)
            for total, grad in zip(totals, grads, strict=True):
                self._returns.add(index, grad, total)

    def close(self) -> None:
        """Release the shared rows. If gradients return, meet again, after which all totals are complete."""
        totals = self._shared[self._group.rank].added_to
        for shared in (self._shared, self.columns, self.totals):  # the exchange has these, too
            shared.clear()
        if self._returns is not None:
            self._group.share([], [], f"end of {self._signature}")
            for total in totals:
                total.will_need()
