"""What measurements are compared with: ideal memory and ideal epochs; and growth exponents."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


def share(rises: Sequence[float], nodes: Sequence[int], single_rise: float) -> float:
    """Largest ratio, over workers, of peak memory to this worker's part of one process's peak; 1 is ideal.

    Args:
        rises: peak resident memory over the state just before the first epoch, of each worker.
        nodes: of each worker.
        single_rise: as `rises`, of one process with all nodes.
    """
    total = sum(nodes)
    return max(rise * total / (single_rise * count) for rise, count in zip(rises, nodes, strict=True))


def epoch_bound(dense: float, aggregation: float, num_bytes: float, bandwidth: float) -> float:
    """Seconds of an epoch whose transfers hide behind the aggregations: dense + max(aggregation, wire).

    Args:
        dense, aggregation: seconds of computation.
        num_bytes: what the busiest worker sends or receives.
        bandwidth: bytes per second, each way.
    """
    return dense + max(aggregation, num_bytes / bandwidth)


def growth_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The b of values ~ sizes**b: slope of the least-squares line through the logarithms."""
    slope, _ = np.polyfit(np.log(sizes), np.log(values), 1)
    return float(slope)


class Exchanged(NamedTuple):
    """What one layer exchanges of each halo row.

    columns: width of a row.
    constant: it needs no gradient, as the input features.
    values_read: the derivative reads the sources' values, so that dropping them costs another fetch.
    """

    columns: int
    constant: bool = False
    values_read: bool = False


def bytes_needed(
    halo_counts: Sequence[Sequence[int]],
    rank: int,
    layers: Sequence[Exchanged],
    *,
    kept: bool = False,
    item_bytes: int = 4,
) -> int:
    """Bytes that a worker has to send in one epoch.

    Each halo row travels to its readers once, its gradient back once, and the row again where the backward reads it.

    Args:
        halo_counts: [p][r] is the number of rows of worker p that worker r reads.
        rank: the worker.
        layers: of the model.
        kept: fetched rows are kept for the backward (modes 2 and 3).
        item_bytes: of one number on the wire.
    """
    read_by_others = sum(halo_counts[rank])
    read_of_others = sum(row[rank] for row in halo_counts)
    total = 0
    for layer in layers:
        fetches = 1 + (layer.values_read and not kept)
        rows = fetches * read_by_others + (not layer.constant) * read_of_others
        total += rows * layer.columns * item_bytes
    return total
