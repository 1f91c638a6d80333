"""From raw runs to the numbers of a table: medians with their spread, ratios within the same repeat, shares."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from benchmarks.bounds import share
from benchmarks.results import SINGLE, Results, Run


class Spread(NamedTuple):
    """Median, least and greatest of the repeats."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """The spread of at least one value."""
        listed = list(values)
        return cls(median(listed), min(listed), max(listed))

    def text(self, digits: int = 2) -> str:
        """As `1.20 (1.10-1.40)`, or the median alone where all are the same."""
        middle = f"{self.median:.{digits}f}"
        if self.least == self.greatest:
            return middle
        return f"{middle} ({self.least:.{digits}f}-{self.greatest:.{digits}f})"


@dataclass(frozen=True)
class Row:
    """One model with W workers in one mode.

    seconds: of the median epoch of the slowest worker; floor: dense layers + aggregation of the slowest.
    over_single, over_floor: ratios to single-process DGL and to the floor.
    cost: ratio of all workers' processor seconds to those of single-process DGL.
    rise: peak memory over the state before the first epoch, of each worker, in bytes, median.
    share: see `bounds.share`.
    sent, needed: bytes of the busiest worker an epoch, and what it has to send at least.
    waited: seconds of the worker that waits most.
    difference: greatest difference of an epoch's loss to single-process DGL.
    """

    model: str
    workers: int
    mode: int
    seconds: Spread
    over_single: Spread
    over_floor: Spread
    cost: Spread
    rise: list[float]
    share: Spread
    sent: float
    needed: float
    waited: float
    difference: float


def seconds(run: Run) -> float:
    """The median epoch of the slowest process."""
    return max(median(process.seconds) for process in run.processes)


def processor(run: Run) -> float:
    """Processor seconds of an epoch, of all processes together."""
    return sum(process.processor for process in run.processes)


def floor(run: Run) -> float:
    """Dense layers and aggregation alone, of the slowest worker."""
    return max(process.traffic.dense + process.traffic.aggregation for process in run.processes if process.traffic)


def single_seconds(results: Results, model: str) -> Spread:
    """Of single-process DGL."""
    return Spread.of(seconds(run) for run in results.find(model, SINGLE))


def single_rise(results: Results, model: str) -> float:
    """Peak memory of single-process DGL over the state before the first epoch, in bytes, median."""
    return median(run.processes[0].rise for run in results.find(model, SINGLE))


def summarise(results: Results, model: str, workers: int, mode: int) -> Row:
    """One row of the table, from the repeats that have both this row and single-process DGL."""
    pairs = list(zip(results.find(model, workers, mode), results.find(model, SINGLE), strict=False))
    busiest = [max((p.traffic for p in run.processes if p.traffic), key=lambda t: t.sent) for run, _ in pairs]
    return Row(
        model,
        workers,
        mode,
        Spread.of(seconds(run) for run, _ in pairs),
        Spread.of(seconds(run) / seconds(alone) for run, alone in pairs),
        Spread.of(seconds(run) / floor(run) for run, _ in pairs),
        Spread.of(processor(run) / processor(alone) for run, alone in pairs),
        [median(run.processes[rank].rise for run, _ in pairs) for rank in range(workers)],
        Spread.of(_share(run, alone) for run, alone in pairs),
        median(traffic.sent for traffic in busiest),
        median(traffic.needed for traffic in busiest),
        median(max(p.traffic.waited for p in run.processes if p.traffic) for run, _ in pairs),
        max(loss_difference(run, alone) for run, alone in pairs),
    )


def loss_difference(run: Run, alone: Run) -> float:
    """Greatest difference of an epoch's loss between two runs."""
    pairs = zip(run.processes[0].losses, alone.processes[0].losses, strict=True)
    return max(abs(a - b) for a, b in pairs)


def _share(run: Run, alone: Run) -> float:
    rises, nodes = zip(*((process.rise, process.num_nodes) for process in run.processes), strict=True)
    return share(rises, nodes, alone.processes[0].rise)
