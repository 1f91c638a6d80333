"""Tables and picture of `benchmarks.scale`: what was measured by size, and what is computed from it."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.control_group import Taken
from benchmarks.plots import draw_timeline
from benchmarks.report import publish, replace_section

MODELS = {"SAGE": "SAGE, DGL", "GAT": "GAT, DGL", "GCN": "GCN, PyTorch Geometric"}
GIGA = 1e9
PICTURE = "scale.png"
PAPERS = 111_059_956, 1_615_685_872
"""Nodes and edges of ogbn-papers100M."""
WIRE = {"SAGE": 128 + 2 * (256 + 16), "GAT": 3 * (128 + 128 + 16), "GCN": 2 * (256 + 256 + 16)}
"""Numbers that a row of another host takes in an epoch: values and gradients of each layer, of attention values twice;
features, which SAGE takes first, have no gradient."""
HOSTS, BYTES_PER_SECOND = 4, 1.25e9  # 10 Gbit/s


@dataclass(frozen=True)
class Size:
    """What the steps took on the graph of one size."""

    nodes: int
    edges: int
    parts: int
    steps: dict[str, Taken]

    def epoch(self, model: str) -> dict[str, Any]:
        """What the last epoch took."""
        return self.steps[f"{model} train"].said[-1]


class Quantity(NamedTuple):
    """A line of the table: of a step, with a number for each size that has the step, or with terms of a sum."""

    step: str
    name: str
    terms: Callable[[Size], tuple[float, ...]]
    grows: bool = True  # whether its exponent means anything

    def values(self, sizes: Sequence[Size]) -> list[tuple[float, ...]]:
        """The terms; none for sizes that were not measured."""
        found: list[tuple[float, ...]] = []
        for size in sizes:
            try:
                found.append(self.terms(size))
            except KeyError:
                found.append(())
        return found

    def exponent(self, sizes: Sequence[Size]) -> float | None:
        """b of value ~ edges**b."""
        known = [(s.edges, sum(v)) for s, v in zip(sizes, self.values(sizes), strict=True) if sum(v) > 0]
        if len(known) < 2 or not self.grows:
            return None
        edges, values = np.log(known).T
        return float(np.polyfit(edges, values, 1)[0])


LOAD, EPOCH, DISK, OUTPUTS = "load, s", "epoch (forward + backward), s", "read + written / epoch, GB", "all outputs, s"


def quantities() -> list[Quantity]:
    """The lines of the table."""
    anonymous = "at the peak without page cache"
    lines = [
        Quantity("all steps", "memory of the group, GB", lambda s: (s.steps["partition"].limit / GIGA,), False),
        Quantity("all steps", anonymous, lambda s: (max(x.anonymous for x in _limited(s)) / GIGA,)),
        Quantity("partition", "s", lambda s: (s.steps["partition"].seconds,)),
    ]
    for key, name in MODELS.items():
        lines += (Quantity(name, title, partial(terms, key), grows) for title, terms, grows in OF_MODEL)
    return lines


def _epoch_terms(model: str, size: Size) -> tuple[float, float]:
    epoch = size.epoch(model)
    return epoch["forward"], epoch["seconds"] - epoch["forward"]


OF_MODEL: tuple[tuple[str, Callable[[str, Size], tuple[float, ...]], bool], ...] = (
    (LOAD, lambda model, size: (size.steps[f"{model} train"].said[0]["loaded"],), True),
    (EPOCH, _epoch_terms, True),
    ("system / processor time", lambda model, size: (system_share(size.epoch(model)),), False),
    (DISK, lambda model, size: (size.epoch(model)["read"] / GIGA, size.epoch(model)["written"] / GIGA), True),
    (OUTPUTS, lambda model, size: (size.steps[f"{model} infer"].seconds,), True),
)


def system_share(epoch: dict[str, Any]) -> float:
    """Of the processors' time, 0 to 1."""
    return epoch["system"] / max(epoch["system"] + epoch["user"], 1e-9)


def write(docs: Path, command: str, conditions: str, sizes: Sequence[Size]) -> None:
    """Write docs/scale.md, its picture, and the sentence of the README beside docs/."""
    page, largest = docs / "scale.md", sizes[-1]
    limited = {name: taken for name, taken in largest.steps.items() if not name.endswith("whole")}
    draw_timeline({name: taken.samples for name, taken in limited.items()}, _limited(largest)[0].limit, docs / PICTURE)
    picture = f"![Memory over time, from edges to outputs, {million(largest.edges)} edges]({PICTURE})"
    publish(page, "scale", f"- command: {command}\n{conditions}", measured(sizes), picture)
    publish(page, "one process", f"- command: {command}", whole(sizes))
    publish(page, "papers100M", f"- command: {command}; computed, not measured", papers(sizes))
    readme = docs.parent / "README.md"
    if readme.exists():
        replace_section(readme, "scale", sentence(largest, conditions))


def measured(sizes: Sequence[Size]) -> list[tuple[str, ...]]:
    """A line for each quantity; the header first."""
    rows = [("step", "quantity", *(f"{million(size.edges)} edges" for size in sizes), "exponent")]
    for line in quantities():
        values, slope = line.values(sizes), line.exponent(sizes)
        if any(values):
            rows.append((line.step, line.name, *map(cell, values), "" if slope is None else f"{slope + 0.0:.2f}"))
    return rows


def whole(sizes: Sequence[Size]) -> list[tuple[str, ...]]:
    """Seconds of an epoch in one process without sar, or what became of it; the header first."""
    rows = [("model", "GB of memory", *(f"{million(size.edges)} edges" for size in sizes))]
    for model, name in MODELS.items():
        runs = [size.steps.get(f"{model} whole") for size in sizes]
        known = [run for run in runs if run is not None]
        if known:
            cells = ("" if run is None else "out of memory" if run.status else _whole_cell(run) for run in runs)
            rows.append((name, short(known[0].limit / GIGA), *cells))
    return rows


def _whole_cell(run: Taken) -> str:
    return f"{short(run.said[-1]['seconds'])} s, {short(run.anonymous / GIGA)} GB"


def papers(sizes: Sequence[Size]) -> list[tuple[str, ...]]:
    """Hours and bytes on the graph of `PAPERS`, computed from the largest size; the header first."""
    columns = "partition, h", "load, h", "h / epoch", "disk, TB / epoch", "network, TB / epoch", "outputs, h"
    rows: list[tuple[str, ...]] = [("model", *columns)]
    largest, lines = sizes[-1], quantities()
    factor = PAPERS[0] / largest.nodes
    others = largest.steps["partition"].said[-1]["replication_factor"] - 1  # rows of other parts over own ones

    def grown(step: str, name: str) -> float:
        """A quantity in proportion to the nodes, or with its exponent if that is more than 1."""
        [line] = (line for line in lines if line[:2] == (step, name))
        return sum(line.terms(largest)) * factor ** max(line.exponent(sizes) or 1, 1)

    for model, name in MODELS.items():
        if f"{model} train" not in largest.steps or f"{model} infer" not in largest.steps:
            continue
        cells = []
        for hosts in (1, HOSTS):
            sent = PAPERS[0] * others * (1 - 1 / hosts) / hosts * WIRE[model] * 4  # bytes to each host
            wire = sent / BYTES_PER_SECOND
            hours = [grown("partition", "s"), grown(name, LOAD) / hosts, grown(name, EPOCH) / hosts + wire]
            outputs = grown(name, OUTPUTS) / hosts + wire / 2  # at most half of it is values
            terabytes = [grown(name, DISK) / 1e3 / hosts, sent / 1e12]
            cells.append([*(one / 3600 for one in hours), *terabytes, outputs / 3600])
        rows.append((name, *(f"{short(one)} / {short(four)}" for one, four in zip(*cells, strict=True))))
    return rows


def sentence(size: Size, conditions: str) -> str:
    """What the README says of the largest size."""
    numbers = [size.steps["partition"].seconds]
    numbers += [size.epoch("SAGE")["seconds"], size.steps["SAGE infer"].seconds]
    partition, epoch, outputs = (short(number) for number in numbers)
    [cores] = re.findall(r"\d+ cores", conditions)
    graph = f"{million(size.nodes)} nodes with 128 features and {million(size.edges)} edges"
    memory = f"{size.steps['partition'].limit / 2**30:.2g} GiB of memory, page cache included"
    return (
        f"{graph}, in {memory}, on {cores}: {partition} s to partition, {epoch} s an epoch of GraphSAGE, "
        f"{outputs} s for the outputs ([all figures](docs/scale.md))."
    )


def cell(terms: tuple[float, ...]) -> str:
    """A number, or a sum and its terms."""
    total = short(sum(terms)) if terms else ""
    return total if len(terms) < 2 else f"{total} ({' + '.join(map(short, terms))})"


def million(count: int) -> str:
    """A count in words."""
    return f"{count / 1e6:g} million"


def short(value: float) -> str:
    """Three digits, but no more than there are before the point if there are more."""
    digits = max(2 - math.floor(math.log10(value)), 0) if value > 0 else 0
    return f"{value:,.{min(digits, 2)}f}"


def _limited(size: Size) -> list[Taken]:
    """The steps of the sequence."""
    return [taken for name, taken in size.steps.items() if not name.endswith("whole")]
