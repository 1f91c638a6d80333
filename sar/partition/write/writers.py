"""The processes that write a directory together, one or many, and how rows get to the one that writes them.

Process r of W writes parts P r / W to P (r + 1) / W. Of the input, cut into pieces, it reads every W-th, beginning with
piece r. Processes go through the pieces in step, so that what arrives in a round, by sender, is in the input's order.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from sar.comm import session
from sar.comm.collectives import all_reduce, exchange_tensors
from sar.comm.session import current_group
from sar.data.arrays import Array
from sar.partition.graph_source import CHUNK_ROWS


@dataclass(frozen=True)
class Writers:
    """This process's place among those that work together."""

    rank: int = 0
    size: int = 1

    @classmethod
    def here(cls) -> "Writers":
        """All workers after `sar.initialize_comms`; else this process alone."""
        return cls(session.rank(), session.world_size()) if session.is_initialized() else cls()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Agrees that all processes partition, and passes an error raised inside on to all others."""
        with current_group().guard() if self.size > 1 else nullcontext() as group:
            if group is not None:
                group.agree("partitioning (sar.partition_graph, sar.write_partitions), which all workers do together")
            yield

    def parts_of(self, rank: int, num_parts: int) -> range:
        return range(num_parts * rank // self.size, num_parts * (rank + 1) // self.size)

    def shares(self, total: int, rows: int) -> Iterator[tuple[int, int]]:
        """What this process reads of `total` rows: [start, end), at most `rows` each, as often on every process."""
        for first in range(0, total, rows * self.size):
            start = min(total, first + self.rank * rows)
            yield start, min(total, start + rows)

    def sum(self, counts: Array) -> Array:
        """The sum of int64 arrays over all processes."""
        total = torch.from_numpy(counts.astype(np.int64))
        if self.size > 1:
            all_reduce(total, move_to_comm_device=True)
        return total.numpy()

    def all(self, flag: bool) -> bool:
        """Whether a flag is set on all processes; also, nobody returns before all have come here."""
        return int(self.sum(np.array([flag]))[0]) == self.size

    def lowest_rank_with(self, key: str) -> int:
        """The lowest rank that passes the same string."""
        own = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8).digest(), np.int64).copy()
        return next(rank for rank, key_of in enumerate(self._exchange([own] * self.size)) if key_of == own)

    def broadcast(self, values: Array) -> Array:
        """The array of process 0 on every process, where an array of the same shape and type is overwritten."""
        if self.size > 1:
            for start in range(0, len(values), CHUNK_ROWS):
                rows = values[start : start + CHUNK_ROWS]
                rows[:] = self._exchange([rows if self.rank == 0 else rows[:0]] * self.size)[0]
        return values

    def broadcast_strings(self, strings: Sequence[str]) -> list[str]:
        """The strings of process 0 on every process."""
        text = np.frombuffer(json.dumps(list(strings)).encode(), np.uint8).copy()
        text = self._exchange([text if self.rank == 0 else text[:0]] * self.size)[0]
        return json.loads(text.tobytes())

    def deliver(self, rows: Array, counts: Array) -> Iterator[tuple[int, Array]]:
        """Send rows to the processes that own their parts; yield what arrives here, by part, in the input's order.

        Rows, (n, ...), are sorted by part; `counts`, (P,), has how many are for each.
        """
        num_parts = len(counts)
        received = [(rows, counts)]
        if self.size > 1:
            ends = np.concatenate([[0], counts.cumsum()])
            spans = [self.parts_of(rank, num_parts) for rank in range(self.size)]
            sizes = self._exchange([counts[span.start : span.stop] for span in spans])
            pieces = self._exchange([rows[ends[span.start] : ends[span.stop]] for span in spans])
            received = list(zip(pieces, sizes, strict=True))
        for piece, size in received:
            if len(piece):
                own_parts = self.parts_of(self.rank, num_parts)
                for part, of_part in zip(own_parts, np.split(piece, size.cumsum()[:-1]), strict=True):
                    if len(of_part):
                        yield part, of_part

    def _exchange(self, arrays: list[Array]) -> list[Array]:
        """Send `arrays[q]` to every process q; return what every process sent, of equal dtype and row shape."""
        sample = arrays[0]
        if self.size == 1:
            return arrays
        if not prod(sample.shape[1:]):  # of rows without bytes only the number can travel
            numbers = self._exchange([np.array([len(a)]) for a in arrays])
            return [np.empty((int(number[0]), *sample.shape[1:]), sample.dtype) for number in numbers]
        sent = [torch.from_numpy(np.ascontiguousarray(a).reshape(-1).view(np.uint8)) for a in arrays]
        arrived = exchange_tensors(sent)
        return [a.cpu().numpy().view(sample.dtype).reshape(-1, *sample.shape[1:]) for a in arrived]
