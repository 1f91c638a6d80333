"""Growth of time and memory with the number of edges, at one average degree: `python -m benchmarks.growth`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks import command
from benchmarks.bounds import growth_exponent
from benchmarks.graphs import GeneratedSize, prepare
from benchmarks.plots import draw_growth
from benchmarks.report import MEGA, describe_setting, write_section
from benchmarks.results import Results, load
from benchmarks.runs import measure_each
from benchmarks.summary import Row, summarise
from sar.errors import ConfigError
from sar.partition.inspect.text_tables import as_markdown, as_text

SIZES = 500_000, 1_000_000, 2_000_000, 4_000_000
PICTURE = "benchmarks-growth.png"


def main(argv: Sequence[str]) -> None:
    """Measure, or read earlier results, and write the table and the picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    command.add_common(parser, workers=(2,))
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), metavar="E", help="edges (%(default)s)")
    parser.add_argument("--degree", type=int, default=20, metavar="D", help="edges / nodes (%(default)s)")
    parser.add_argument("--from", type=Path, dest="earlier", metavar="FILE", help="write growth.json anew")
    arguments = parser.parse_args(argv)
    if len(set(arguments.sizes)) < 2:
        raise ConfigError(f"--sizes {arguments.sizes}: an exponent needs at least two sizes.")
    with command.work_directory(arguments.work) as work:
        results = load(arguments.earlier) if arguments.earlier else _measure(argv, arguments, work)
    rows = table(results)
    print(f"\n{as_text(rows)}")
    publish(results, rows, arguments.docs)


def publish(results: Sequence[Results], rows: list[tuple[str, ...]], docs: Path) -> None:
    """Write the section and the picture."""
    docs.mkdir(parents=True, exist_ok=True)
    lines = {label: _row_of_each_size(results, *key) for label, key in _labels(results).items()}
    panels = {
        "seconds / epoch": {label: [row.seconds.median for row in line] for label, line in lines.items()},
        "peak memory of a worker, MB": {label: [max(row.rise) / MEGA for row in line] for label, line in lines.items()},
    }
    draw_growth([one.edges for one in results], panels, docs / PICTURE)
    picture = f"![Epoch time and memory against the number of edges]({PICTURE})"
    parts = describe_setting(results[0].setting), as_markdown(rows), picture
    write_section(docs / "benchmarks.md", "growth", "\n\n".join(parts))


def table(results: Sequence[Results]) -> list[tuple[str, ...]]:
    """Seconds and peak memory for each size, and the exponents of their growth; the header first."""
    sizes = [one.edges for one in results]
    header = ("trained by", "quantity", *(f"{size / MEGA:.3g} million edges" for size in sizes), "exponent")
    rows: list[tuple[str, ...]] = [header]
    for label, key in _labels(results).items():
        line = _row_of_each_size(results, *key)
        times, peaks = [row.seconds.median for row in line], [max(row.rise) / MEGA for row in line]
        rows.append((label, "s / epoch", *(row.seconds.text() for row in line), _exponent(sizes, times)))
        rows.append((label, "MB at peak", *(f"{peak:.0f}" for peak in peaks), _exponent(sizes, peaks)))
    return rows


def _exponent(sizes: Sequence[float], values: Sequence[float]) -> str:
    return f"{round(growth_exponent(sizes, values), 2) + 0.0:.2f}"  # + 0.0: never "-0.00"


def _labels(results: Sequence[Results]) -> dict[str, tuple[str, int, int]]:
    """Model, W and mode of each line, by the name that it gets."""
    return {
        f"{model}, {workers} workers" + f", mode {mode}" * (mode != 1): (model, workers, mode)
        for model in results[0].models()
        for workers, mode in results[0].rows(model)
    }


def _row_of_each_size(results: Sequence[Results], model: str, workers: int, mode: int) -> list[Row]:
    return [summarise(one, model, workers, mode) for one in results]


def _measure(argv: Sequence[str], arguments: argparse.Namespace, work: Path) -> list[Results]:
    sizes = [
        GeneratedSize(edges // arguments.degree, edges, arguments.features) for edges in sorted(set(arguments.sizes))
    ]
    graphs = (prepare("rmat", size, arguments.data, work, arguments.seed) for size in sizes)
    setting = command.setting_of("benchmarks.growth", argv, arguments)
    return measure_each(graphs, command.plan_of(arguments), setting, work / "growth.json")


if __name__ == "__main__":
    command.run_main(main)
