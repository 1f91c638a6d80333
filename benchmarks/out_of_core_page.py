"""Writes what `benchmarks.out_of_core` measured into docs/out_of_core.md: a table, and pictures of memory and time.

python -m benchmarks.out_of_core --work bench
python -m benchmarks.out_of_core_page bench/out-of-core.json --command "python -m benchmarks.out_of_core"
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.command import DOCS, run_main
from benchmarks.plots import draw_out_of_core
from benchmarks.report import describe_setting, write_section
from benchmarks.results import read, setting
from sar.partition.inspect.text_tables import as_markdown

PICTURE = "out_of_core.png"
HEADER = ("model", "partitions", "MB in training", "MB / in memory", "s / epoch", "s / in memory")


class Point(NamedTuple):
    """One training; fields as in `benchmarks.out_of_core.Run`."""

    model: str
    parts: int
    losses: list[float]
    megabytes: float
    seconds: float


def main(argv: Sequence[str]) -> None:
    """Write the section and the picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.out_of_core_page", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("results", type=Path, help="out-of-core.json")
    parser.add_argument("--command", default="python -m benchmarks.out_of_core", help="that made them")
    parser.add_argument("--note", default="nothing else ran", help="what else the machine did (%(default)s)")
    parser.add_argument("--docs", type=Path, default=DOCS, metavar="DIR", help="gets out_of_core.md and the picture")
    arguments = parser.parse_args(argv)
    points = read(arguments.results, lambda content: [_point(one) for one in content])
    draw_out_of_core(_curves(points), arguments.docs / PICTURE)
    described = describe_setting(setting(f"`{arguments.command}`", {"meanwhile": arguments.note}))
    picture = f"![Memory and time of an epoch against the number of partitions]({PICTURE})"
    text = "\n\n".join([picture, as_markdown(table(points)), described])
    write_section(arguments.docs / "out_of_core.md", "out of core", text)


def _point(one: dict[str, object]) -> Point:
    return Point(**{name: one[name] for name in Point._fields})  # type: ignore[arg-type]


def table(points: Sequence[Point]) -> list[tuple[str, ...]]:
    """A row for each model and number of partitions; `HEADER` first."""
    rows: list[tuple[str, ...]] = [HEADER]
    for point in points:
        whole = _whole(points, point.model)
        memory, time = whole.megabytes / point.megabytes, point.seconds / whole.seconds
        sizes = f"{point.megabytes:.0f}", "1" if point is whole else f"1 / {memory:.1f}"
        times = f"{point.seconds:.2f}", f"{time:.2f}"
        rows.append((point.model, "in memory" if point is whole else str(point.parts), *sizes, *times))
    return rows


def _whole(points: Sequence[Point], model: str) -> Point:
    """The whole graph in memory."""
    return next(point for point in points if point.model == model and point.parts == 1)


def _curves(points: Sequence[Point]) -> dict[str, list[tuple[int, float, float]]]:
    """Partitions, MB, and time over that in memory, by model."""
    models = dict.fromkeys(point.model for point in points)
    return {
        model: [
            (point.parts, point.megabytes, point.seconds / _whole(points, model).seconds)
            for point in points
            if point.model == model
        ]
        for model in models
    }


if __name__ == "__main__":
    run_main(main)
