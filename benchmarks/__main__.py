"""The main benchmark, `python -m benchmarks`: models x workers x modes beside single-process DGL, on several graphs."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks import command
from benchmarks.graphs import prepare
from benchmarks.plots import draw_results
from benchmarks.report import construction_table, cost_table, main_section, table, write_section
from benchmarks.results import Results, load
from benchmarks.runs import measure_each
from sar.partition.inspect.text_tables import as_text

GENERATED = ("rmat",)
REAL = "soc_epinions", "coauthor_cs"
"""One with a heavy tail of degrees, and one with wide features (6,805)."""


def main(argv: Sequence[str]) -> None:
    """Measure, or read earlier results, and write tables and pictures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    command.add_common(parser, workers=(1, 2, 4), modes=(1, 2, 3))
    command.add_graphs(parser, "--graph", GENERATED, REAL)
    parser.add_argument("--quick", action="store_true", help="a small generated graph, once, to try the benchmark")
    parser.add_argument("--from", type=Path, dest="earlier", metavar="FILE", help="write results.json anew")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.nodes, arguments.edges, arguments.repeats, arguments.epochs = 1000, 10_000, 1, 2
        arguments.graph = ["rmat"]
    with command.work_directory(arguments.work) as work:
        results = load(arguments.earlier) if arguments.earlier else _measure(argv, arguments, work)
    for one in results:
        print(f"\n{one.graph}\n{as_text(table(one))}")
        print(f"\nProcessor seconds of an epoch: dense layers + aggregation + the rest\n{as_text(cost_table(one))}")
        print(f"\nConstruction, the slowest worker and the highest memory\n{as_text(construction_table(one))}")
        allocator = command.allocator(arguments)
        publish(one, arguments.docs, "" if allocator == "least" else f", {allocator}")


def publish(results: Results, docs: Path, suffix: str = "") -> None:
    """Write the section and the picture of one graph; another allocator's section has a suffix."""
    docs.mkdir(parents=True, exist_ok=True)
    picture = f"benchmarks-{results.graph}{suffix.replace(', ', '-')}.png"
    draw_results(results, docs / picture)
    write_section(docs / "benchmarks.md", results.graph + suffix, main_section(results, picture))


def _measure(argv: Sequence[str], arguments: argparse.Namespace, work: Path) -> list[Results]:
    names = command.graphs_of(arguments.graph, GENERATED, REAL, arguments.data)
    size = command.size_of(arguments)
    graphs = (prepare(name, size, arguments.data, work, arguments.seed) for name in names)
    setting = command.setting_of("benchmarks", argv, arguments)
    return measure_each(graphs, command.plan_of(arguments), setting, work / "results.json")


if __name__ == "__main__":
    command.run_main(main)
