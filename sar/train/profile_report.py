"""What a profile found, as tables and as a picture."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace

from sar.comm.statistics import Statistics
from sar.comm.transport import Spilled
from sar.common_tuples import StrPath
from sar.errors import ConfigError
from sar.partition.inspect.text_tables import as_text

ELSEWHERE = "everything else"
LAYER_WIDTH = 16
MEGA = 1e6
NOTE = """Seconds; MB of a million bytes. By layer: means of the workers, but MB peak is
the most of any, above the level before. max/mean: compute of the slowest one."""
TURNS = """Seconds are those of each worker's turns; what left memory is the most at any turn."""
LEAST_SECONDS = 1e-3  # below it, how workers differ is chance


@dataclass(frozen=True)
class Spent:
    """What one worker spent on a layer, or what else has a row.

    layer: name of a module; of a distributed call made outside modules; or `ELSEWHERE`.
    direction: "forward" or "backward"; empty for calls outside modules, and for `ELSEWHERE`.
    seconds: with waits.
    peak: the most bytes of resident memory (on CUDA devices, of tensors) above the level before the profile; None where
        it was not measured.
    moved: bytes, and seconds waited.
    """

    layer: str
    direction: str
    seconds: float = 0.0
    peak: int | None = None
    moved: Statistics = field(default_factory=Statistics)

    def __add__(self, other: "Spent") -> "Spent":
        peaks = [one.peak for one in (self, other) if one.peak is not None]
        seconds, moved = self.seconds + other.seconds, self.moved + other.moved
        return Spent(self.layer, self.direction, seconds, max(peaks, default=None), moved)

    def __truediv__(self, count: int) -> "Spent":
        """The share of one of `count` workers or epochs."""
        moved = Statistics(*(value / count for value in astuple(self.moved)))
        return replace(self, seconds=self.seconds / count, moved=moved)

    @property
    def compute(self) -> float:
        """Seconds without waits."""
        return self.seconds - self.moved.seconds_waited


def total(rows: Sequence[Spent]) -> Spent:
    """All of one worker."""
    return sum(rows, Spent("all", ""))


def by_layer(workers: Sequence[Sequence[Spent]]) -> list[list[Spent]]:
    """For each layer and direction, in the order of a worker's rows, what each worker spent; `ELSEWHERE` is last."""
    keys = dict.fromkeys((one.layer, one.direction) for rows in workers for one in rows)
    keys[ELSEWHERE, ""] = keys.pop((ELSEWHERE, ""), None)
    found = [{(one.layer, one.direction): one for one in rows} for rows in workers]
    return [[rows.get(key, Spent(*key)) for rows in found] for key in keys]


def mean_of(of_workers: Sequence[Spent]) -> Spent:
    """The mean of workers, with the greatest peak."""
    return sum(of_workers, Spent("", "")) / len(of_workers)


def imbalance(of_workers: Sequence[Spent]) -> float | None:
    """Greatest over mean compute; None where that is too short to tell."""
    mean = mean_of(of_workers).compute
    return max(one.compute for one in of_workers) / mean if mean >= LEAST_SECONDS else None


def tables(workers: Sequence[Sequence[Spent]], spilled: Sequence[Spilled] = ()) -> str:
    """By layer, and by worker; 80 columns wide. With what workers have spilled, if they have."""
    totals = [total(rows) for rows in workers]
    layers: list[tuple[str, ...]] = [("layer", "pass", "compute", "wait", "MB out", "MB in", "MB peak", "max/mean")]
    layers += [_layer_cells(of_workers) for of_workers in (*by_layer(workers), totals)]
    each: list[tuple[str, ...]] = [("worker", "compute", "wait", "of it late", "MB out", "MB in", "MB peak")]
    for rank, one in enumerate(totals):
        compute, wait, *moved = _cells(one)
        each.append((str(rank), compute, wait, _number(one.moved.seconds_late, 3), *moved))
    pieces = [_title(workers), as_text(layers), as_text(each, left=1), NOTE]
    if spilled:
        turns: list[tuple[str, ...]] = [("worker", "MB left memory", "MB written", "MB read")]
        turns += [(str(r), *(_number(count / MEGA, 2) for count in one)) for r, one in enumerate(spilled)]
        pieces += [as_text(turns, left=1), TURNS]
    return "\n\n".join(pieces)


def _title(workers: Sequence[Sequence[Spent]]) -> str:
    how_many = f"{len(workers)} worker{'s' if len(workers) > 1 else ''}"
    return f"profile of {max(total(rows).seconds for rows in workers):.2f} s on {how_many}"


def _layer_cells(of_workers: Sequence[Spent]) -> tuple[str, ...]:
    layer, uneven = of_workers[0].layer, imbalance(of_workers)
    name = layer if len(layer) <= LAYER_WIDTH else f"…{layer[1 - LAYER_WIDTH :]}"
    return name, of_workers[0].direction, *_cells(mean_of(of_workers)), "-" if uneven is None else f"{uneven:.2f}"


def _cells(spent: Spent) -> list[str]:
    """Compute, wait, MB out and in, peak."""
    moved = [_number(count / MEGA, 2) for count in (spent.moved.bytes_sent, spent.moved.bytes_received)]
    peak = "-" if spent.peak is None else _number(spent.peak / MEGA, 1)
    return [_number(spent.compute, 3), _number(spent.moved.seconds_waited, 3), *moved, peak]


def _number(value: float, digits: int) -> str:
    """In six characters."""
    return f"{value:.{digits if value < 10 ** (5 - digits) else 0}f}"


def draw(workers: Sequence[Sequence[Spent]], file: StrPath) -> None:
    """Bars by layer: seconds of compute and of waits, bytes, and the peak of memory."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("pictures need matplotlib, which is not installed: pip install matplotlib") from error
    layers = by_layer(workers)
    means = [mean_of(of_workers) for of_workers in layers]
    others = [("MB sent, mean", "#66a182", [one.moved.bytes_sent / MEGA for one in means])]
    if any(one.peak is not None for one in means):
        others.append(("MB at the peak, most", "#9db4c0", [(one.peak or 0) / MEGA for one in means]))
    figure = Figure(figsize=(11, 1.5 + 0.32 * len(layers)), dpi=120, layout="constrained")
    times, *beside = figure.subplots(1, 1 + len(others), sharey=True, width_ratios=(2, *[1] * len(others)))
    places, reached = range(len(layers)), [0.0] * len(layers)
    for colour, label, seconds in (
        ("#2e6f95", "compute", [one.compute for one in means]),
        ("#d1495b", "wait for messages", [one.moved.seconds_waited - one.moved.seconds_late for one in means]),
        ("#edae49", "wait for workers that come late", [one.moved.seconds_late for one in means]),
    ):
        times.barh(places, seconds, left=reached, color=colour, label=label)
        reached = [left + width for left, width in zip(reached, seconds, strict=True)]
    slowest = [max(one.compute for one in of_workers) for of_workers in layers]
    times.plot(slowest, places, "|", color="#30323d", markersize=11, markeredgewidth=2, label="compute, slowest worker")
    times.set_title("seconds, mean", fontsize=11)
    for axes, (title, colour, values) in zip(beside, others, strict=True):
        axes.barh(places, values, color=colour)
        axes.set_title(title, fontsize=11)
    times.set_yticks(places, [f"{one[0].layer} {one[0].direction}".strip() for one in layers])
    times.invert_yaxis()
    for axes in (times, *beside):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", alpha=0.25)
        axes.set_axisbelow(True)
    figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(_title(workers), fontsize=11)
    figure.savefig(file)
