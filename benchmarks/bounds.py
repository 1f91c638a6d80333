"""What measurements are compared with: ideal memory and ideal epochs; and growth exponents."""

from collections.abc import Sequence

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
