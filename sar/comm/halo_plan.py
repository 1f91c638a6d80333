"""Who reads which rows of whom, cut into tiles: the unit of exchange and of computation."""

from typing import NamedTuple

import torch
from torch import Tensor

from sar.comm.group import Group
from sar.outofcore.group import VirtualGroup
from sar.raw_memory import settled

SCHEDULES = 8
"""Sizes of tiles whose steps a plan keeps, the latest used."""


class HaloSlice(NamedTuple):
    """Rows begin:end of a halo list, on their way between this worker and `peer`: `size` of them, or the last ones.

    owner: which virtual worker of this process has the rows, where they are sent.
    """

    peer: int
    begin: int
    end: int
    size: int
    owner: int = 0

    @property
    def rows(self) -> int:
        return self.end - self.begin


class Step(NamedTuple):
    """One step of the exchange: the tile this worker receives and the tile it sends, if any."""

    place: int  # within its round; part of the message's address
    receive: HaloSlice | None
    send: HaloSlice | None


class HaloPlan:
    """The halo lists of one relation, seen from one worker.

    Args:
        rank: this worker.
        send_rows: for every worker, the rows of this one that it reads, ascending, (H_q,) int32 or int64.
        halo_counts: (W, W) int64: entry [p, r] is the number of rows of p that r reads; equal on all workers.
        mean_rows: rows of a worker, averaged over all; equal on all workers.

    Attributes:
        rows_here: `send_rows` of every virtual worker of this process, one after the other; empty without such.
    """

    def __init__(self, rank: int, send_rows: list[Tensor], halo_counts: Tensor, mean_rows: int) -> None:
        self.rank = rank
        self.world_size = len(send_rows)
        self.send_rows = [settled(rows) for rows in send_rows]
        self.halo_counts: list[list[int]] = halo_counts.tolist()
        self.mean_rows = mean_rows
        self.rows_here: list[Tensor] = []
        self._schedules: dict[int, list[Step]] = {}  # by rows of a tile, the latest used last

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self.send_rows)

    def to(self, device: torch.device) -> "HaloPlan":
        send_rows = [rows.to(device) for rows in self.send_rows]
        plan = HaloPlan(self.rank, send_rows, torch.tensor(self.halo_counts), self.mean_rows)
        plan.rows_here = [rows.to(device) for rows in self.rows_here]
        return plan

    @classmethod
    def agreed(cls, group: Group, send_rows: list[Tensor], halos: list[Tensor], rows: int, what: str) -> "HaloPlan":
        """The plan that follows from what each worker reads; a collective call.

        Args:
            group: this worker's end of the group.
            send_rows: as above.
            halos: the rows of each worker that this one reads.
            rows: of this worker.
            what: what errors call the relation.
        """
        own = torch.tensor([*map(len, halos), rows])
        counts = torch.stack(group.all_gather(own, f"halo counts of {what}"))
        plan = cls(group.rank, send_rows, counts[:, :-1].T, int(counts[:, -1].sum()) // group.world_size)
        if isinstance(group, VirtualGroup):
            shared = group.share(group.publish([torch.cat(send_rows)])[0], f"halo lists of {what}")
            plan.rows_here = [one.rows for one in shared]
        return plan

    def schedule(self, tile_rows: int) -> list[Step]:
        """All steps of an exchange with tiles of at most `tile_rows` rows; made once and kept."""
        steps = self._schedules.pop(tile_rows, None)
        self._schedules[tile_rows] = self._make_schedule(tile_rows) if steps is None else steps
        if len(self._schedules) > SCHEDULES:
            del self._schedules[next(iter(self._schedules))]
        return self._schedules[tile_rows]

    def _make_schedule(self, tile_rows: int) -> list[Step]:
        """In round k every worker reads from (rank - k) mod W and sends to (rank + k) mod W.

        A round has as many steps as its longest halo list needs, *on every worker*: so all go through the same sequence
        of steps, and the worker that is furthest behind never waits for anything that has not been posted.
        """
        world, counts = self.world_size, self.halo_counts
        steps = []
        for k in range(1, world):
            source, reader = (self.rank - k) % world, (self.rank + k) % world
            longest = max(counts[(r - k) % world][r] for r in range(world))
            for index in range(-(-longest // tile_rows)):
                receive = halo_slice(source, index, tile_rows, counts[source][self.rank])
                send = halo_slice(reader, index, tile_rows, counts[self.rank][reader])
                steps.append(Step(index, receive, send))
        return steps


def halo_slice(peer: int, index: int, tile_rows: int, rows: int) -> HaloSlice | None:
    """The tile of a halo list of so many rows, if there is such a one."""
    begin = index * tile_rows
    return HaloSlice(peer, begin, min(begin + tile_rows, rows), tile_rows) if begin < rows else None
