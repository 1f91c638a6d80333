"""How fast the network between workers is, for messages such as sar sends."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import permutations
from statistics import median

import torch

from sar.comm.group import Group
from sar.comm.messages import exchange_buffers
from sar.comm.session import current_group

Pairs = Collection[tuple[int, int]]
"""Sender and receiver of each message that travels at the same time."""

ROUND_TRIPS, REPEATS = 20, 5
"""Of which medians are taken."""
_CALL = "measuring the network"


@dataclass(frozen=True)
class NetworkSpeed:
    """What travels between workers, equal on all of them.

    bandwidth: [i][j] bytes a second from worker i to worker j while others are silent; 0 where i is j.
    latency: [i][j] seconds until a byte has come, likewise.
    together: bytes a second that each worker sends, and receives, while all send to all, as in training.
    """

    bandwidth: list[list[float]]
    latency: list[list[float]]
    together: list[float]


def measure_network(size: int) -> NetworkSpeed:
    """Send messages of `size` bytes between each two workers, and between all at once; by all workers together."""
    group = current_group()
    workers = group.world_size
    speeds = torch.zeros(2, workers, workers, dtype=torch.float64)
    with group.guard():
        group.agree(f"{_CALL} with messages of {size} bytes")
        for one, other in permutations(range(workers), 2):
            there, back = [(one, other)], [(other, one)]
            passage = median(_seconds(group, size, [there]) for _ in range(REPEATS))
            round_trip = median(_seconds(group, 1, [there, back]) for _ in range(ROUND_TRIPS))
            if group.rank == other:  # the sender may be done before the message has come
                speeds[0, one, other] = size / passage
            elif group.rank == one:
                speeds[1, one, other] = round_trip / 2
        everybody = list(permutations(range(workers), 2))
        busy = median(_seconds(group, size, [everybody]) for _ in range(REPEATS))
        speeds[0, group.rank, group.rank] = (workers - 1) * size / busy
        found = torch.stack(group.all_gather(speeds, _CALL)).sum(0)
    together = found[0].diagonal().tolist()
    bandwidth, latency = found[0].fill_diagonal_(0).tolist(), found[1].tolist()
    return NetworkSpeed(bandwidth, latency, together)


def _seconds(group: Group, size: int, rounds: Sequence[Pairs]) -> float:
    """Until this worker has sent and received its messages of one round after the other, from a common start."""
    others = range(group.world_size)
    plans = []
    for pairs in rounds:
        sent = [torch.zeros(size * ((group.rank, other) in pairs), dtype=torch.uint8) for other in others]
        into = [torch.zeros(size * ((other, group.rank) in pairs), dtype=torch.uint8) for other in others]
        plans.append((sent, into))
    group.all_gather(torch.zeros(1), _CALL)
    start = time.perf_counter()
    for sent, into in plans:
        exchange_buffers(group, _CALL, sent, into)
    return time.perf_counter() - start
