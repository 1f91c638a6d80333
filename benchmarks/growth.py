"""Time and memory as the number of edges grows, at a fixed average degree: `python -m benchmarks.growth`."""

from collections.abc import Callable, Sequence

import numpy as np

from benchmarks import command
from benchmarks.__main__ import dgl_way
from benchmarks.graphs import GeneratedSize, prepare
from benchmarks.plots import draw_lines
from benchmarks.report import MEGA, publish
from benchmarks.runs import Results, Run, run_all
from sar.errors import ConfigError

SIZES = 500_000, 1_000_000, 2_000_000, 4_000_000
PICTURE = "benchmarks-growth.png"


def main(argv: Sequence[str]) -> None:
    """Run the benchmark, and write the table and the picture."""
    parser = command.new_parser("benchmarks.growth", __doc__)
    command.add_training(parser, workers=(2,))
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), metavar="E", help="edges (%(default)s)")
    parser.add_argument("--degree", type=int, default=20, metavar="D", help="edges / nodes (%(default)s)")
    arguments = parser.parse_args(argv)
    if len(set(arguments.sizes)) < 2:
        raise ConfigError(f"--sizes {arguments.sizes}: an exponent needs at least two sizes.")
    plan = command.plan_of(arguments, [dgl_way(workers) for workers in (0, *arguments.workers)])
    conditions = command.conditions_of(argv, arguments)
    with command.work_directory(arguments.work) as work:
        sizes = [GeneratedSize(edges // arguments.degree, edges, arguments.features) for edges in arguments.sizes]
        results = [run_all(prepare("rmat", size, arguments.data, work, arguments.seed), plan) for size in sizes]
    edges = [len(one.graph.graph.src) for one in results]
    draw_lines([count / MEGA for count in edges], panels(results), arguments.docs / PICTURE, "million edges")
    picture = f"![Epoch time and memory against the number of edges]({PICTURE})"
    publish(arguments.docs / "benchmarks.md", "growth", conditions, table(edges, panels(results)), picture)


def panels(results: Sequence[Results]) -> dict[str, dict[str, list[float]]]:
    """Medians by size, quantity, and model with workers."""
    quantities: dict[str, Callable[[Run], float]] = {
        "s / epoch": lambda run: run.seconds,
        "MB at peak": lambda run: run.rise / MEGA,
    }
    return {
        quantity: {
            f"{model}, {way.workers} workers": [one.spread(model, way, number).median for one in results]
            for model, way in results[0].runs
            if way.workers
        }
        for quantity, number in quantities.items()
    }


def table(edges: Sequence[int], panels: dict[str, dict[str, list[float]]]) -> list[tuple[str, ...]]:
    """Rows of seconds and memory by size, and the exponent b of value ~ edges**b; the header comes first."""
    rows = [("trained by", "quantity", *(f"{count / MEGA:.3g} million edges" for count in edges), "exponent")]
    for label in panels["s / epoch"]:
        for quantity, lines in panels.items():
            slope, _ = np.polyfit(np.log(edges), np.log(lines[label]), 1)
            digits = 2 if quantity == "s / epoch" else 0
            values = (f"{value:.{digits}f}" for value in lines[label])
            rows.append((label, quantity, *values, f"{round(float(slope), 2) + 0.0:.2f}"))  # + 0.0: never "-0.00"
    return rows


if __name__ == "__main__":
    command.run_main(main)
