"""The main benchmark, `python -m benchmarks`: models, numbers of workers and modes, compared with one DGL process."""

from collections.abc import Callable, Sequence
from itertools import product

from benchmarks import command
from benchmarks.graphs import prepare
from benchmarks.measure import multiplies_bfloat16
from benchmarks.plots import draw_bars
from benchmarks.report import MEGA, publish
from benchmarks.runs import Results, Run, Way, in_bfloat16, run_all
from sar.partition.assign.assigning import ORDERS

GRAPHS = "rmat", "soc_epinions", "coauthor_cs"
"""A generated graph, one with skewed degrees, and one with 6,805 features."""
HEADER = ("model", "trained by", "mode", "s / epoch", "/ DGL", "MB at peak", "share", "MB sent")


def main(argv: Sequence[str]) -> None:
    """Run the benchmark, and write the table and picture of each graph when it is done."""
    parser = command.new_parser("benchmarks", __doc__)
    command.add_training(parser, workers=(1, 2, 4))
    parser.add_argument("--modes", nargs="+", type=int, choices=(1, 2, 3), default=[1, 2, 3], help="(%(default)s)")
    order = "of the nodes of a partition, as in sar partition (%(default)s)"
    parser.add_argument("--order", nargs="+", choices=ORDERS, default=["clusters"], help=order)
    parser.add_argument("--graph", nargs="+", metavar="NAME", help=f"default: of {', '.join(GRAPHS)} those in --data")
    parser.add_argument("--bf16", action="store_true", help="also in bfloat16 (autocast), as DGL")
    arguments = parser.parse_args(argv)
    there = [name for name in GRAPHS if name == "rmat" or (arguments.data / f"{name}.npz").exists()]
    settings = product(arguments.workers, arguments.modes, arguments.order)
    ways = [dgl_way(0), *(dgl_way(*one) for one in settings)]
    if arguments.bf16:
        ways = [each for way in ways for each in (in_bfloat16(way), way)]
    plan, conditions = command.plan_of(arguments, ways), command.conditions_of(argv, arguments)
    with command.work_directory(arguments.work) as work:
        for name in arguments.graph or there:
            graph = prepare(name, command.size_of(arguments), arguments.data, work, arguments.seed)
            results = run_all(graph, plan)
            # Another allocator and bfloat16 have separate sections.
            section = graph.name if arguments.allocator == "least" else f"{graph.name}, {arguments.allocator}"
            section += ", bfloat16" * arguments.bf16
            picture = ""
            if is_timed(results):
                file = f"benchmarks-{section.replace(', ', '-')}.png"
                draw_bars(bars(results), arguments.docs / file)
                picture = f"![Epoch time, memory and bytes of each model on {graph.name}]({file})"
            text = f"{graph.words()}\n\n{conditions}"
            publish(arguments.docs / "benchmarks.md", section, text, table(results), picture)


def dgl_way(workers: int, mode: int = 1, order: str = "clusters") -> Way:
    """`workers` of sar, named as in the table, or one DGL process if 0."""
    name = f"{workers} worker{'s' * (workers > 1)}, sar{'' if order == 'clusters' else f', order {order}'}"
    return Way(name if workers else "1 process, DGL", workers, mode, order=order)


def table(results: Results) -> list[tuple[str, ...]]:
    """A row for each model and way, after `HEADER`."""
    rows: list[tuple[str, ...]] = [HEADER]
    timed = is_timed(results)
    for model, way in results.runs:
        seconds = results.spread(model, way, lambda run: run.seconds).text() if timed else ""
        rise = f"{results.spread(model, way, lambda run: run.rise).median / MEGA:.0f}"
        over = results.spread(model, way, lambda run: run.over_single).text() if timed else ""
        if not way.workers:
            rows.append((model, way.name, "", seconds, "1" if over == "1.00" else over, rise, "", ""))
            continue
        share = results.spread(model, way, lambda run: run.share).text()
        sent = f"{results.spread(model, way, lambda run: run.sent).median / MEGA:.1f}"
        rows.append((model, way.name, str(way.mode), seconds, over, rise, share, sent))
    return rows


def is_timed(results: Results) -> bool:
    """Whether times mean anything: not in bfloat16 if the processor emulates it."""
    return multiplies_bfloat16() or not any(way.bf16 for _, way in results.runs)


def bars(results: Results) -> dict[str, dict[str, dict[str, float]]]:
    """Medians by model, quantity and way."""
    quantities: dict[str, Callable[[Run], float]] = {
        "seconds / epoch": lambda run: run.seconds,
        "peak memory, MB": lambda run: run.rise / MEGA,
    }
    if any(way.workers > 1 for _, way in results.runs):
        quantities["MB sent / epoch"] = lambda run: run.sent / MEGA
    found: dict[str, dict[str, dict[str, float]]] = {}
    for model, way in results.runs:
        label = f"W = {way.workers}, mode {way.mode}, {way.order}".removesuffix(", clusters") if way.workers else "DGL"
        label += ", bfloat16" * way.bf16
        for name, number in quantities.items():
            found.setdefault(model, {}).setdefault(name, {})[label] = results.spread(model, way, number).median
    return found


if __name__ == "__main__":
    command.run_main(main)
